"""Levels of links in virtual time: half duplex, rates by size, copies between device and host."""

from __future__ import annotations

import pytest
import torch

from syncline.cluster import Link
from syncline.comm.base import Memory, small_sum
from syncline.comm.virtual import VirtualWorld
from syncline.sim.run import simulate
from syncline.virtual.clock import Clock
from worlds import cluster, workload

COPIES = Link(latency_s=0.5, rate_bytes_per_s=4000.0)
ELEMENTS = 1 << 15
SIZE = 4 * ELEMENTS  # twice what is small


def ended_s(work, links_fast=False, **facts):
    """Run work(comm) on every rank of a cluster of sizes; return when the last one ended."""
    clock = Clock()
    world = VirtualWorld(
        clock, cluster(**facts), learns=False, algorithm="direct", has_fast_links=links_fast
    )
    for rank in range(world.cluster.ranks):
        clock.spawn(f"rank {rank}", work, world.communicator(rank))
    clock.run()
    return clock.now_s


def sum_up(comm):
    comm.reduce_scatter(small_sum(comm, ELEMENTS, torch.float32))


@pytest.mark.parametrize("links_fast", [False, True])
def test_a_half_duplex_link_takes_twice_as_long_for_both_ways(links_fast):
    # Each of 4 ranks sends 3/4 of the vector and gets as much, at 1000 bytes a second.
    rate = {"links_fast": links_fast, "ranks": 4}
    half = Link(latency_s=0.0, rate_bytes_per_s=1000.0, duplex="half")
    assert ended_s(sum_up, **rate) == pytest.approx(0.75 * SIZE / 1000)
    assert ended_s(sum_up, **rate, network=half) == pytest.approx(1.5 * SIZE / 1000)
    # Two machines of two: what crosses is half of the vector each way.
    inside = Link(latency_s=0.0, rate_bytes_per_s=1e12)
    found = ended_s(sum_up, ranks=4, ranks_per_machine=2, network=half, inside=inside)
    assert found == pytest.approx(2 * 0.5 * SIZE / 1000, rel=1e-4)


def test_a_change_of_a_half_duplex_link_changes_its_one_port():
    from syncline.faults import Conditions, LinkChange

    half = Link(latency_s=0.0, rate_bytes_per_s=1000.0, duplex="half")
    change = Conditions(link_changes=(LinkChange(time_s=0.0, machine=0, factor=0.5),))
    work = workload((8000, 0.0, 0.0))
    before, after = (
        simulate(work, cluster(2, network=half), conditions=one, steps=3) for one in (None, change)
    )
    assert after.step_s == pytest.approx(2 * before.step_s)
    assert set(before.carried_bytes) == {("both", 0), ("both", 1), ("inside", 0), ("inside", 1)}


def test_ranks_with_a_device_copy_to_the_host_and_back():
    # Whole vector to the host, strip back: 0.5 s and bytes / 4000 for each of the two copies.
    without = ended_s(sum_up, ranks=4)
    found = ended_s(sum_up, ranks=4, copies=COPIES)
    assert found - without == pytest.approx(2 * 0.5 + 1.25 * SIZE / 4000)
    inside = {"ranks": 4, "ranks_per_machine": 4}
    assert ended_s(sum_up, **inside, copies=COPIES) == ended_s(sum_up, **inside)


def call_neighbour(comm):
    window = comm.window(ELEMENTS, torch.float32, {"mix": lambda call: 1})
    memory = [Memory(torch.empty(ELEMENTS, device="meta")) for _ in range(2)]
    if comm.position == 0:
        comm.group.world.clock.sleep(1.0)  # all have made the window
        window.call(1, "mix", *memory).wait()


def test_a_call_to_another_machine_copies_values_and_answer():
    found, without = (ended_s(call_neighbour, ranks=2, copies=copies) for copies in (COPIES, None))
    assert found - without == pytest.approx(2 * (0.5 + SIZE / 4000))
    inside = {"ranks": 2, "ranks_per_machine": 2}
    assert ended_s(call_neighbour, **inside, copies=COPIES) == ended_s(call_neighbour, **inside)


