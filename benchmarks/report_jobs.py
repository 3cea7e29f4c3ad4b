"""Runs that the report's pictures and benchmark show."""

from __future__ import annotations

from pathlib import Path

import msgspec

from benchmarks.prediction import Folder
from benchmarks.prediction_cases import Case
from syncline.cluster import cluster_of, conditions_of
from syncline.config import parse_job
from syncline.measure.validation import of_shard, predict
from syncline.perf.trace import Trace
from syncline.sim.job import simulate_job

MEASURED = Path(__file__).parents[1] / "datasets" / "predictions-2026-11-19.tar.gz"
RESNET = """
[model]
name = "resnet-50"

[data]
name = "synthetic"
batch = 256
sample_shape = [3, 224, 224]
classes = 1000

[optimizer]
name = "sgd"
lr = 0.1

[strategy]
name = "synchronous"

[run]
steps = 1000

[cluster]
preset = "10gbit"
flops_per_s = 5e12
jitter = "lognormal"
jitter_sigma = 0.05
slow_ranks = { 5 = 1.15 }
"""


def resnet_trace(ranks: int, steps: int) -> Trace:
    """Simulate resnet-50 on some ranks, one of them slow."""
    job = parse_job(RESNET)
    cluster = cluster_of(job.cluster, ranks)
    job = job.resolved(cluster.ranks, cluster.by_machine)
    conditions_of(job.cluster, job.run.seed, job.faults).check(cluster.ranks, cluster.machines)
    found = simulate_job(job, cluster, steps=steps, traces=True).trace
    assert found is not None
    return found


def predicted_trace(folder: Path, case: Case, steps: int) -> Trace:
    """Predict a case from what was measured in `folder`."""
    found = Folder(folder)
    job, facts, layers = found.job(case), found.facts(case), found.workload(case)
    cluster = cluster_of(job.cluster, case.ranks, case.ranks, facts)
    interval = predict(job, case.ranks, case.ranks, facts, layers).interval
    job = job.resolved(case.ranks, cluster.by_machine)
    trace = simulate_job(
        job, cluster, steps=steps, workload=of_shard(layers, job), traces=True
    ).trace
    assert trace is not None
    ends = (interval.low_s, interval.high_s)
    header = msgspec.structs.replace(trace.header, interval_s=ends)
    return msgspec.structs.replace(trace, header=header)
