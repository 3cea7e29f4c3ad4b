"""Samples a second, the base of the speed-up and exposed communication, worked out by hand."""

from __future__ import annotations

import pytest

from syncline.faults import Conditions, Fault
from syncline.perf.pace import RankSteps, samples_per_s_of
from syncline.sim.run import simulate
from syncline.strategies import Elastic, ElasticSettings
from worlds import cluster, workload

APART = ["gossip", "elastic", "server"]
T = 1.0  # seconds of a shard
FAST = {"rate": 1e12, "latency_s": 0.0}


@pytest.mark.parametrize("strategy", APART)
def test_fifteen_ranks_and_one_five_times_slower_are_15_2_ranks(strategy):
    slow = Conditions(slow_ranks={3: 5.0})
    shard = workload((4096, 0.4 * T, 0.6 * T), samples=8)
    found = simulate(shard, cluster(16, **FAST), strategy, steps=10, conditions=slow)
    # 15 ranks take 8 samples in T, the slow one in 5 T; one rank alone takes 8 samples in T.
    assert found.samples_per_s == pytest.approx(8 * (15 + 1 / 5) / T, rel=1e-6)
    assert found.speed_up == pytest.approx(15.2, rel=1e-6)
    assert found.efficiency == pytest.approx(15.2 / 16, rel=1e-6)
    # The time of a step is that of most ranks.
    assert found.step_s == pytest.approx(T, rel=1e-6)


def test_with_a_synchronous_strategy_all_go_at_the_slow_one_s_pace():
    slow = Conditions(slow_ranks={3: 5.0})
    shard = workload((4096, 0.4 * T, 0.6 * T), samples=8)
    found = simulate(shard, cluster(16, **FAST), steps=10, conditions=slow)
    assert found.samples_per_s == pytest.approx(16 * 8 / (5 * T), rel=1e-6)
    assert found.speed_up == pytest.approx(3.2, rel=1e-6)
    assert found.step_s == pytest.approx(5 * T, rel=1e-6)


def test_a_rank_that_never_ends_a_step_meanwhile_counts_by_the_part_it_has_done():
    slow = Conditions(slow_ranks={0: 100.0})
    found = simulate(workload((4096, 0.4, 0.6)), cluster(4, **FAST), "gossip", conditions=slow)
    assert found.speed_up == pytest.approx(3.01, rel=1e-6)


def test_ranks_with_more_shards_count_more():
    # 3 shards on 2 ranks: the first has two, so takes 2 T for them; 1 shard a T each.
    found = simulate(
        workload((4096, 0.4, 0.6), samples=5), cluster(2, **FAST), "gossip", shards=3, steps=8
    )
    assert found.samples_per_s == pytest.approx(10.0, rel=1e-6)
    assert found.speed_up == pytest.approx(2.0, rel=1e-6)


def test_a_rank_that_died_counts_until_then():
    # Until its death at 2 s there are 4 ranks, then 3: from the first end, at 1 s, to the last, at
    # 8 s, they take 4 + 6 x 3 shards.
    death = Conditions(faults=(Fault(rank=1, step=2, kind="death"),))
    found = simulate(
        workload((4096, 0.4, 0.6)), cluster(4, **FAST), "gossip", steps=8, conditions=death
    )
    assert found.samples_per_s == pytest.approx(22 / 7, rel=1e-6)


def test_the_rate_of_ranks_by_hand():
    fast = RankSteps(0.0, (1.0, 2.0, 3.0), 10.0, is_whole=True)
    slow = RankSteps(0.0, (2.0, 4.0, 6.0), 10.0, is_whole=True)
    # From 1 s to 3 s: two steps, and from half a step to one and a half.
    assert samples_per_s_of([fast, slow]) == (20.0 + 10.0) / 2.0
    only = RankSteps(0.5, (1.0,), 10.0, is_whole=True)
    assert samples_per_s_of([only]) == 20.0  # a single step is all there is
    idle = RankSteps(0.0, (), 0.0, is_whole=False)
    assert samples_per_s_of([fast, idle]) == 10.0
    dead = RankSteps(0.0, (1.0, 2.0), 10.0, is_whole=False)
    assert samples_per_s_of([fast, dead]) == (20.0 + 10.0) / 2.0


def test_exposed_communication_is_that_of_living_ranks_that_compute():
    # A step waits until all strips have gone to the center and back; rank 3 dies at step 2.
    make = lambda: Elastic(ElasticSettings(early=False))  # noqa: E731
    death = Conditions(faults=(Fault(rank=3, step=2, kind="death"),))
    links = cluster(4, rate=4096.0)
    found = simulate(
        workload((4096, 0.4, 0.6)), links, make, steps=4, conditions=death, traces=True
    )
    ends = {task.rank: task.end_s for task in found.trace.tasks if task.lane == "compute"}
    lived_s = sum(ends[rank] for rank in (0, 1, 2))
    worked_s = 3 * 4 * 1.0
    # All that ranks 0 to 2 did not compute, they waited; rank 3 counts neither here nor there.
    assert found.exposed_communication == pytest.approx(1 - worked_s / lived_s, rel=1e-3)


@pytest.mark.parametrize("died", [False, True])
def test_waiting_for_a_rank_that_dies_is_not_communication(died):
    # The others end their first step at 1 s and then wait for rank 1, which is slow; it dies at
    # 10 s, or goes on.
    faults = [Fault(rank=1, step=0, kind="slow", factor=10.0)]
    if died:
        faults.append(Fault(rank=1, step=1, kind="death"))
    make = lambda: Elastic(ElasticSettings(synchronous=True))  # noqa: E731
    found = simulate(
        workload((4096, 0.4, 0.6)),
        cluster(3, **FAST),
        make,
        steps=2,
        overlap=True,
        conditions=Conditions(faults=tuple(faults)),
    )
    waited = found.exposed_communication
    if died:
        assert waited == pytest.approx(0.0, abs=1e-6)
    else:
        assert waited > 0.5
