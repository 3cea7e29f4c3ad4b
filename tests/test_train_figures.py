"""Figures of `train` that come from all ranks, against those of `simulate`."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from msgspec.structs import astuple

from syncline.cluster import cluster_of
from syncline.config import read_job
from syncline.perf.pace import Pace
from syncline.run_figures import RankFigures, RunFigures
from syncline.sim.job import simulate_job
from syncline.workload import Layer, Workload
from training import train_forked

pytestmark = pytest.mark.processes

COMPUTE_S = 0.06

SLEEPING = f"""
from syncline.models.sleeping import SleepingLayer, sleeping


def make():
    return sleeping([SleepingLayer(4000, {COMPUTE_S / 3}, {COMPUTE_S * 2 / 3})])
"""

JOB = """
[model]
name = "{module}:make"

[data]
name = "synthetic"
sample_shape = [10]
classes = 10
samples = 256
batch = {batch}

[optimizer]
lr = 0.01

[run]
steps = {steps}
"""


@pytest.mark.parametrize("slow", [0, 1])
@pytest.mark.parametrize("strategy", ["gossip", "elastic", "server"])
def test_a_slow_rank_counts_as_in_a_simulation_whichever_it_is(own, tmp_path, strategy, slow):
    ranks, steps = 4, 10
    file = tmp_path / "job.toml"
    file.write_text(JOB.format(module=own(SLEEPING), batch=2 * ranks, steps=steps))
    fault = f'faults=[{{rank={slow}, step=0, kind="slow", factor=5, steps={steps}}}]'
    sets = (f"strategy.name={strategy}", fault)
    found = train_forked(file, tmp_path / "run", *sets, ranks=ranks)
    job = read_job(file, sets).resolved(ranks)
    shard = Workload("one", (Layer("0", 4000, COMPUTE_S / 3, COMPUTE_S * 2 / 3),), samples=2)
    simulated = simulate_job(job, cluster_of(job.cluster, ranks, 1), steps=steps, workload=shard)
    # Three ranks and a fifth of one. On a busy machine sleeping takes longer, not twice as long;
    # a slow rank 0 that counted for all would show a quarter.
    assert simulated.samples_per_s == pytest.approx(2 * 3.2 / COMPUTE_S, rel=0.02)
    assert 0.5 < found["samples_per_s"] / simulated.samples_per_s < 1.25
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["samples_per_s"] > 0


def test_samples_of_a_rank_that_was_lost_count_over_the_time_of_the_others():
    pace = Pace(batch=8)
    for now_s in (0.0, 2.0, 4.0):
        pace.end_step(now_s, 0.0)
    told = [RankFigures(2.0, 10.0, 100, 50.0), RankFigures(3.0, 20.0, 300, 70.0)]
    replica = SimpleNamespace(
        my_shards=(0,),
        run=SimpleNamespace(tell_figures=lambda mine, comm: [list(astuple(one)) for one in told]),
    )
    session = SimpleNamespace(comm=SimpleNamespace(traffic=SimpleNamespace(step_bytes=7)))
    order = SimpleNamespace(batch=8, shards=4, total=3)
    figures = RunFigures(replica, session, pace, order, start=0)
    # Three shards of two samples in four seconds.
    ranks = SimpleNamespace(lost_shards=lambda start: 3)
    assert figures.together(ranks) == {
        "samples_per_s": 2.0 + 3.0 + 6 / 4,
        "sent_bytes": 15.0,
        "peak_memory_bytes": 300,
        "mean_peak_memory_bytes": 200.0,
        "memory_share_bytes": 60.0,
    }


BIG = """
[model]
name = "mlp"

[data]
name = "synthetic"
sample_shape = [3, 32, 32]
classes = 10
samples = 16
batch = 4

[optimizer]
lr = 0.01
momentum = 0.9

[run]
steps = 3
"""


@pytest.mark.parametrize("strategy", ["synchronous", "gossip"])
def test_peak_memory_is_that_of_a_simulation_and_what_an_empty_run_needs(tmp_path, strategy):
    file = tmp_path / "job.toml"
    file.write_text(BIG)
    sets = (f"strategy.name={strategy}", "model.options.hidden=[3000, 3000]")  # 73 MB
    small = train_forked(file, tmp_path / "small", sets[0], ranks=2)
    big = train_forked(file, tmp_path / "big", *sets, ranks=2)
    job = read_job(file, sets).resolved(2)
    simulated = simulate_job(job, cluster_of(job.cluster, 2, 1), steps=3)
    needed = {key: big[key] - small[key] for key in ("peak_memory_bytes", "memory_share_bytes")}
    assert needed["peak_memory_bytes"] == pytest.approx(simulated.peak_memory_bytes, rel=0.3)
    assert needed["memory_share_bytes"] == pytest.approx(simulated.memory_share_bytes, rel=0.3)
    assert big["mean_peak_memory_bytes"] <= big["peak_memory_bytes"]
    assert big["memory_share_bytes"] < big["peak_memory_bytes"]
