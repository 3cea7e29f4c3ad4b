"""Small simulations with numbers that can be worked out by hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from syncline.cluster import Cluster, Link
from syncline.comm.virtual import VirtualWorld
from syncline.virtual.clock import Clock
from syncline.workload import Layer, Workload


def cluster(ranks, ranks_per_machine=1, rate=1000.0, latency_s=0.0, **others):
    """Links that carry 1000 bytes a second, and updates that take no time."""
    settings = {
        "network": Link(latency_s=latency_s, rate_bytes_per_s=rate),
        "inside": Link(latency_s=latency_s, rate_bytes_per_s=rate),
        "flops_per_s": 1e9,
        "update_bytes_per_s": float("inf"),
    }
    return Cluster(
        machines=ranks // ranks_per_machine,
        ranks_per_machine=ranks_per_machine,
        **settings | others,
    )


def workload(*layers, input_s=0.0, samples=None):
    """Layers as (bytes, forward seconds, backward seconds)."""
    named = [
        Layer(name=f"layer{k}", size_bytes=b, forward_s=f, backward_s=w)
        for k, (b, f, w) in enumerate(layers)
    ]
    return Workload(name="by hand", layers=tuple(named), input_s=input_s, samples=samples)


def run_virtual(size, work, machines=1):
    """Run work(comm) as one process per virtual rank; return what each returned."""
    clock = Clock()
    world = VirtualWorld(
        clock, cluster(size, size // machines, rate=1e6), learns=True, algorithm="direct"
    )
    results = {}

    def run(rank):
        results[rank] = work(world.communicator(rank))

    for rank in range(size):
        clock.spawn(f"rank {rank}", run, rank)
    clock.run()
    # Through JSON, as results of real ranks come.
    return json.loads(json.dumps([results[rank] for rank in range(size)]))


def untraced(*others):
    """Return the environment without what makes a process count covered lines, and some others.

    For processes whose lines other tests cover: tracing costs them a third of their time.
    """
    return {k: v for k, v in os.environ.items() if not k.startswith(("COVERAGE", *others))}


def run_program(program, **environment):
    """Run a Python program on its own, not slowed down by a tracer; return what it printed."""
    kept = untraced()
    kept["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), kept.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", program], env=kept | environment, capture_output=True, timeout=200
    )
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout
