"""The tables of a job: each setting with its type, its bounds, its default and an example."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from syncline.faults import Fault, LinkChange
from syncline.strategy_settings import OwnSettings

Option = bool | int | float | str | tuple[int, ...]


class Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the tables of a job have in common."""


class ModelSettings(Table, frozen=True, kw_only=True):
    """Which network. What is absent follows from the data."""

    name: Annotated[str, Meta(min_length=1, examples=["cnn"])]
    image_size: Annotated[int, Meta(ge=1, examples=[32])] | None = None
    classes: Annotated[int, Meta(ge=1, examples=[10])] | None = None
    options: dict[str, Option] = {}


class DataSettings(Table, frozen=True, kw_only=True):
    """Which samples, and how many a step takes over all shards together (`batch`)."""

    name: Annotated[str, Meta(min_length=1, examples=["digits"])]
    batch: Annotated[int, Meta(ge=1, le=10**9, examples=[64])]
    path: Annotated[str, Meta(min_length=1, examples=["/data/images"])] | None = None
    image_size: Annotated[int, Meta(ge=1, examples=[32])] | None = None
    sample_shape: (
        Annotated[
            tuple[Annotated[int, Meta(ge=1)], ...], Meta(min_length=1, examples=[(3, 32, 32)])
        ]
        | None
    ) = None
    classes: Annotated[int, Meta(ge=1, examples=[10])] | None = None
    samples: Annotated[int, Meta(ge=1, examples=[1024])] | None = None


class OptimizerSettings(Table, frozen=True, kw_only=True):
    """The update rule and the learning rate over time.

    `None` means the default, which `resolved` writes out: sgd has momentum 0, no Nesterov and no
    weight decay; adam has betas 0.9 and 0.999 and no weight decay; adamw the same betas and a
    weight decay of 0.01. The step schedule multiplies by `decay_factor` (0.1) every `decay_steps`.
    """

    name: Literal["sgd", "adam", "adamw"] = "sgd"
    lr: Annotated[float, Meta(gt=0, examples=[0.05])]
    momentum: Annotated[float, Meta(ge=0, lt=1, examples=[0.9])] | None = None
    nesterov: bool | None = None
    weight_decay: Annotated[float, Meta(ge=0, examples=[0.0001])] | None = None
    betas: (
        Annotated[
            tuple[Annotated[float, Meta(ge=0, lt=1)], Annotated[float, Meta(ge=0, lt=1)]],
            Meta(examples=[(0.9, 0.999)]),
        ]
        | None
    ) = None
    clip_norm: Annotated[float, Meta(gt=0, examples=[1.0])] | None = None
    schedule: Literal["constant", "cosine", "step"] = "constant"
    warmup_steps: Annotated[int, Meta(ge=0, examples=[100])] = 0
    decay_steps: Annotated[int, Meta(ge=1, examples=[1000])] | None = None
    decay_factor: Annotated[float, Meta(gt=0, examples=[0.1])] | None = None

    def resolved(self) -> OptimizerSettings:
        """Write out the defaults of the chosen optimizer and schedule; the others stay None."""
        defaults: dict[str, Any] = {"weight_decay": 0.01 if self.name == "adamw" else 0.0}
        if self.name == "sgd":
            defaults |= {"momentum": 0.0, "nesterov": False}
        else:
            defaults |= {"betas": (0.9, 0.999)}
        if self.schedule == "step":
            defaults |= {"decay_factor": 0.1}
        absent = {key: value for key, value in defaults.items() if getattr(self, key) is None}
        return msgspec.structs.replace(self, **absent)


