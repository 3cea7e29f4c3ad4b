"""Rules between settings. Each check takes the tables it is about and raises `ConfigError`."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from typing import Any

import msgspec

from syncline import device
from syncline.cluster import PRESETS
from syncline.config.settings import (
    ClusterSettings,
    DataSettings,
    ModelSettings,
    OptimizerSettings,
    RunSettings,
    StrategySettings,
)
from syncline.config.words import any_of, did_you_mean, listed, printable, shown
from syncline.errors import ConfigError
from syncline.faults import ANY_RANK, Fault
from syncline.loggers.names import LOGGERS, parts_of
from syncline.own_functions import is_own

_SUGGESTIONS = 4  # numbers offered in an error: enough to choose from, and still one line


def check_length(run: RunSettings) -> None:
    """Check that exactly one of steps and epochs is given."""
    if (run.steps is None) == (run.epochs is None):
        both = run.steps is not None
        raise ConfigError(
            "run.steps",
            f"got {run.steps} together with run.epochs = {run.epochs}"
            if both
            else "neither run.steps nor run.epochs is there",
            "exactly one of the two ends a run",
            "Remove one of them." if both else "Write for example run.epochs = 10.",
        )


def check_log(targets: Sequence[str]) -> None:
    """Check that each logger is known, and named once."""
    names = [parts_of(target)[0] for target in targets]
    for name, target in zip(names, targets, strict=True):
        if name not in LOGGERS:
            fix = did_you_mean(name, LOGGERS) or f"Use {any_of(LOGGERS)}."
            raise ConfigError("run.log", f"got {shown(target)}", "there is no such logger", fix)
        if names.count(name) > 1:
            found = f"got {shown(name)} twice"
            raise ConfigError("run.log", found, "a run has one of each", "Remove one of them.")


def check_warmup(optimizer: OptimizerSettings, run: RunSettings) -> None:
    """Check that a schedule has steps left after its warm-up."""
    if optimizer.schedule == "cosine" and run.steps and optimizer.warmup_steps >= run.steps:
        raise ConfigError(
            "optimizer.warmup_steps",
            f"got {optimizer.warmup_steps} with run.steps = {run.steps}",
            "the cosine schedule begins after the warm-up",
            f"Use less than {run.steps}.",
        )
    first = optimizer.milestones[0] if optimizer.milestones else None
    if first is not None and optimizer.warmup_steps > first:
        raise ConfigError(
            "optimizer.warmup_steps",
            f"got {optimizer.warmup_steps} with a first milestone at {first}",
            "the learning rate decays after the warm-up",
            f"Use at most {first}.",
        )


def check_image_size(model: ModelSettings, data: DataSettings) -> None:
    """Check that model and data do not name two sizes."""
    sizes = model.image_size, data.image_size
    if None not in sizes and sizes[0] != sizes[1]:
        raise ConfigError(
            "model.image_size",
            f"got {sizes[0]} with data.image_size = {sizes[1]}",
            "the model reads the images as the data gives them",
            "Remove one of the two.",
        )


def check_input(data: DataSettings) -> None:
    """Check that each worker has a batch to read ahead, and that no thread reads own data."""
    if data.prefetch == "auto":
        return
    if data.prefetch < data.workers:
        raise ConfigError(
            "data.prefetch",
            f"got {data.prefetch} with data.workers = {data.workers}",
            "each worker reads at least one batch ahead of use",
            f"Use {data.workers} or more, or data.workers = {data.prefetch}.",
        )
    if data.prefetch and not data.workers and is_own(data.name):
        raise ConfigError(
            "data.prefetch",
            f"got {data.prefetch} with data.workers = 0",
            f"a thread would read ahead, and what {printable(data.name)} draws at random would"
            " mix with what the model draws",
            "Use data.workers = 1 or more, or leave data.prefetch out.",
        )


def check_optimizer(optimizer: OptimizerSettings) -> None:
    """Refuse settings without effect under the chosen optimizer and schedule, and missing ones."""
    of_sgd, of_adam = ("momentum", "nesterov"), ("betas",)
    for setting in of_adam if optimizer.name == "sgd" else of_sgd:
        if getattr(optimizer, setting) is not None:
            raise _without_effect(
                f"optimizer.{setting}",
                getattr(optimizer, setting),
                f'optimizer.name is "{optimizer.name}"',
                "adam and adamw" if setting in of_adam else "sgd",
            )
    _check_schedule(optimizer)
    if optimizer.nesterov and not optimizer.momentum:
        raise ConfigError(
            "optimizer.nesterov",
            "got true without momentum",
            "Nesterov's step is a form of momentum",
            "Write for example optimizer.momentum = 0.9.",
        )


_DECAYS = {
    "decay_steps": ('schedule = "step"', "the steps between two decays", "1000"),
    "milestones": ('schedule = "milestones"', "the steps at which it decays", "[800, 1200]"),
}
"""The setting that says when a schedule decays: the schedule, what it says, an example."""


def _check_schedule(optimizer: OptimizerSettings) -> None:
    chosen = f'schedule = "{optimizer.schedule}"'
    when = f'optimizer.schedule is "{optimizer.schedule}"'
    for setting, (schedule, what, example) in _DECAYS.items():
        value = getattr(optimizer, setting)
        if value is not None and schedule != chosen:
            raise _without_effect(f"optimizer.{setting}", value, when, schedule)
        if value is None and schedule == chosen:
            raise ConfigError(
                f"optimizer.{setting}",
                "it is not there",
                f"{schedule} needs {what}",
                f"Write for example optimizer.{setting} = {example}.",
            )
    if optimizer.decay_factor is not None and optimizer.schedule not in ("step", "milestones"):
        owner = 'schedule = "step" or "milestones"'
        raise _without_effect("optimizer.decay_factor", optimizer.decay_factor, when, owner)
    steps = optimizer.milestones or ()
    if any(later <= earlier for earlier, later in itertools.pairwise(steps)):
        raise ConfigError(
            "optimizer.milestones",
            f"got {shown(steps)}",
            "milestones are steps in ascending order, each once",
            f"Write optimizer.milestones = {shown(tuple(sorted(set(steps))))}.",
        )


def _without_effect(key: str, value: Any, when: str, owner: str) -> ConfigError:
    """Make the error for a setting that `owner` alone reads."""
    how = "" if "[" in key else f" (on the command line: --set {key}=)"
    return ConfigError(
        key,
        f"got {shown(value)} while {when}",
        f"it has an effect with {owner} only",
        f"Remove it{how}.",
    )


def check_cluster(cluster: ClusterSettings) -> None:
    """Check what does not depend on the number of ranks; `Conditions.check` checks the rest."""
    if cluster.preset not in PRESETS:
        fix = did_you_mean(cluster.preset, PRESETS) or "syncline simulate --list-clusters has them."
        rule = "this is the name of a preset"
        raise ConfigError("cluster.preset", f"got {shown(cluster.preset)}", rule, fix)
    check_device(cluster)
    for setting, kind in (("jitter_sigma", "lognormal"), ("jitter_shift", "exponential")):
        value = getattr(cluster, setting)
        if value and cluster.jitter != kind:
            when = f'cluster.jitter is "{cluster.jitter}"'
            raise _without_effect(f"cluster.{setting}", value, when, f'jitter = "{kind}"')
    if cluster.jitter == "lognormal" and not cluster.jitter_sigma:
        raise ConfigError(
            "cluster.jitter_sigma",
            "it is not there",
            'jitter = "lognormal" needs a spread above 0',
            "Write for example cluster.jitter_sigma = 0.1.",
        )
    for rank in cluster.slow_ranks:
        if not re.fullmatch(r"0|[1-9][0-9]*", rank):
            raise ConfigError(
                f"cluster.slow_ranks.{printable(rank)}",
                f"got {shown(rank)}",
                "ranks are whole numbers, counted from 0",
                "Write for example cluster.slow_ranks = {1 = 2.0}.",
            )
    check_faults("cluster.faults", cluster.faults)


def check_device(cluster: ClusterSettings) -> None:
    """Check that the device is known, and that its rate is not set besides."""
    name = cluster.device
    if name is None or name == device.DEFAULT:
        return
    if name not in device.DEVICES:
        fix = did_you_mean(name, device.names()) or f"Use {any_of(device.names())}."
        rule = f"this is {any_of(device.names())}"
        raise ConfigError("cluster.device", f"got {shown(name)}", rule, fix)
    if cluster.flops_per_s is not None:
        found = f'got {cluster.flops_per_s:g} with cluster.device = "{name}"'
        rule = "a device has a rate for each kind of layer"
        fix = 'Remove one of the two, or use cluster.device = "core".'
        raise ConfigError("cluster.flops_per_s", found, rule, fix)


def check_faults(key: str, faults: Sequence[Fault]) -> None:
    """Check each fault of the list `key`; `Conditions.check` checks their ranks."""
    for number, fault in enumerate(faults):
        _check_fault(f"{key}[{number}]", fault)


def _check_fault(key: str, fault: Fault) -> None:
    if fault.kind == "slow" and fault.factor == 1:
        raise ConfigError(
            f"{key}.factor",
            "it is 1, or not given",
            'compute takes as many times as long with kind = "slow"',
            "Use for example factor = 5.0.",
        )
    owners = {"factor": "slow", "seconds": "pause"}
    if fault.chance == 1:
        owners["steps"] = "slow"
        if fault.rank == ANY_RANK and fault.kind == "death":
            raise ConfigError(
                f"{key}.rank",
                "got -1, every rank, for a death without a chance",
                "at least one rank has to survive",
                "Name a rank, or write for example chance = 0.01.",
            )
    for field in msgspec.structs.fields(Fault):
        value, owner = getattr(fault, field.name), owners.get(field.name, fault.kind)
        if owner != fault.kind and value != field.default:
            when = f'its kind is "{fault.kind}"'
            raise _without_effect(f"{key}.{field.name}", value, when, f'kind = "{owner}"')


def check_strategy(strategy: StrategySettings, steps: int | None) -> None:
    """Check a strategy's settings against the others'; `steps` is the run's, if known."""
    own, name = strategy.own, strategy.name
    period = own.steps_between_exchanges
    if steps is not None and period > steps:
        raise ConfigError(
            f"strategy.{name}.period",
            f"got {period} with run.steps = {steps}",
            "ranks would never exchange anything",
            f"Use at most {steps}.",
        )
    for setting, is_fixed, rule in (
        ("overlap", own.fixes_overlap, "says itself when ranks exchange"),
        ("bucket_bytes", own.fixes_buckets, "says itself where buckets end"),
    ):
        value = getattr(strategy, setting)
        if is_fixed and value != "auto":
            raise ConfigError(
                f"strategy.{setting}",
                f"got {shown(value)} with strategy.name = {shown(name)}",
                f"this strategy {rule}",
                f"Remove it (on the command line: --set strategy.{setting}=).",
            )


