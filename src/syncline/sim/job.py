"""Simulates a job on a cluster: from settings to a result."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import nn

from syncline.cluster import Cluster, conditions_of
from syncline.config import Job
from syncline.engine.optimizer import snapshot
from syncline.engine.told_settings import flatten
from syncline.measure.derive import derive
from syncline.recipe import build_optimizer
from syncline.sim.learn import Learning
from syncline.sim.run import Outcome, simulate
from syncline.strategies import make_strategy

STEPS = 10
"""Steps of a simulation of sizes: more than a few, since the first ones fill the lanes."""


def simulate_job(
    job: Job,
    cluster: Cluster,
    *,
    learns: bool = False,
    steps: int = STEPS,
    on_step: Callable[[int], None] = lambda step: None,
) -> Outcome:
    """Return how a resolved job would run on a cluster.

    With `learns` the ranks compute on the job's data, for all of the job's steps; otherwise only
    sizes are simulated, for `steps` steps. `on_step` is called after every step of rank 0.
    """
    learning = Learning(job)
    settings, bucket_bytes = job.strategy, job.strategy.bucket_bytes
    workload = derive(
        learning.model,
        learning.data.sample_shape,
        job.data.batch // learning.shards,
        cluster.flops_per_s,
        job.cluster.input_s,
        job.model.name,
        getattr(torch, learning.data.sample_dtype),
    )
    return simulate(
        workload,
        cluster,
        functools.partial(make_strategy, settings.name, settings.settings, job.run.seed),
        steps=learning.order.total if learns else steps,
        shards=learning.shards,
        bucket_bytes=None if bucket_bytes == "auto" else bucket_bytes,
        overlap=None if settings.overlap == "auto" else settings.overlap,
        algorithm=job.cluster.algorithm,
        links=job.cluster.links,
        conditions=conditions_of(job.cluster, job.run.seed, job.faults),
        learning=learning if learns else None,
        num_settings=num_settings(job),
        clips=job.optimizer.clip_norm is not None,
        on_step=on_step,
    )


def num_settings(job: Job) -> int:
    """Return how many numbers the settings of the job's optimizer have."""
    return len(flatten(snapshot(build_optimizer(job.optimizer, nn.Linear(1, 1)))))
