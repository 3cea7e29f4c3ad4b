"""The fixed list of runs whose weights `hashes.py` compares.

A job fixes the arithmetic: model, data, optimizer, shards. A run is a job on some number of ranks,
real or virtual, with settings that must not change a bit of the result. So all synchronous runs of
a job have one hash, on every version. The jobs are small: what takes time is starting processes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

BASE = """
[model]
name = "mlp"
options = { hidden = [32] }

[data]
name = "digits"
batch = 24

[optimizer]
lr = 0.05
momentum = 0.9

[strategy]
shards = 4

[run]
steps = 6
"""

_WIDE = "model.options.hidden=[1024, 512]"  # 2.4 MB: above the megabyte from which ranks overlap
_CNN = ("model.name=cnn", "model.options={dropout=0.1, batch_norm=true}")

JOBS: dict[str, tuple[str, ...]] = {
    "mlp": (),
    "nesterov": ("optimizer.nesterov=true", "optimizer.weight_decay=0.001", "strategy.shards=6"),
    "adam": ("optimizer.name=adam", "optimizer.lr=0.001", "optimizer.momentum="),
    "adamw": (
        *("optimizer.name=adamw", "optimizer.lr=0.001", "optimizer.momentum="),
        *("optimizer.schedule=cosine", "optimizer.warmup_steps=2", "strategy.shards=6"),
    ),
    "clip": ("optimizer.clip_norm=0.5",),
    "cnn": (*_CNN, "strategy.shards=8"),
    "resnet": ("model.name=resnet-20", "model.options=", "run.steps=3"),
    "wide": (_WIDE,),
    "wide-adamw": (
        *(_WIDE, "optimizer.name=adamw", "optimizer.lr=0.001", "optimizer.momentum="),
        *("optimizer.clip_norm=0.5", "strategy.shards=6"),
    ),
}
"""By name, what is laid over BASE."""


@dataclass(frozen=True)
class Start:
    """The first part of a run that is resumed: `sets` end it before its last step."""

    ranks: int
    sets: tuple[str, ...]
    is_killed: bool = False


@dataclass(frozen=True)
class Run:
    """A job on some ranks; `label` names what is special about it.

    `counts` is False where ranks train replicas of their own: such a run is shown, and may differ
    between versions.
    """

    job: str
    ranks: int
    label: str = ""
    verb: Literal["train", "simulate"] = "train"
    sets: tuple[str, ...] = ()
    start: Start | None = None
    strategy: str = "synchronous"
    counts: bool = True

    @property
    def name(self) -> str:
        clock = "-virtual" if self.verb == "simulate" else ""
        return f"{self.job}{clock}-{self.ranks}" + (f"-{self.label}" if self.label else "")


def _virtual(job: str, *ranks: int) -> list[Run]:
    return [Run(job, count, verb="simulate") for count in ranks]


_STOPPED = ("run.steps=3",)
_KILLED = (
    'faults=[{rank=1, step=4, kind="death"}]',
    "run.checkpoint_every=3",
)

_SYNCHRONOUS: tuple[Run, ...] = (
    *(Run("mlp", ranks) for ranks in (1, 2, 3, 4)),
    Run("mlp", 2, "overlapped", sets=("strategy.overlap=true",)),
    Run("mlp", 3, "network", sets=("strategy.comm=network",)),
    Run("mlp", 2, "killed-on-3", start=Start(3, _KILLED, is_killed=True)),
    *_virtual("mlp", 2),
    *(Run("nesterov", ranks) for ranks in (3, 4)),
    Run("adam", 2),
    *_virtual("adam", 4),
    Run("adamw", 3),
    *_virtual("adamw", 2),
    *(Run("clip", ranks) for ranks in (2, 4)),
    *_virtual("clip", 4),
    *(Run("cnn", ranks) for ranks in (1, 2, 3, 4)),
    Run("cnn", 2, "network", sets=("strategy.comm=network",)),
    Run("cnn", 1, "resumed-from-4", start=Start(4, _STOPPED)),
    *_virtual("cnn", 1, 2, 4, 8),
    Run("resnet", 2),
    *_virtual("resnet", 4),
    *(Run("wide", ranks) for ranks in (1, 2, 3, 4)),
    Run("wide", 2, "inline", sets=("strategy.overlap=false",)),
    Run("wide", 3, "small-buckets", sets=("strategy.bucket_bytes=65536",)),
    Run("wide", 2, "network", sets=("strategy.comm=network",)),
    *_virtual("wide", 4),
    Run("wide-adamw", 3),
    Run("wide-adamw", 4, "network", sets=("strategy.comm=network",)),
    Run("wide-adamw", 3, "resumed-from-2", start=Start(2, _STOPPED)),
    *_virtual("wide-adamw", 4),
)


def _apart(label: str, strategy: str, *sets: str) -> Run:
    # In real time the result depends on how fast each rank was, so virtual time alone is run.
    return Run(
        *("mlp", 4, label, "simulate", ("strategy.shards=", *sets)),
        strategy=strategy,
        counts=False,
    )


_ASYNCHRONOUS: tuple[Run, ...] = (
    _apart("gossip", "gossip"),
    _apart("elastic", "elastic"),
    _apart("server", "server"),
    _apart("one-server", "server", "strategy.server.servers=1"),
)

SYNCHRONOUS_STRATEGIES: tuple[str, ...] = ("all_reduce", "wait_free", "merged", "sync_server")
"""Other strategies that promise the weights of `synchronous`, bit for bit, on every job."""


def _runs_of(strategy: str) -> tuple[Run, ...]:
    """Return what is run of each of them: inline, overlapped, batch norm, clipping, both clocks."""
    label = strategy.replace("_", "-")
    where: tuple[tuple[str, int, Literal["train", "simulate"]], ...] = (
        ("mlp", 2, "train"),
        ("cnn", 3, "train"),
        ("wide", 4, "train"),
        ("wide-adamw", 3, "train"),
        ("cnn", 4, "simulate"),
        ("wide-adamw", 2, "simulate"),
    )
    return tuple(Run(job, ranks, label, verb, strategy=strategy) for job, ranks, verb in where)


RUNS: tuple[Run, ...] = (
    *_SYNCHRONOUS,
    *(run for strategy in SYNCHRONOUS_STRATEGIES for run in _runs_of(strategy)),
    *_ASYNCHRONOUS,
)
