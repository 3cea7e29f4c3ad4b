"""The tables of a job: each setting with its type, its bounds, its default and an example."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from syncline.faults import Fault, LinkChange
from syncline.strategies.registry import STRATEGIES
from syncline.strategies.settings import OwnSettings

Option = bool | int | float | str | tuple[Any, ...] | dict[str, Any]
"""A value in model.options or data.options. Each model and each function checks its own."""

# PyTorch's defaults: a job that does not set them trains as a script that does not.
BETAS = (0.9, 0.999)
ADAMW_WEIGHT_DECAY = 0.01
DECAY_FACTOR = 0.1

# Errors suggest divisors of the batch: up to this size they are found in a few milliseconds.
MAX_BATCH = 10**9
# TOML's largest integer.
MAX_SEED = 2**63 - 1
# More threads than this on one rank is a typing error: no machine has so many cores.
MAX_THREADS = 1024
# More batches than this ahead of use fill the memory and hide nothing more.
MAX_PREFETCH = 256
# Batches ahead of use for each that reads: one is being read while the other waits to be used.
PREFETCH = 2

# Heartbeats come every second; an overloaded machine may delay them by several seconds.
SILENT_S = 20.0
# A step, an evaluation or a checkpoint of a slow rank may take minutes without any fault.
HUNG_S = 600.0
# Loading Python and torch from a busy network file system takes minutes.
MEET_S = 300.0
# More than eleven days is a typing error.
MAX_MEET_S = 1e6


class Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of a job: frozen, and an unknown key is an error."""


class ModelSettings(Table, frozen=True, kw_only=True):
    """Which network, and its loss. Image size and classes that are None are those of the data.

    `name` and `loss` may be those of functions of the user's own: "package.module:function". The
    network's is called with `options`, the loss with the network's output and the targets.
    """

    name: Annotated[str, Meta(min_length=1, examples=["cnn"])]
    image_size: Annotated[int, Meta(ge=1, examples=[32])] | None = None
    classes: Annotated[int, Meta(ge=1, examples=[10])] | None = None
    options: dict[str, Option] = {}
    loss: Annotated[str, Meta(min_length=1, examples=["cross_entropy"])] = "cross_entropy"


class DataSettings(Table, frozen=True, kw_only=True):
    """Which samples, and how many a step takes over all shards together (`batch`).

    `name` may be that of a function of the user's own, which is called with `options`. On each rank
    `workers` processes read up to `prefetch` shards' batches ahead of use; without workers a
    thread does. With a prefetch of 0 batches are read in line. Neither changes the result.
    """

    name: Annotated[str, Meta(min_length=1, examples=["digits"])]
    batch: Annotated[int, Meta(ge=1, le=MAX_BATCH, examples=[64])]
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
    options: dict[str, Option] = {}
    workers: Annotated[int, Meta(ge=0, le=MAX_PREFETCH, examples=[2])] = 0
    prefetch: Annotated[int, Meta(ge=0, le=MAX_PREFETCH, examples=[4])] | Literal["auto"] = "auto"

    def resolved(self) -> DataSettings:
        """Write out the prefetch: in line, unless there are workers or images are read from a disk.

        Data of the user's own may draw random numbers, so no thread reads it beside the model.
        """
        if self.prefetch != "auto":
            return self
        readers = self.workers or int(self.name == "folder")
        return msgspec.structs.replace(self, prefetch=min(PREFETCH * readers, MAX_PREFETCH))


class OptimizerSettings(Table, frozen=True, kw_only=True):
    """The update rule and the learning rate over time.

    `None` means the default, which `resolved` writes out: sgd has momentum 0, no Nesterov and no
    weight decay; adam has betas 0.9 and 0.999 and no weight decay; adamw the same betas and a
    weight decay of 0.01. The step schedule multiplies by `decay_factor` (0.1) every `decay_steps`;
    the milestones schedule does so at each of the steps in `milestones`, counted from 0.
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
    schedule: Literal["constant", "cosine", "step", "milestones"] = "constant"
    warmup_steps: Annotated[int, Meta(ge=0, examples=[100])] = 0
    decay_steps: Annotated[int, Meta(ge=1, examples=[1000])] | None = None
    milestones: (
        Annotated[
            tuple[Annotated[int, Meta(ge=1)], ...], Meta(min_length=1, examples=[(800, 1200)])
        ]
        | None
    ) = None
    decay_factor: Annotated[float, Meta(gt=0, examples=[0.1])] | None = None

    def resolved(self) -> OptimizerSettings:
        """Write out the defaults of the chosen optimizer and schedule; the others stay None."""
        defaults: dict[str, Any] = {
            "weight_decay": ADAMW_WEIGHT_DECAY if self.name == "adamw" else 0.0
        }
        if self.name == "sgd":
            defaults |= {"momentum": 0.0, "nesterov": False}
        else:
            defaults |= {"betas": BETAS}
        if self.schedule in ("step", "milestones"):
            defaults |= {"decay_factor": DECAY_FACTOR}
        absent = {key: value for key, value in defaults.items() if getattr(self, key) is None}
        return msgspec.structs.replace(self, **absent)


class StrategySettings(Table, frozen=True, kw_only=True):
    """How ranks work together.

    With the synchronous strategy the result depends on `shards`; `bucket_bytes`, `overlap` and
    `comm` change only the speed. `shards` is None ("auto" in the file, or left out) for one shard
    on each rank that computes. `settings` is the strategy's own table, [strategy.NAME].
    """

    name: str = "synchronous"
    shards: Annotated[int, Meta(ge=1, examples=[8])] | None = None
    bucket_bytes: Annotated[int, Meta(ge=1, examples=[4194304])] | Literal["auto"] = "auto"
    overlap: bool | Literal["auto"] = "auto"
    comm: Literal["auto", "shared_memory", "network"] = "auto"
    settings: OwnSettings | None = None

    @property
    def own(self) -> OwnSettings:
        """The strategy's own settings, also where it has none to set."""
        return self.settings or STRATEGIES[self.name].settings()