class StrategySettings(Table, frozen=True, kw_only=True):
    """How ranks work together. `shards` alone of these changes a single bit of the result.

    `shards` is None (spelled "auto", or left out) for as many as there are ranks. `settings` is
    the strategy's own table, [strategy.NAME] in the file.
    """

    name: str = "synchronous"
    shards: Annotated[int, Meta(ge=1, examples=[8])] | None = None
    bucket_bytes: Annotated[int, Meta(ge=1, examples=[4194304])] | Literal["auto"] = "auto"
    overlap: bool | Literal["auto"] = "auto"
    comm: Literal["auto", "shared_memory", "network"] = "auto"
    settings: msgspec.Struct | None = None

    @property
    def parts(self) -> bool:
        """Whether ranks take steps on their own: then shards fix no arithmetic."""
        return isinstance(self.settings, OwnSettings)

    def num_workers(self, ranks: int) -> int:
        """Return how many ranks compute: the first ones."""
        return self.settings.num_workers(ranks) if isinstance(self.settings, OwnSettings) else ranks


class RunSettings(Table, frozen=True, kw_only=True):
    """How long, on how many ranks, and what is written where.

    Exactly one of `steps` and `epochs`. `evaluate_every` and `checkpoint_every` count steps; None
    is once, at the end. `threads` is a rank's number of intra-op threads: part of the arithmetic,
    so the job fixes it. `silent_s` and `hung_s` are how long a rank may send no heartbeat, and how
    long it may keep others waiting, before the run is given up.
    """

    ranks: Annotated[int, Meta(ge=1, examples=[2])] = 1
    steps: Annotated[int, Meta(ge=1, examples=[1000])] | None = None
    epochs: Annotated[int, Meta(ge=1, examples=[10])] | None = None
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1, examples=[0])] = 0
    threads: Annotated[int, Meta(ge=1, le=1024, examples=[1])] = 1
    evaluate_every: Annotated[int, Meta(ge=1, examples=[500])] | None = None
    checkpoint_every: Annotated[int, Meta(ge=1, examples=[500])] | None = None
    out: Annotated[str, Meta(min_length=1, examples=["runs/first"])] | None = None
    silent_s: Annotated[float, Meta(gt=0, examples=[20.0])] = 20.0
    hung_s: Annotated[float, Meta(gt=0, examples=[600.0])] = 600.0
    device: Literal["cpu"] = "cpu"


class ClusterSettings(Table, frozen=True, kw_only=True):
    """Which hardware a simulation is about; training takes no notice of it.

    A preset, and what is different from it. `machines` is None for one rank a machine. `input_s`
    is how long loading one rank's batch of a step takes. `algorithm` is how machines exchange.
    `jitter` makes each rank's steps differ at random, `slow_ranks` some ranks always slow (by what
    factor, by the rank's number).
    """

    preset: str = "1gbit"
    machines: Annotated[int, Meta(ge=1, examples=[4])] | None = None
    latency_s: Annotated[float, Meta(ge=0, examples=[50e-6])] | None = None
    rate_bytes_per_s: Annotated[float, Meta(gt=0, examples=[1e9])] | None = None
    inside_latency_s: Annotated[float, Meta(ge=0, examples=[20e-6])] | None = None
    inside_rate_bytes_per_s: Annotated[float, Meta(gt=0, examples=[6e9])] | None = None
    flops_per_s: Annotated[float, Meta(gt=0, examples=[5e10])] | None = None
    update_bytes_per_s: Annotated[float, Meta(gt=0, examples=[6e9])] | None = None
    input_s: Annotated[float, Meta(ge=0, examples=[0.01])] = 0.0
    algorithm: Literal["direct", "ring"] = "direct"
    jitter: Literal["none", "lognormal", "exponential"] = "none"
    jitter_sigma: Annotated[float, Meta(ge=0, examples=[0.1])] = 0.0
    jitter_shift: Annotated[float, Meta(ge=0, lt=1, examples=[0.9])] = 0.0
    slow_ranks: dict[str, Annotated[float, Meta(gt=0, examples=[2.0])]] = {}
    faults: tuple[Fault, ...] = ()
    link_changes: tuple[LinkChange, ...] = ()
