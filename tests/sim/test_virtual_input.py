"""Input in virtual time, in line and ahead, worked out by hand."""

from __future__ import annotations

import pytest

from small_job import small
from syncline.cluster import cluster_of
from syncline.sim.input import Loading, VirtualInput
from syncline.sim.job import simulate_job
from syncline.sim.run import simulate
from worlds import cluster, workload

FAST = {"rate": 1e12, "latency_s": 0.0}
BOUND = workload((4096, 0.4, 0.6), input_s=9.0)  # a rank loads for 9 s and computes for 1 s
HIDDEN = workload((4096, 0.4, 0.6), input_s=0.5)


def waits(times_s, **loading):
    """How long a rank waits that takes its batches at these times, one after the other."""
    batches, waited = VirtualInput(Loading(**loading)), []
    for at_s in times_s:
        waited.append(batches.take(at_s))
    return waited


def test_in_line_each_batch_takes_its_time():
    assert waits([0.0, 5.0, 6.0], input_s=1.0) == [1.0, 1.0, 1.0]


def test_a_thread_loads_so_many_batches_ahead_and_then_stops():
    # Loaded at 1, 2 and 3; the fourth is asked for at 10, when the third is taken.
    assert waits([0.0, 1.5, 10.0, 10.0], input_s=1.0, prefetch=1) == [1.0, 0.5, 0.0, 1.0]
    # Two more wait at 10.
    at_10 = [0.0, 1.5, 10.0, 10.0, 10.0]
    assert waits(at_10, input_s=1.0, prefetch=2) == [1.0, 0.5, 0.0, 0.0, 1.0]


def test_workers_load_side_by_side_each_one_batch_at_a_time():
    # Two load from 0 to 1, then from 1 to 2 what was asked for meanwhile.
    takes = [0.0, 1.0, 1.0, 2.0]
    assert waits(takes, input_s=1.0, workers=2, prefetch=2) == [1.0, 0.0, 1.0, 0.0]
    assert waits(takes, input_s=1.0, workers=3, prefetch=3) == [1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("loading", "step_s"),
    [
        ({}, 10.0),  # in line: 9 + 1
        ({"prefetch": 1}, 9.0),  # a thread loads all the time
        ({"prefetch": 2}, 9.0),
        ({"workers": 1, "prefetch": 2}, 9.0),
        ({"workers": 3, "prefetch": 3}, 3.0),  # three batches in 9 s
        ({"workers": 12, "prefetch": 12}, 1.0),  # more than are needed: hidden
    ],
)
def test_an_input_bound_run_on_8_ranks_is_8_times_as_fast_as_one_that_loads_alike(loading, step_s):
    found = simulate(BOUND, cluster(8, **FAST), steps=13, **loading)
    rate = 8 / found.samples_per_s
    assert rate == pytest.approx(step_s, rel=1e-6)
    assert found.alone_s == pytest.approx(8 * step_s, rel=1e-6)
    assert found.speed_up == pytest.approx(8.0, rel=1e-6)
    assert found.input_wait_s == pytest.approx(step_s - 1.0, abs=1e-6)
    assert found.exposed_input == pytest.approx((step_s - 1.0) / step_s, abs=1e-6)


def test_input_that_compute_hides_does_not_tell():
    found = simulate(HIDDEN, cluster(8, **FAST), steps=6, prefetch=2)
    assert (found.alone_s, found.speed_up) == (pytest.approx(8.0), pytest.approx(8.0))
    assert found.exposed_input == pytest.approx(0.0, abs=1e-6)
    in_line = simulate(HIDDEN, cluster(8, **FAST), steps=6)
    assert in_line.step_s == pytest.approx(1.5)
    assert in_line.alone_s == pytest.approx(12.0)
    assert in_line.exposed_input == pytest.approx(1 / 3)


def test_what_is_loaded_during_the_update_is_limited_too():
    # Two shards of 0.1 s, loaded in 1 s each, then an update of 3 s. One batch is ahead at its end;
    # the other is loaded when the first is taken, so a step waits 0.9 s for it.
    loading = Loading(input_s=1.0, prefetch=1)
    assert loading.step_alone_s(2, 0.1, 3.0, 6) == pytest.approx(0.1 + 0.9 + 0.1 + 3.0)
    assert Loading(input_s=1.0, prefetch=2).step_alone_s(2, 0.1, 3.0, 6) == pytest.approx(3.2)
    assert Loading(input_s=1.0).step_alone_s(2, 0.1, 3.0, 6) == pytest.approx(5.2)


def test_input_in_line_is_a_task_before_each_shard_s_forward():
    loaded = workload((4096, 0.5, 0.5), input_s=4.0)
    found = simulate(loaded, cluster(1, **FAST), shards=2, steps=1, traces=True)
    tasks = [task for task in found.trace.tasks if task.lane == "compute"]
    kinds = [(t.kind, t.start_s, t.end_s) for t in tasks if t.kind in ("input", "forward")]
    assert kinds == [
        ("input", 0.0, 2.0),
        ("forward", 2.0, 2.5),
        ("input", 3.0, 5.0),
        ("forward", 5.0, 5.5),
    ]


def test_ranks_with_more_shards_load_more():
    # 3 shards on 2 ranks, loaded in 4 s a rank on average: 16/3 s for two shards, 8/3 s for one.
    bound = workload((4096, 0.0, 0.0), input_s=4.0)
    for prefetch in (0, 2):
        options = {"shards": 3, "steps": 6, "prefetch": prefetch, "traces": True}
        found = simulate(bound, cluster(2, **FAST), "gossip", **options)
        loads = {task.rank: task.end_s for task in found.trace.tasks if task.kind == "input"}
        assert loads == {0: pytest.approx(6 * 16 / 3), 1: pytest.approx(6 * 8 / 3)}
        assert found.alone_s == pytest.approx(8.0)
        assert found.speed_up == pytest.approx(2.0)


def test_a_job_s_workers_and_prefetch_are_those_of_its_simulation():
    def steps_s(**sets):
        job = small(cluster__input_s="5.0", **sets).resolved(2)
        return simulate_job(job, cluster_of(job.cluster, 2, None), steps=9)

    in_line = steps_s()
    ahead = steps_s(data__prefetch="2")
    assert (in_line.exposed_input, in_line.input_wait_s) == (pytest.approx(1, rel=0.01), 5.0)
    assert 1 < in_line.step_s / ahead.step_s < 1.01, "this network is done in a moment"
    four = steps_s(data__workers="4")
    assert four.samples_per_s == pytest.approx(4 * ahead.samples_per_s, rel=0.01)
