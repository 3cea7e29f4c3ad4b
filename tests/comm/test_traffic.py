"""Bytes that ranks hand to each other: by hand, as sent, and the same in virtual time."""

from __future__ import annotations

import pytest
import torch

from comm.test_every_communicator import WORLDS, in_world, make_partials
from ranks import run_ranks
from syncline.comm.base import Blocks, Strips, even_cuts
from syncline.comm.streams import _Peer
from syncline.comm.volume import strip_bytes
from worlds import run_virtual

pytestmark = pytest.mark.processes

# A real world, and the machines of the virtual one that works the same way.
PAIRS = {
    "shared memory, 3 ranks": 1,
    "network, 3 ranks": 3,
    "2 machines with 2 ranks": 2,
    "2 machines with 3 ranks": 2,
}

SMALL, LARGE = 50, 20_001


def cuts_of(how, num_elements, size):
    if how == "even":
        return even_cuts(num_elements, size)
    if how == "uneven":  # the first gets nothing, the second most
        rest = even_cuts(num_elements // 4, size - 1)
        return (0, 0, *(num_elements - rest[-1] + at for at in rest[1:-1]), num_elements)
    owner = {"first": 0, "middle": size // 2, "last": size - 1}[how]
    return (0,) * (owner + 1) + (num_elements,) * (size - owner)


def counted(comm, what, *arguments):
    """Do something; return what of it the log shows."""
    before, sent = len(comm.traffic.log), comm.traffic.sent_bytes
    result = getattr(comm, what)(*arguments)
    entries = comm.traffic.log[before:]
    assert comm.traffic.sent_bytes - sent == sum(entry.num_bytes for entry in entries)
    return result, [list(entry) for entry in entries]


def blocks_of(comm, blocks, kind):
    """Return what a rank sends and what it receives, in float32."""
    given, taken = blocks.gives[comm.position], blocks.takes[comm.position]
    sends = [kind(given * take // 4) for take in blocks.takes]
    return sends, [kind(give * taken // 4) for give in blocks.gives]


def do_everything(comm, how, shards):
    """Run every operation with some cuts and some number of shards; return the whole log."""
    comm.traffic.log = []
    for num_elements in (SMALL, LARGE):
        cuts = cuts_of(how, num_elements, comm.size)
        partials = make_partials(comm, shards, num_elements, cuts)
        for what in ("reduce_scatter", "all_reduce"):
            counted(comm, what, partials)
            comm.barrier()
        for root in range(comm.size):
            counted(comm, "reduce", partials, root)
            comm.barrier()
            counted(comm, "broadcast", torch.zeros(num_elements), root)
        for allocate in (comm.allocate, comm.allocate_common):
            counted(comm, "all_gather", Strips(allocate(num_elements, torch.float64), cuts))
            comm.end_lending()
        blocks = Blocks(tuple(4 * (at % 3) for at in range(comm.size)), strip_bytes(cuts, 1))
        for kind in (torch.zeros, torch.ones):
            sends, receives = blocks_of(comm, blocks, kind)
            counted(comm, "all_to_all", sends, receives, blocks)
    window = comm.window(SMALL, torch.float32, {"add": lambda call: 0})
    window.publish(torch.zeros(SMALL))
    values, out = comm.allocate(30, torch.float32), comm.allocate(20, torch.float32)
    comm.barrier()
    for position in range(comm.size):
        pending = window.get(position)
        pending.wait()
        pending.release()
        window.call(position, "add", values, out, b"note").wait()
        window.call(position, "add", values.part(3, 10)).wait()
    comm.barrier()
    return [list(entry) for entry in comm.traffic.log]


@pytest.mark.parametrize("world", PAIRS)
@pytest.mark.parametrize("how", ["even", "uneven", "first", "middle", "last"])
def test_virtual_ranks_count_what_real_ones_count(world, how):
    size = WORLDS[world][0]

    def work(comm):
        return [do_everything(comm, how, size + more_shards) for more_shards in (0, 1, 7)]

    real, virtual = in_world(world, work), run_virtual(size, work, PAIRS[world])
    assert real == virtual
    for logs in real:
        for log in logs:
            assert {what for _, what, _ in log} == {
                *("reduce_scatter", "all_reduce", "reduce", "broadcast", "all_gather", "barrier"),
                *("all_to_all", "get", "add"),
            }
            assert all(num_bytes == 0 for _, what, num_bytes in log if what == "barrier")


@pytest.mark.parametrize("world", ["2 machines with 2 ranks", "2 machines with 3 ranks"])
def test_subgroups_count_into_the_world_s_traffic_the_same_way(world):
    size = WORLDS[world][0]
    groups = [(0, 1), (0, 2), (0, 1, 2), range(1, size), (1,)]

    def work(comm):
        found = []
        for ranks in groups:
            group = comm.subgroup(ranks)
            if group is not None and group.size > 1:
                assert group.traffic is comm.traffic
                found.append(do_everything(group, "uneven", group.size + 1))
        return found, comm.traffic.sent_bytes

    assert in_world(world, work) == run_virtual(size, work, PAIRS[world])


def test_the_network_counts_what_it_sends():
    def work():
        import syncline
        from syncline.session import current_session

        syncline.init(comm="network")
        comm = current_session().comm
        sent = []
        send = _Peer.send
        _Peer.send = lambda self, what, message, *args: (
            sent.append(len(message)) or send(self, what, message, *args)
        )
        partials = make_partials(comm, 7, LARGE, cuts_of("uneven", LARGE, 3))
        comm.reduce_scatter(partials)
        comm.all_reduce(partials)
        comm.reduce(partials, 1)
        comm.broadcast(torch.zeros(LARGE), 2)
        comm.all_gather(Strips(comm.allocate(9, torch.float32), (0, 0, 9, 9)))
        blocks = Blocks((8, 0, 4000), (3, 40, 5))
        comm.all_to_all(*blocks_of(comm, blocks, torch.zeros), blocks)
        assert comm.traffic.log is None  # unless somebody asks for it
        return [sum(sent), comm.traffic.sent_bytes]

    found = run_ranks(3, work)
    assert all(sent == counted > 0 for sent, counted in found)


def sent_in(world, machines, work):
    """Return what each rank's traffic says after some work, which both clocks must agree on."""

    def measure(comm):
        work(comm)
        return comm.traffic.sent_bytes

    size = WORLDS[world][0]
    found = in_world(world, measure)
    assert found == run_virtual(size, measure, machines)
    return found


def test_one_machine_by_hand():
    # Three ranks, 300 elements of 4 bytes. Rank 1 owns 200 of them, rank 2 owns 100. Of 8 shards
    # rank 0 has (0, 2) and (2, 3), rank 1 (3, 4) and (4, 6), rank 2 (6, 8).
    cuts = (0, 0, 200, 300)

    def reduce(comm):
        comm.reduce_scatter(make_partials(comm, 8, 300, cuts))

    # Peers read of each partial sum all but the owner's strip: twice 300, twice 100, once 200.
    assert sent_in("shared memory, 3 ranks", 1, reduce) == [2400, 800, 800]

    def share(comm):
        comm.all_reduce(make_partials(comm, 8, 300, cuts))

    # Both peers read all of each.
    assert sent_in("shared memory, 3 ranks", 1, share) == [4800, 4800, 2400]

    def to_root(comm):
        comm.reduce(make_partials(comm, 8, 300, cuts), 1)

    # As the reduce-scatter, and rank 1 reads rank 2's strip.
    assert sent_in("shared memory, 3 ranks", 1, to_root) == [2400, 800, 1200]

    def gather(comm):
        comm.all_gather(Strips(comm.allocate(300, torch.float32), cuts))
        comm.all_gather(Strips(comm.allocate_common(300, torch.float32), cuts))

    # Two peers copy each strip; from common memory nobody copies.
    assert sent_in("shared memory, 3 ranks", 1, gather) == [0, 1600, 800]


def test_two_machines_of_two_by_hand():
    # 400 elements of 4 bytes, 100 for each position; column 0 is positions 0 and 1 (ranks 0, 2).
    def reduce(comm):
        comm.reduce_scatter(make_partials(comm, 4, 400))

    # The peer on the machine reads its column, 200; half of the own column crosses, 100.
    assert sent_in("2 machines with 2 ranks", 2, reduce) == [1200] * 4

    def reduce_more(comm):
        comm.reduce_scatter(make_partials(comm, 7, 400))

    # Shards 0, 1 | 2, 3 | 4, 5 | 6: the first machine has (0, 4), the second (4, 6) and (6, 7),
    # which is (4, 7): a node of the tree. So one sum crosses from each.
    assert sent_in("2 machines with 2 ranks", 2, reduce_more) == [1200] * 4

    def reduce_uneven(comm):
        comm.reduce_scatter(make_partials(comm, 6, 400))

    # Shards 0, 1 | 2, 3 | 4 | 5: again (0, 4) and (4, 6).
    assert sent_in("2 machines with 2 ranks", 2, reduce_uneven) == [1200] * 4

    def reduce_many(comm):
        comm.reduce_scatter(make_partials(comm, 10, 400))

    # Shards 0 to 2 | 3 to 5 | 6, 7 | 8, 9: rank 0 has (0, 2), (2, 3), rank 1 (3, 4), (4, 6), the
    # others one node. The first machine has (0, 4), (4, 6), the second (6, 8), (8, 10): all cross.
    assert sent_in("2 machines with 2 ranks", 2, reduce_many) == [
        2 * 800 + 2 * 400,
        2 * 800 + 2 * 400,
        800 + 2 * 400,
        800 + 2 * 400,
    ]


@pytest.mark.parametrize("world", sorted(WORLDS))
def test_after_the_end_of_lending_a_slow_reader_has_read_everything(world):
    size = WORLDS[world][0]

    def work(comm):
        # A reader that falls asleep between the meeting and the sum, on a machine that it shares.
        inside = getattr(comm, "_inside", comm)
        meet = getattr(inside, "meet", None)
        if meet is not None and comm.position == 0:

            def meet_and_sleep(what, *about):
                import time

                meet(what, *about)
                if what == "reduce_scatter":
                    time.sleep(0.05)

            inside.meet = meet_and_sleep
        partials = make_partials(comm, size, 600)
        comm.reduce_scatter(partials)
        mine = partials.strip(comm.position).clone()
        comm.end_lending()
        partials.sums[0].mine.fill_(1e30)
        comm.barrier()
        return mine.abs().max().item() < 1e6

    assert in_world(world, work) == [True] * size
