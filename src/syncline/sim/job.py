"""Simulates a job on a cluster: from settings to a result."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import torch
from torch import nn

from syncline import workload as workload_files
from syncline.cluster import Cluster, conditions_of
from syncline.config import Job, job_to_toml, printable
from syncline.data import DataSet, Facts
from syncline.device import DEFAULT, DEVICES
from syncline.errors import ConfigError
from syncline.measure.derive import derive
from syncline.own_functions import is_own
from syncline.perf.trace import Trace
from syncline.recipe import build_model, describe_data
from syncline.sim.groups_choice import best_of, candidates, table_of
from syncline.sim.learn import Learning
from syncline.sim.outcome import Outcome
from syncline.sim.run import simulate
from syncline.strategies import HybridSettings, make_strategy
from syncline.workload import Workload

STEPS = 10
"""Steps of a simulation of sizes: more than a few, since the first ones fill the lanes."""


def simulate_job(
    job: Job,
    cluster: Cluster,
    *,
    learns: bool = False,
    steps: int = STEPS,
    workload: Workload | None = None,
    traces: bool = False,
    on_step: Callable[[int], None] = lambda step: None,
    at_own_pace: bool = False,
) -> Outcome:
    """Return how a resolved job would run on a cluster.

    With `learns` the ranks compute on the job's data, for all of the job's steps; otherwise only
    sizes are simulated, for `steps` steps, and nothing is loaded. `workload` is None to count the
    model's operations (`find_workload`). `traces` asks for a trace. `on_step` is called after every
    step of rank 0. `at_own_pace`: see `simulate`.
    """
    settings, bucket_bytes = job.strategy, job.strategy.bucket_bytes
    assert settings.shards is not None
    learning = Learning(job) if learns else None
    if learning is None:
        workload = workload or find_workload(job, cluster)
    elif workload is None:
        workload = _derive(job, cluster, learning.model, learning.data)
    else:
        _check_fits(workload, learning.parameters)
    job, choice = with_choices(job, cluster, workload)
    settings = job.strategy
    assert job.data.prefetch != "auto"
    found = simulate(
        workload,
        cluster,
        functools.partial(make_strategy, settings.name, settings.settings, job.run.seed),
        steps=steps if learning is None else learning.order.total,
        shards=settings.shards,
        bucket_bytes=None if bucket_bytes == "auto" else bucket_bytes,
        overlap=None if settings.overlap == "auto" else settings.overlap,
        algorithm=job.cluster.algorithm,
        links=job.cluster.links,
        workers=job.data.workers,
        prefetch=job.data.prefetch,
        threads=job.run.threads,
        conditions=conditions_of(job.cluster, job.run.seed, job.faults),
        learning=learning,
        num_settings=num_settings(job),
        state_copies=state_copies(job),
        clips=job.optimizer.clip_norm is not None,
        traces=traces,
        on_step=on_step,
        at_own_pace=at_own_pace,
    )
    found = dataclasses.replace(found, choice=choice)
    if found.trace is None:
        return found
    about = {"job": job_to_toml(job), "strategy": settings.name}
    header = msgspec.structs.replace(found.trace.header, **about)
    return dataclasses.replace(found, trace=Trace(found.trace.tasks, header))


def with_choices(job: Job, cluster: Cluster, workload: Workload) -> tuple[Job, tuple[str, ...]]:
    """Return the job with what its strategy leaves to the simulator, and the reasons, in lines."""
    wanted, shards = job.strategy.own, job.strategy.shards
    assert shards is not None
    if not (isinstance(wanted, HybridSettings) and wanted.must_choose):
        return job, ()
    tried = candidates(workload, cluster, shards, wanted, threads=job.run.threads)
    settings = msgspec.structs.replace(job.strategy, settings=best_of(tried).settings)
    return msgspec.structs.replace(job, strategy=settings), tuple(table_of(tried))


def find_workload(job: Job, cluster: Cluster, path: Path | None = None) -> Workload:
    """Return the workload of one shard: from a file, or counted on the shapes of the job's model.

    Only data and models of the user's own are really made: nothing else is known about them.
    """
    assert job.strategy.shards is not None
    if path is not None:
        return _read(job, path, job.data.batch // job.strategy.shards)
    facts = describe_data(job)
    where = contextlib.nullcontext() if is_own(job.model.name) else torch.device("meta")
    with where:
        model = build_model(job, facts)
    return _derive(job, cluster, model, facts)


def _derive(job: Job, cluster: Cluster, model: nn.Module, facts: DataSet | Facts) -> Workload:
    assert job.strategy.shards is not None
    derived = derive(
        model,
        facts.sample_shape,
        job.data.batch // job.strategy.shards,
        cluster.flops_per_s,
        job.cluster.input_s or 0.0,
        job.model.name,
        getattr(torch, facts.sample_dtype),
        device=DEVICES.get(cluster.device or DEFAULT),
        state_copies=state_copies(job),
    )
    return _with_settings(job, derived)


def _read(job: Job, path: Path, samples: int) -> Workload:
    """Read a workload for shards of this many samples; settings of the cluster win over it."""
    found = workload_files.read(path)
    for key, value in (("flops_per_s", job.cluster.flops_per_s), ("device", job.cluster.device)):
        if value is not None:
            raise ConfigError(
                f"cluster.{key}",
                f"got {value:g} with --workload"
                if isinstance(value, float)
                else f'got "{value}" with --workload',
                "the file says how long each layer takes",
                f"Remove it (on the command line: --set cluster.{key}=).",
            )
    try:
        found = found.for_samples(samples)
    except ValueError as error:
        raise ConfigError(
            "--workload",
            f"{printable(path)}: {printable(error)}",
            f"a shard of this job has {samples}",
            "Use another data.batch or strategy.shards, or add times for it to the file.",
        ) from None
    return _with_settings(job, found)


def _with_settings(job: Job, workload: Workload) -> Workload:
    """Return the workload without what the job's cluster says otherwise."""
    if job.cluster.input_s is not None:
        workload = msgspec.structs.replace(workload, input_s=job.cluster.input_s, reads=())
    if job.cluster.update_bytes_per_s is not None:
        workload = msgspec.structs.replace(workload, update_s=None, update_spread=None)
    return workload


def _check_fits(workload: Workload, parameters: Mapping[str, torch.Tensor]) -> None:
    """Refuse to learn with the times of another model."""
    theirs = {size.name: size.num_elements for size in workload.parameters}
    ours = {name: one.numel() for name, one in parameters.items() if one.requires_grad}
    if theirs != ours:
        differ = min({*theirs.items()} ^ {*ours.items()})[0]
        raise ConfigError(
            "--workload",
            f"parameter {printable(differ)} is not the same in the file and in the job's model",
            "with --learn the model computes with the file's times",
            "Write the file with this job's model, or leave --learn away.",
        )


def num_settings(job: Job) -> int:
    """Return how many numbers the settings of the job's optimizer have.

    As a fact: to build an optimizer of torch takes seconds, since the first imports torch._dynamo.
    """
    sgd = ("lr", "momentum", "dampening", "weight_decay")
    adam = ("lr", "first beta", "second beta", "eps", "weight_decay")
    return len(sgd if job.optimizer.name == "sgd" else adam)


def state_copies(job: Job) -> int:
    """Return how many numbers the job's optimizer keeps for each parameter; see `num_settings`."""
    if job.optimizer.name == "sgd":
        return 1 if job.optimizer.momentum else 0
    return 2
