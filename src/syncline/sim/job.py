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
from syncline.engine.optimizer import snapshot
from syncline.engine.told_settings import flatten
from syncline.errors import ConfigError
from syncline.measure.derive import derive
from syncline.own_functions import is_own
from syncline.perf.trace import Trace
from syncline.recipe import build_model, build_optimizer, describe_data
from syncline.sim.learn import Learning
from syncline.sim.run import Outcome, simulate
from syncline.strategies import make_strategy
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
) -> Outcome:
    """Return how a resolved job would run on a cluster.

    With `learns` the ranks compute on the job's data, for all of the job's steps; otherwise only
    sizes are simulated, for `steps` steps, and nothing is loaded. `workload` is None to count the
    model's operations (`find_workload`). `traces` asks for a trace. `on_step` is called after every
    step of rank 0.
    """
    settings, bucket_bytes = job.strategy, job.strategy.bucket_bytes
    assert settings.shards is not None
    assert job.data.prefetch != "auto"
    learning = Learning(job) if learns else None
    if learning is None:
        workload = workload or find_workload(job, cluster)
    elif workload is None:
        workload = _derive(job, cluster, learning.model, learning.data)
    else:
        _check_fits(workload, learning.parameters)
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
        conditions=conditions_of(job.cluster, job.run.seed, job.faults),
        learning=learning,
        num_settings=num_settings(job),
        state_copies=state_copies(job),
        clips=job.optimizer.clip_norm is not None,
        traces=traces,
        on_step=on_step,
    )
    if found.trace is None:
        return found
    about = {"job": job_to_toml(job), "strategy": settings.name}
    header = msgspec.structs.replace(found.trace.header, **about)
    return dataclasses.replace(found, trace=Trace(found.trace.tasks, header))


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
    return derive(
        model,
        facts.sample_shape,
        job.data.batch // job.strategy.shards,
        cluster.flops_per_s,
        job.cluster.input_s or 0.0,
        job.model.name,
        getattr(torch, facts.sample_dtype),
    )


def _read(job: Job, path: Path, samples: int) -> Workload:
    """Read a workload for shards of this many samples; `cluster.input_s` wins over the file."""
    found = workload_files.read(path)
    if job.cluster.flops_per_s is not None:
        raise ConfigError(
            "cluster.flops_per_s",
            f"got {job.cluster.flops_per_s:g} with --workload",
            "the file says how long each layer takes",
            "Remove it (on the command line: --set cluster.flops_per_s=).",
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
    if job.cluster.input_s is not None:
        found = msgspec.structs.replace(found, input_s=job.cluster.input_s)
    return found


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
    """Return how many numbers the settings of the job's optimizer have."""
    return len(flatten(snapshot(build_optimizer(job.optimizer, nn.Linear(1, 1)))))


def state_copies(job: Job) -> int:
    """Return how many numbers the job's optimizer keeps for each parameter, from a trial step."""
    parameter = nn.Parameter(torch.zeros(2))
    optimizer = build_optimizer(job.optimizer, nn.ParameterList([parameter]))
    parameter.grad = torch.zeros(2)
    optimizer.step()
    state = optimizer.state[parameter].values()
    return sum(isinstance(one, torch.Tensor) and one.shape == parameter.shape for one in state)