class RunSettings(Table, frozen=True, kw_only=True):
    """How long a run is, on how many ranks, and what it writes.

    Exactly one of `steps` and `epochs` is given. `evaluate_every` and `checkpoint_every` count
    steps; None means once, at the end. `threads` is the number of intra-op threads of a rank: it
    changes the order of summation, so the job fixes it. A rank that sends no heartbeat for
    `silent_s`, or keeps the others waiting for `hung_s`, counts as failed. At the start ranks wait
    for each other up to `meet_s`. If a loss or the weights are not finite, `stop_when_not_finite`
    ends the run there. `log` names loggers, besides the run folder (docs/loggers.md).
    """

    ranks: Annotated[int, Meta(ge=1, examples=[2])] = 1
    steps: Annotated[int, Meta(ge=1, examples=[1000])] | None = None
    epochs: Annotated[int, Meta(ge=1, examples=[10])] | None = None
    seed: Annotated[int, Meta(ge=0, le=MAX_SEED, examples=[0])] = 0
    threads: Annotated[int, Meta(ge=1, le=MAX_THREADS, examples=[1])] = 1
    evaluate_every: Annotated[int, Meta(ge=1, examples=[500])] | None = None
    checkpoint_every: Annotated[int, Meta(ge=1, examples=[500])] | None = None
    stop_when_not_finite: bool = True
    out: Annotated[str, Meta(min_length=1, examples=["runs/first"])] | None = None
    log: tuple[Annotated[str, Meta(min_length=1, examples=["tensorboard"])], ...] = ()
    silent_s: Annotated[float, Meta(gt=0, examples=[SILENT_S])] = SILENT_S
    hung_s: Annotated[float, Meta(gt=0, examples=[HUNG_S])] = HUNG_S
    meet_s: Annotated[float, Meta(gt=0, le=MAX_MEET_S, examples=[MEET_S])] = MEET_S
    device: Literal["cpu"] = "cpu"


class ClusterSettings(Table, frozen=True, kw_only=True):
    """The hardware to simulate; training ignores it.

    `preset` names a cluster; settings that are not None replace its numbers. `device` is what a
    rank computes on, None for a core with `flops_per_s`. `machines` is None for
    one rank on each machine, `cores` if no rank of a machine ever waits for a core. With
    `one_computer` all machines share the cores of one computer. `input_s` is the time to
    load one rank's samples of a step, None for what a workload file says, else 0. `message_s`,
    `collective_s` and `byte_s` are processor time of a message, of a collective, and of a byte that
    goes to another machine or comes from there. `duplex` says whether a
    machine's link carries both directions at once, or both together at its rate. Where ranks have a
    device, `copy_latency_s` and `copy_rate_bytes_per_s` are of its copies to and from the host,
    before and after an exchange across machines. `algorithm` is how machines
    exchange gradients. `links` is how messages share links: "exact", or "fast" to simulate but not
    exact. `jitter` is a random factor on the compute of each step. `slow_ranks` maps the number of
    a rank to a factor on its compute in all steps.
    """

    preset: str = "1gbit"
    device: str | None = None
    machines: Annotated[int, Meta(ge=1, examples=[4])] | None = None
    latency_s: Annotated[float, Meta(ge=0, examples=[50e-6])] | None = None
    rate_bytes_per_s: Annotated[float, Meta(gt=0, examples=[1e9])] | None = None
    inside_latency_s: Annotated[float, Meta(ge=0, examples=[20e-6])] | None = None
    inside_rate_bytes_per_s: Annotated[float, Meta(gt=0, examples=[6e9])] | None = None
    flops_per_s: Annotated[float, Meta(gt=0, examples=[5e10])] | None = None
    update_bytes_per_s: Annotated[float, Meta(gt=0, examples=[6e9])] | None = None
    message_s: Annotated[float, Meta(ge=0, examples=[17e-6])] | None = None
    collective_s: Annotated[float, Meta(ge=0, examples=[7e-6])] | None = None
    duplex: Literal["full", "half"] | None = None
    copy_latency_s: Annotated[float, Meta(ge=0, examples=[10e-6])] | None = None
    copy_rate_bytes_per_s: Annotated[float, Meta(gt=0, examples=[12e9])] | None = None
    byte_s: Annotated[float, Meta(ge=0, examples=[4e-10])] | None = None
    cores: Annotated[int, Meta(ge=1, examples=[8])] | None = None
    one_computer: bool | None = None
    input_s: Annotated[float, Meta(ge=0, examples=[0.01])] | None = None
    algorithm: Literal["direct", "ring"] = "direct"
    links: Literal["exact", "fast"] = "exact"
    jitter: Literal["none", "lognormal", "exponential"] = "none"
    jitter_sigma: Annotated[float, Meta(ge=0, examples=[0.1])] = 0.0
    jitter_shift: Annotated[float, Meta(ge=0, lt=1, examples=[0.9])] = 0.0
    slow_ranks: dict[str, Annotated[float, Meta(gt=0, examples=[2.0])]] = {}
    faults: tuple[Fault, ...] = ()
    link_changes: tuple[LinkChange, ...] = ()
