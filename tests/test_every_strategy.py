"""The promises that every strategy keeps, on the virtual clock. A new one joins by its name."""

from __future__ import annotations

import itertools

import pytest

from syncline.faults import Conditions, Fault, Jitter
from syncline.sim.run import simulate
from syncline.strategies import STRATEGIES
from traces import check_trace
from worlds import cluster, workload

every_strategy = pytest.mark.parametrize("strategy", sorted(STRATEGIES))
every_size = pytest.mark.parametrize("ranks", [2, 3, 4, 8, 32])

LAYERS = [(4096, 0.01, 0.02), (256, 0.0, 0.0), (65536, 0.03, 0.05), (1024, 0.01, 0.01)]
STEPS = 4


def run(strategy, ranks, **options):
    links = cluster(ranks, rate=1e6, latency_s=1e-3)
    options = {"overlap": True, "bucket_bytes": 5000, "traces": True} | options
    return simulate(workload(*LAYERS), links, strategy, steps=STEPS, **options)


@every_strategy
@every_size
def test_every_rank_takes_every_step_whatever_the_jitter(strategy, ranks):
    jitter = Conditions(
        jitter=Jitter(kind="exponential"),
        faults=(Fault(rank=ranks - 1, step=1, kind="slow", factor=10.0),),
    )
    outcome = run(strategy, ranks, conditions=jitter)
    kinds = ("forward", "backward", "reduce", "gather")
    done = {(t.rank, t.kind, t.step) for t in outcome.trace.tasks if t.kind in kinds}
    assert done == set(itertools.product(range(ranks), kinds, range(STEPS)))


@every_strategy
@every_size
def test_a_step_is_never_faster_than_its_compute_nor_slower_than_everything_in_turn(
    strategy, ranks
):
    options = {"traces": False}
    overlapped = run(strategy, ranks, **options)
    one_by_one = run(strategy, ranks, overlap=False, **options)
    compute_s = sum(layer[1] + layer[2] for layer in LAYERS)
    assert compute_s <= overlapped.step_s
    assert STEPS * compute_s <= overlapped.step_ends_s[-1] <= one_by_one.step_ends_s[-1]


@every_strategy
@every_size
def test_tasks_of_a_lane_do_not_overlap_and_wait_for_what_they_say(strategy, ranks):
    trace = run(strategy, ranks).trace
    check_trace(trace)
    steps = {task.step for task in trace.tasks if task.kind == "serve"}
    assert not steps or len(steps) >= STEPS - 1  # a rank serves while it takes its steps
    last: dict[tuple[int, str], float] = {}
    for task in trace.tasks:
        if task.kind != "serve":  # served while a hook waits for others
            assert last.get((task.rank, task.lane), 0.0) <= task.start_s <= task.end_s
            last[task.rank, task.lane] = task.end_s


@every_strategy
@pytest.mark.parametrize("ranks", [8, 32, 128])
def test_with_a_slow_rank_those_who_wait_for_others_wait_and_no_one_else(strategy, ranks):
    slow = Conditions(slow_ranks={ranks - 1: 5.0})
    layers = workload((4096, 0.1, 0.2), (4096, 0.1, 0.2))
    links = cluster(ranks, rate=1e9, latency_s=1e-6)
    options = {"steps": STEPS, "conditions": slow, "overlap": True, "traces": True}
    runs = [simulate(layers, links, strategy, **options) for _ in range(2)]
    assert runs[0].trace.to_bytes() == runs[1].trace.to_bytes()
    ends = {
        rank: max(t.end_s for t in runs[0].trace.tasks if t.rank == rank and t.kind == "backward")
        for rank in (0, ranks // 2, ranks - 1)
    }
    alone_s, slow_s = STEPS * 0.6, 5 * STEPS * 0.6
    assert ends[ranks - 1] == pytest.approx(slow_s, rel=0.02)
    for rank in (0, ranks // 2):
        if STRATEGIES[strategy].settings.is_synchronous:
            # Its last backward begins with the slow rank's and takes a fifth of its time.
            assert ends[rank] > (STEPS - 1) * 5 * 0.6
        else:
            assert ends[rank] == pytest.approx(alone_s, rel=0.02)


@pytest.mark.parametrize("strategy", ["gossip", "elastic"])
def test_in_virtual_time_too_the_others_go_on_without_a_dead_rank(strategy):
    death = Conditions(faults=(Fault(rank=0, step=2, kind="death"),))
    outcome = run(strategy, 4, conditions=death)
    done = [(t.rank, t.step) for t in outcome.trace.tasks if t.kind == "backward"]
    taken = [len({step for rank, step in done if rank == r}) for r in range(4)]
    assert taken == [2, STEPS, STEPS, STEPS]
