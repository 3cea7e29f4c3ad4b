"""How many tasks of a recorded run are timed again in a second, on one core.

    python -m benchmarks.retime [--ranks 16] [--steps 20] [--samples 64]

A synchronous run of resnet-50 is simulated and recorded, in 18 buckets. Its graph is timed again
with edited costs, several times; counted are the tasks of the trace, all ranks', whatever number
of moments each of them has. With samples, a task counts once for each sample.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from syncline.cluster import cluster_of
from syncline.config import read_job
from syncline.perf.graph import Graph, compile_trace, retime_samples
from syncline.perf.trace import Trace
from syncline.perf.what_if import what_if, wires
from syncline.sim.job import simulate_job

JOB = """
[model]
name = "resnet-50"
[data]
name = "synthetic"
batch = {batch}
prefetch = 0
[optimizer]
name = "sgd"
lr = 0.05
[run]
steps = 100
[cluster]
preset = "25gbit"
"""
ROUNDS = 7


def record(ranks: int, steps: int) -> Trace:
    """Return the trace of a simulated run."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "job.toml"
        path.write_text(JOB.format(batch=32 * ranks))
        job = read_job(path)
    job.check()
    cluster = cluster_of(job.cluster, ranks)
    job = job.resolved(cluster.ranks, cluster.by_machine)
    found = simulate_job(job, cluster, steps=steps, traces=True).trace
    assert found is not None
    return found


def seconds_of(work: Callable[[], object]) -> float:
    """Return the processor time of one of several rounds: their median."""
    taken = []
    for _ in range(ROUNDS):
        started = time.process_time()
        work()
        taken.append(time.process_time() - started)
    return statistics.median(taken)


def measure(graph: Graph, samples: int) -> dict[str, float]:
    """Return tasks a second: once with edited costs, and for many samples at once."""
    what_if(graph, wires(2))  # lists are made at first use
    once_s = seconds_of(lambda: what_if(graph, wires(2)))
    shape = (samples, len(graph.step_ends), graph.header.steps)
    factors = np.random.default_rng(0).lognormal(sigma=0.1, size=shape)
    many_s = seconds_of(lambda: retime_samples(graph, factors))
    return {
        "tasks": graph.num_tasks,
        "moments": len(graph.moments.first),
        "tasks_per_s": graph.num_tasks / once_s,
        "sampled_tasks_per_s": graph.num_tasks * samples / many_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=16)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--samples", type=int, default=64)
    wanted = parser.parse_args()
    trace = record(wanted.ranks, wanted.steps)
    started = time.process_time()
    graph = compile_trace(trace)
    found = {"compile_s": time.process_time() - started} | measure(graph, wanted.samples)
    print(json.dumps({name: float(f"{value:.4g}") for name, value in found.items()}))


if __name__ == "__main__":
    main()
