"""What is compared: the workloads, and the arms, each one way to train them.

Plain data, no torch: the parent process that measures stays small. `worker.py` builds what is
named here, inside the ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Workload:
    """A network, its input and its optimizer; `batch` is the samples per rank and step.

    A network of `syncline.models` takes samples of real numbers and has one label for each. `gpt`
    is the benchmark's own: a sample is a row of tokens, and each of them has a label.
    """

    model: str
    sample_shape: tuple[int, ...]
    classes: int
    batch: int
    options: dict[str, Any] = field(default_factory=dict)
    optimizer: Literal["sgd", "adamw"] = "sgd"


WORKLOADS: dict[str, Workload] = {
    "mlp": Workload("mlp", (784,), 10, 32, {"hidden": [128]}),
    "cnn": Workload("cnn", (1, 28, 28), 10, 64),
    "cd-dnn": Workload("cd-dnn", (429,), 9304, 128),
    "vgg-a": Workload("vgg-a", (3, 32, 32), 10, 16, {"hidden": [4096, 4096]}),
    "resnet-18": Workload("resnet-18", (3, 32, 32), 10, 16),
    "gpt": Workload("gpt", (64,), 8192, 8, optimizer="adamw"),
}


@dataclass(frozen=True)
class Arm:
    """One way to train; a method may have several arms, of which the best one counts."""

    method: str
    bucket_mb: int | None = None
    strategy: str = "synchronous"
    period: int | None = None
    is_other: bool = False
    """Whether its ranks run the package of the commit that --against names."""

    @property
    def name(self) -> str:
        return self.method if self.bucket_mb is None else f"{self.method} {self.bucket_mb} MB"

    @property
    def is_synchronised(self) -> bool:
        return self.method != "no_exchange" and self.strategy == "synchronous"


ARMS: tuple[Arm, ...] = (
    Arm("ddp", 1),
    Arm("ddp", 5),
    Arm("ddp", 25),
    Arm("ddp", 100),
    Arm("ddp_zero", 25),
    Arm("fsdp2"),
    Arm("syncline"),
    Arm("no_exchange"),
    *(
        Arm(f"{strategy}_{period}", strategy=strategy, period=period)
        for strategy in ("gossip", "elastic", "server")
        for period in (1, 10)
    ),
)
METHODS: tuple[str, ...] = tuple(dict.fromkeys(arm.method for arm in ARMS))
SYNCHRONOUS: tuple[str, ...] = tuple(
    dict.fromkeys(arm.method for arm in ARMS if arm.strategy == "synchronous")
)
"""What is measured unless methods are named: asynchronous ones do other arithmetic."""

OTHER, CONTROL = Arm("other", is_other=True), Arm("control", is_other=True)
"""Syncline as it is in the commit that --against names, twice: how far the two differ is noise."""