def get_neighbour(comm):
    window = comm.window(ELEMENTS, torch.float32, {})
    window.publish(torch.empty(ELEMENTS, device="meta"))
    if comm.position == 0:
        comm.group.world.clock.sleep(1000.0)  # all have published
        window.get(1).wait()


def test_what_is_published_is_copied_once_and_by_each_that_gets_it():
    found, without = (ended_s(get_neighbour, ranks=2, copies=copies) for copies in (COPIES, None))
    assert found - without == pytest.approx(2 * (0.5 + SIZE / 4000))


def test_small_messages_of_collectives_and_calls_take_their_rate():
    # Messages of half the vector and of the whole one at 250 instead of 1000 bytes a second.
    slow = Link(latency_s=0.0, rate_bytes_per_s=1000.0, rates=((SIZE, 250.0), (10 * SIZE, 1000.0)))
    plain = Link(latency_s=0.0, rate_bytes_per_s=1000.0)
    for work, num_bytes in ((sum_up, SIZE / 2), (call_neighbour, 2 * SIZE)):
        found, without = (ended_s(work, ranks=2, network=link) for link in (slow, plain))
        assert found - without == pytest.approx(num_bytes * (1 / 250 - 1 / 1000))


@pytest.mark.parametrize("strategy", ["synchronous", "gossip", "server", "elastic", "layered"])
@pytest.mark.parametrize("links", ["exact", "fast"])
def test_copies_slow_a_step_down_and_its_trace_still_adds_up(strategy, links):
    work = workload((8000, 1.0, 1.0), (4000, 1.0, 1.0))
    fast = {"rate": 1e6, "update_bytes_per_s": 1e9}
    found, without = (
        simulate(
            work,
            cluster(4, 1, copies=copies, **fast),
            strategy,
            steps=3,
            links=links,
            overlap=False,
            traces=True,
        )
        for copies in (COPIES, None)
    )
    assert found.step_s > without.step_s + 1.0
    assert found.trace is not None
    assert without.trace is not None
    assert found.trace.header.cluster["copies"] == {"latency_s": 0.5, "rate_bytes_per_s": 4000.0}
    assert "copies" not in without.trace.header.cluster
    kinds = {part.kind for task in found.trace.tasks for part in task.parts}
    assert "copy" in kinds
    for task in found.trace.tasks:
        ends = [part.end_s for part in task.parts]
        assert ends == sorted(ends)
        assert not ends or (ends[0] >= task.start_s and ends[-1] == task.end_s)
    sent = [
        sum(part.num_bytes for task in one.trace.tasks for part in task.parts)
        for one in (found, without)
    ]
    assert sent[0] == sent[1]


def test_a_trace_has_both_copies_of_an_exchange_around_its_wire():
    work = workload((8000, 1.0, 1.0))
    found = simulate(work, cluster(4, copies=COPIES), steps=2, overlap=False, traces=True)
    assert found.trace is not None
    (reduce, *_) = [task for task in found.trace.tasks if task.kind == "reduce"]
    parts = [(part.kind, part.end_s - start_s) for part, start_s in reduce.spans()]
    kinds, spent = zip(*[one for one in parts if one[0] != "wait"], strict=True)
    assert kinds == ("copy", "wire", "copy")
    # 8000 bytes and the step's flags to the host, for 0.5 s and 2 s; a strip and those back.
    assert 2.5 < spent[0] < 2.6
    assert 1.0 < spent[2] < 1.6


def test_bundles_of_calls_copy_as_much_as_single_calls():
    work, rates = workload((8000, 0.0, 0.0)), {"rate": 1e9, "update_bytes_per_s": 1e9}
    one_by_one, bundled = (
        simulate(work, cluster(4, copies=COPIES, **rates), "elastic", steps=6, links=links).step_s
        for links in ("exact", "fast")
    )
    assert one_by_one > 4.0
    assert bundled == pytest.approx(one_by_one, rel=0.001)
