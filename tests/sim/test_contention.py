"""Ranks that share cores, in whole simulations."""

from __future__ import annotations

import msgspec
import pytest

from syncline.cluster import Cluster, Link
from syncline.comm.core_time import core_times
from syncline.comm.shape import even_shape
from syncline.comm.volume import Volume, stages
from syncline.sim.run import simulate
from syncline.workload import Layer, Workload

FREE = Link(latency_s=0.0, rate_bytes_per_s=1e15)
LAYERS = (Layer("0", 400, 0.1, 0.2), Layer("1", 400, 0.1, 0.2))
WORKLOAD = Workload("two layers", LAYERS, samples=1)


def cluster(machines=1, ranks=4, **facts):
    return Cluster(
        machines=machines,
        ranks_per_machine=ranks,
        network=FREE,
        inside=FREE,
        flops_per_s=1e9,
        update_bytes_per_s=1e15,
        **facts,
    )


def step_s(cluster, workload=WORKLOAD, **settings):
    return simulate(workload, cluster, steps=3, **settings).step_s


def test_ranks_without_a_core_each_take_turns():
    assert step_s(cluster()) == pytest.approx(0.6)
    assert step_s(cluster(cores=4)) == pytest.approx(0.6)
    assert step_s(cluster(cores=2)) == pytest.approx(1.2)
    assert step_s(cluster(cores=2), threads=2) == pytest.approx(2.4)


def test_machines_of_one_computer_share_its_cores():
    assert step_s(cluster(4, 1, cores=2)) == pytest.approx(0.6)
    assert step_s(cluster(4, 1, cores=2, one_computer=True)) == pytest.approx(1.2)


def test_what_ranks_lost_while_they_were_measured_is_not_lost_twice():
    facts = {"ranks": 4, "threads": 1, "cores": 2}
    measured = msgspec.structs.replace(WORKLOAD, machine=facts)
    assert measured.crowding == 2.0
    assert step_s(cluster(cores=2), measured) == pytest.approx(0.6)
    assert step_s(cluster(ranks=2, cores=2), measured) == pytest.approx(0.3)
    assert step_s(cluster(), measured) == pytest.approx(0.6)


def test_exchanges_take_cores_from_compute():
    # Messages of 10 ms of processor time: on machines with one core for one rank, compute waits.
    slow = {"machines": 2, "ranks": 1, "message_s": 0.01}
    beside = {"overlap": True, "bucket_bytes": 400}
    alone = step_s(cluster(**slow), **beside)
    crowded = step_s(cluster(**slow, cores=1), **beside)
    enough = step_s(cluster(**slow, cores=2), **beside)
    assert enough == pytest.approx(alone)
    assert crowded > alone + 0.009


@pytest.mark.parametrize("strategy", ["synchronous", "gossip", "server", "elastic", "all_reduce"])
def test_cores_that_are_enough_change_nothing(strategy):
    """With the machine's own cores the clock goes another way, to the same times."""
    slow = {"message_s": 1e-3, "collective_s": 1e-3, "byte_s": 1e-6}
    free = simulate(WORKLOAD, cluster(2, 2, **slow), strategy, steps=4)
    many = simulate(WORKLOAD, cluster(2, 2, **slow, cores=8), strategy, steps=4)
    assert many.step_ends_s == pytest.approx(free.step_ends_s)


def test_one_rank_stands_for_all_only_where_none_shares_cores():
    facts = cluster(2, 2, cores=1)
    found = simulate(WORKLOAD, facts, steps=3)
    with_trace = simulate(WORKLOAD, facts, steps=3, traces=True)
    assert found.step_ends_s == pytest.approx(with_trace.step_ends_s)
    assert found.step_s == pytest.approx(1.2)


def test_devices_share_no_cores_of_their_hosts():
    assert step_s(cluster(cores=1, device="v100")) == pytest.approx(0.6)


def test_the_base_of_the_speed_up_has_cores_of_its_own():
    facts = {"ranks": 4, "threads": 1, "cores": 2}
    measured = msgspec.structs.replace(WORKLOAD, machine=facts)
    found = simulate(measured, cluster(cores=2), steps=3)
    assert found.alone_s == pytest.approx(4 * 0.3)
    assert found.speed_up == pytest.approx(2.0)


def test_each_rank_pays_for_its_own_part_of_a_collective():
    facts = cluster(3, 1, cores=1, message_s=1.0, byte_s=0.001, collective_s=10.0)
    strips = Volume((400.0, 0.0, 0.0), (1, 1, 1), (1, 1, 1))  # rank 0 owns all
    found = list(stages("reduce_scatter", even_shape(3, 1), strips))
    # Rank 0 gets 400 bytes from each of the others, which exchange nothing with each other.
    assert core_times(found, facts) == pytest.approx((10 + 2 + 0.8, 10 + 2 + 0.4, 10 + 2 + 0.4))


def test_a_call_is_paid_for_once_at_both_ends():
    # One core each; ranks compute all the time, and call each other.
    free = cluster(2, 1, cores=4, message_s=0.01)
    busy = cluster(2, 1, cores=1, message_s=0.01)
    settings = {"strategy": "gossip", "bucket_bytes": 800}
    found = [simulate(WORKLOAD, one, steps=5, **settings).step_s for one in (free, busy)]
    # A step's exchange is a get: the caller's message, and the owner's, 10 ms each.
    assert found[1] - found[0] <= 0.0201