def check_shards(batch: int, shards: int | None, ranks: int, workers: int) -> None:
    """Check that the batch can be cut into equal shards, at least one for each worker."""
    if shards is None:
        if batch % workers:
            serving = f" ({ranks - workers} only serve)" if workers < ranks else ""
            fitting = [n + ranks - workers for n in _divisors_near(batch, workers)]
            raise ConfigError(
                "run.ranks",
                f"got {ranks}{serving} with data.batch = {batch}",
                "without strategy.shards each rank takes one equal share of the batch",
                f"Use {listed(fitting)} ranks, set strategy.shards,"
                f" or make data.batch {_near_multiples(batch, workers)}.",
            )
        return
    ranks = workers
    if shards > batch:
        raise ConfigError(
            "strategy.shards",
            f"got {shards} with data.batch = {batch}",
            "each shard needs at least one sample",
            f"Use at most {batch} shards, or make data.batch a multiple of {shards}.",
        )
    if batch % shards:
        raise ConfigError(
            "data.batch",
            f"got {batch} with strategy.shards = {shards}",
            "shards are equal",
            f"Use {_near_multiples(batch, shards)},"
            f" or {listed(_divisors_near(batch, shards))} shards.",
        )
    if shards < ranks:
        enough = [n for n in _divisors(batch) if n >= ranks][:_SUGGESTIONS]
        larger = f"Use {listed(enough)} shards" if enough else "Use more shards and a larger batch"
        raise ConfigError(
            "strategy.shards",
            f"got {shards} with {ranks} ranks",
            "each rank needs at least one shard",
            f"{larger}, or at most {shards} rank{'s' if shards > 1 else ''}.",
        )


def _divisors(number: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def _divisors_near(number: int, wanted: int) -> list[int]:
    """Return the few divisors that are nearest to what was wanted, in ascending order."""
    return sorted(sorted(_divisors(number), key=lambda n: abs(n - wanted))[:_SUGGESTIONS])


def _near_multiples(number: int, of: int) -> str:
    """Return the multiples of `of` below and above a number, as "56 or 64"."""
    below = number // of * of
    return listed([n for n in (below, below + of) if n])
