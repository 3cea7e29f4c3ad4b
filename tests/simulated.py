"""Small simulated jobs with a trace: shared by tests of what is computed from traces."""

from __future__ import annotations

from syncline.cluster import cluster_of, conditions_of
from syncline.config import Job, read_job
from syncline.sim.job import simulate_job

JOB = """
[model]
name = "cnn"
[data]
name = "digits"
batch = 48
prefetch = 0
workers = 0
[optimizer]
name = "sgd"
lr = 0.05
[run]
steps = 20
[cluster]
flops_per_s = 2e9
rate_bytes_per_s = 2e7
latency_s = 1e-4
"""
OWN_SETTINGS = {
    "hybrid": ("strategy.hybrid.groups=2",),
    "local": ("strategy.local.period=2",),
}
FIXES_BUCKETS = ("all_reduce", "wait_free", "merged", "sync_server")


def job_of(folder, strategy: str, *sets: str) -> Job:
    """Return a small job with a strategy; later settings win."""
    path = folder / "job.toml"
    path.write_text(JOB)
    first = [f"strategy.name={strategy}", *OWN_SETTINGS.get(strategy, ())]
    if strategy not in FIXES_BUCKETS:
        first.append("strategy.bucket_bytes=60000")
    last = dict(one.split("=", 1) for one in (*first, *sets))
    return read_job(path, [f"{key}={value}" for key, value in last.items()])


def trace_of(folder, strategy: str, *sets: str, ranks: int = 4, machines=None, steps: int = 4):
    """Simulate a small job; return its trace."""
    job = job_of(folder, strategy, *sets)
    job.check()
    cluster = cluster_of(job.cluster, ranks, machines)
    job = job.resolved(cluster.ranks, cluster.by_machine)
    conditions_of(job.cluster, job.run.seed, job.faults).check(cluster.ranks, cluster.machines)
    found = simulate_job(job, cluster, steps=steps, traces=True).trace
    assert found is not None
    return found
