"""The promises that windows keep in every communicator."""

from __future__ import annotations

import pytest
import torch

from comm.test_every_communicator import WORLDS, in_world

pytestmark = pytest.mark.processes

# Neither torch.distributed's messages nor communicators with leaders have windows.
WITH_WINDOWS = sorted(w for w in WORLDS if "torch" not in w and not w.startswith("led"))
every_window = pytest.mark.parametrize("world", WITH_WINDOWS)

SIZE = 1000
TURNS = 60


def filled(comm, value):
    memory = comm.allocate(SIZE, torch.float32)
    memory.mine.fill_(value)
    return memory


@every_window
def test_a_get_returns_what_was_published_and_its_version(world):
    def work(comm):
        window = comm.window(SIZE, torch.float32, {})
        window.publish(torch.full((SIZE,), float(comm.ranks[comm.position])))
        comm.barrier()
        found = []
        for position in range(comm.size):
            pending = window.get(position)
            found.append((pending.wait(), pending.values[0].item(), pending.values[-1].item()))
            pending.release()
        comm.barrier()
        window.publish(torch.full((SIZE,), 100.0 + comm.ranks[comm.position]))
        comm.barrier()
        pending = window.get((comm.position + 1) % comm.size)
        again = [pending.wait(), pending.values.unique().tolist()]
        pending.release()
        comm.barrier()
        return [found, again, list(comm.ranks), comm.position, window.num_calls, window.sent_bytes]

    for found, again, ranks, position, num_calls, sent_bytes in in_world(world, work):
        assert found == [[1, float(rank), float(rank)] for rank in ranks]
        assert again == [2, [100.0 + ranks[(position + 1) % len(ranks)]]]
        others = len(ranks) if len(ranks) > 1 else 0
        assert (num_calls, sent_bytes) == (others, others * SIZE * 4)


@every_window
def test_nothing_can_be_published_too(world):
    def work(comm):
        window = comm.window(0, torch.float32, {})
        window.publish(torch.empty(0))
        comm.barrier()
        pending = window.get((comm.position + 1) % comm.size)
        version = pending.wait()
        comm.barrier()
        return [version, pending.values.numel()]

    assert in_world(world, work) == [[1, 0]] * WORLDS[world][0]


@every_window
def test_calls_change_the_owner_one_after_the_other_and_none_is_lost(world):
    def work(comm):
        rank = comm.ranks[comm.position]
        total = torch.zeros(SIZE, dtype=torch.float64)
        senders = []

        def add(call):
            call.out.copy_(total)
            total.add_(call.values * int(call.note))
            senders.append(call.sender)
            return len(senders)

        window = comm.window(0, torch.float32, {"add": add})
        values, out = filled(comm, 1.0 + rank), filled(comm, -1.0)
        comm.barrier()
        torn = 0
        for turn in range(TURNS):
            pending = window.call((comm.position + turn) % comm.size, "add", values, out, b"3")
            pending.wait()
            torn += len(out.mine.unique()) != 1
        comm.barrier()
        return [total.unique().tolist(), len(senders), sorted(set(senders)), torn]

    results = in_world(world, work)
    size = len(results)
    assert [torn for _, _, _, torn in results] == [0] * size
    assert sum(served for _, served, _, _ in results) == TURNS * size
    assert all(senders == list(range(size)) for _, _, senders, _ in results)
    expected = 3.0 * TURNS * sum(1.0 + rank for rank in range(size))
    assert sum(total for (total,), _, _, _ in results) == expected


@every_window
def test_many_calls_may_be_under_way_and_parts_of_memory_travel(world):
    def work(comm):
        kept = torch.zeros(SIZE)

        def put(call):
            start = int(call.note)
            call.out.copy_(kept[start : start + call.values.numel()])
            kept[start : start + call.values.numel()] = call.values
            return start

        window = comm.window(0, torch.float32, {"put": put})
        values, out = comm.allocate(SIZE, torch.float32), filled(comm, -1.0)
        values.mine.copy_(torch.arange(SIZE) + 1000.0 * comm.ranks[comm.position])
        comm.barrier()
        after = (comm.position + 1) % comm.size
        cuts = range(0, SIZE, 10)
        pending = [
            window.call(after, "put", values.part(k, k + 10), out.part(k, k + 10), b"%d" % k)
            for k in cuts
        ]
        results = [one.wait() for one in pending]
        comm.barrier()
        before = comm.ranks[comm.position - 1]
        expected = torch.arange(SIZE) + 1000.0 * before
        return [results == list(cuts), torch.equal(kept, expected), out.mine.unique().tolist()]

    assert in_world(world, work) == [[True, True, [0.0]]] * WORLDS[world][0]


@every_window
def test_who_waits_is_woken_by_a_call(world):
    def work(comm):
        told = []

        def tell(call):
            told.append(int(call.note))
            return 0

        window = comm.window(0, torch.float32, {"tell": tell})
        comm.barrier()
        for position in range(comm.size):
            window.call(position, "tell", note=b"%d" % comm.ranks[comm.position]).wait()
        window.until(lambda: len(told) == comm.size, lambda: "waits to be told")
        comm.barrier()
        return sorted(told)

    size = WORLDS[world][0]
    assert in_world(world, work) == [list(range(size))] * size
