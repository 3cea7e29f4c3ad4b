"""Exchanges of blocks on every communicator: what arrives, and what is counted and refused."""

from __future__ import annotations

import time
from collections import Counter

import pytest
import torch

from comm.test_every_communicator import WORLDS, every_communicator, in_world, make_partials
from comm.test_operations import WORLDS as CHECKED_WORLDS
from comm.test_operations import said_in
from syncline.comm.base import Blocks
from syncline.comm.blocks import blocks_among
from syncline.comm.real import RealCommunicator
from syncline.errors import DeadlockError
from syncline.perf.recorder import Recorder
from syncline.session import current_session
from worlds import run_virtual

pytestmark = pytest.mark.processes


def content(sender, taker, turn, num_bytes, dtype):
    """What a position sends to another one: numbers that tell both, and the turn."""
    start = 100 * sender + 10 * taker + turn
    return (torch.arange(num_bytes // dtype.itemsize) + start).remainder(251).to(dtype)


def exchange(comm, blocks, dtype=torch.float32, turn=0, is_gather=False):
    """Do an exchange in fresh memory; say of each position whether its block is right."""
    me, gives, takes, positions = comm.position, blocks.gives, blocks.takes, range(comm.size)
    if is_gather:
        sends = [content(me, 0, turn, gives[me] * takes[me - 1], dtype)] * comm.size
    else:
        sends = [content(me, at, turn, gives[me] * takes[at], dtype) for at in positions]
    to = 0 if is_gather else me
    wanted = [content(at, to, turn, gives[at] * takes[me], dtype) for at in positions]
    receives = [torch.zeros_like(one) for one in wanted]
    comm.all_to_all(sends, receives, blocks)
    return [at == me or torch.equal(receives[at], wanted[at]) for at in positions]


SHAPES = {
    "even": lambda size: Blocks((8,) * size, (40,) * size),
    "uneven": lambda size: Blocks(
        tuple(8 * (at + 1) for at in range(size)), tuple(7 + 3 * at for at in range(size))
    ),
    "some give nothing": lambda size: Blocks(
        tuple(8 * (at % 2) for at in range(size)), tuple(range(5, 5 + size))
    ),
    "some take nothing": lambda size: Blocks((24,) * size, tuple(at % 2 for at in range(size))),
    "empty": lambda size: Blocks((0,) * size, (3,) * size),
    "large": lambda size: Blocks((8 * 11,) * size, tuple(2000 + at for at in range(size))),
}


DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.uint8)


@every_communicator
def test_every_position_gets_its_block_of_every_other(world):
    def work(comm):
        return [
            {name: exchange(comm, of(comm.size), dtype) for name, of in SHAPES.items()}
            for dtype in DTYPES
        ]

    size = WORLDS[world][0]
    assert (
        in_world(world, work) == [[{name: [True] * size for name in SHAPES}] * len(DTYPES)] * size
    )


@every_communicator
def test_one_tensor_may_be_for_all(world):
    def work(comm):
        even = Blocks((400,) * comm.size, (1,) * comm.size)
        uneven = Blocks(tuple(8 * at for at in range(comm.size)), (3,) * comm.size)
        return [
            exchange(comm, blocks, turn=turn, is_gather=is_gather)
            for turn, (blocks, is_gather) in enumerate(
                [(even, True), (uneven, True), (even, False), (uneven, False), (uneven, True)]
            )
        ]

    size = WORLDS[world][0]
    assert in_world(world, work) == [[[True] * size] * 5] * size


@every_communicator
def test_some_ranks_may_send_one_tensor_to_all_while_others_do_not(world):
    def work(comm):
        blocks = Blocks((16,) * comm.size, (5,) * comm.size)
        one = torch.full((20,), float(comm.position))
        sends = [one] * comm.size if comm.position % 2 else [one.clone() for _ in comm.ranks]
        receives = [torch.zeros(20) for _ in comm.ranks]
        comm.all_to_all(sends, receives, blocks)
        return [
            at == comm.position or one.unique().tolist() == [at] for at, one in enumerate(receives)
        ]

    size = WORLDS[world][0]
    assert in_world(world, work) == [[True] * size] * size


def be_slow_to_read(comm):
    """Let the rank fall asleep after each meeting of an exchange, before it copies blocks out."""
    world = comm
    while isinstance(getattr(world, "_world", None), RealCommunicator):
        world = world._world
    inside = getattr(world, "_inside", world)
    meet = inside.meet

    def meet_and_sleep(what, *about):
        meet(what, *about)
        if what == "all_to_all":
            time.sleep(0.01)

    inside.meet = meet_and_sleep


@every_communicator
def test_a_slow_reader_gets_what_was_sent_in_its_turn(world):
    def work(comm):
        if comm.position == comm.size - 1 and isinstance(comm, RealCommunicator):
            be_slow_to_read(comm)
        many = [of(comm.size) for of in (SHAPES["uneven"], SHAPES["even"])]
        return [all(exchange(comm, many[turn // 3 % 2], turn=turn)) for turn in range(20)]

    size = WORLDS[world][0]
    assert in_world(world, work) == [[True] * 20] * size


@every_communicator
def test_other_collectives_may_come_in_between(world):
    def work(comm):
        partials = make_partials(comm, comm.size, 50)
        found = []
        for turn in range(6):
            found += exchange(comm, SHAPES["uneven"](comm.size), turn=turn)
            if turn % 2:
                comm.barrier()
            partials.sums[0].mine.fill_(float(turn + comm.position))
            if turn % 3:
                comm.announce(partials)
            found += exchange(comm, SHAPES["even"](comm.size), turn=turn)
            comm.all_reduce(partials)
            found.append(partials.result[0].item() == expected_mean(comm.size, turn))
            comm.end_lending()
        # Memory that is allocated after the staging memory has the same number on all machines.
        found += exchange(comm, SHAPES["large"](comm.size))
        late = make_partials(comm, comm.size, 60)
        comm.reduce_scatter(late)
        comm.barrier()
        return all(found)

    assert in_world(world, work) == [True] * WORLDS[world][0]


def expected_mean(size, turn):
    total = torch.tensor(float(sum(turn + at for at in range(size))))
    return (total * (1 / size)).item()


@pytest.mark.parametrize(
    "world", ["shared memory, 3 ranks", "network, 3 ranks", "2 machines with 2 ranks"]
)
def test_exchanges_on_several_channels_and_of_several_groups_may_overlap(world):
    def work(comm):
        lane, found = current_session().lane, []
        lane.start_thread()
        groups, blocks = (comm, comm.subgroup(comm.ranks)), SHAPES["large"](comm.size)

        def hook(group, turn):
            found.append(all(exchange(group, blocks, turn=turn)))

        for channel in (1, 2, 3):  # memory is allocated in one order
            for group in groups:
                lane.submit(hook, group, 0, channel=channel)
                lane.drain()
        for turn in range(1, 9):
            for channel in (1, 2, 3):
                lane.submit(hook, groups[(turn + channel) // 2 % 2], turn, channel=channel)
        lane.drain()
        return found

    assert in_world(world, work) == [[True] * (6 + 24)] * WORLDS[world][0]


def test_machines_may_need_different_staging_memory():
    """The first machine's ranks then exchange much with each other, the second's nothing."""

    def work(comm):
        found = exchange(comm, Blocks((4,) * comm.size, (1,) * comm.size))
        at_second = [comm.ranks[at] >= 2 for at in range(comm.size)]
        blocks = Blocks(tuple(0 if second else 4000 for second in at_second), (3,) * comm.size)
        found += exchange(comm, blocks)
        partials = make_partials(comm, comm.size, 60)
        comm.reduce_scatter(partials)
        comm.barrier()
        return all(found)

    assert in_world("2 machines with 2 ranks", work) == [True] * 4


@every_communicator
def test_bytes_are_counted_as_the_blocks_say(world):
    def work(comm):
        found = []
        for of in SHAPES.values():
            comm.traffic.log, before = [], comm.traffic.sent_bytes
            blocks = of(comm.size)
            exchange(comm, blocks)
            sent = comm.traffic.sent_bytes - before
            found.append([sent, [[one.what, one.num_bytes] for one in comm.traffic.log]])
        return comm.position, found

    size = WORLDS[world][0]
    for position, found in in_world(world, work):
        for of, (sent, log) in zip(SHAPES.values(), found, strict=True):
            gives, takes = of(size).gives, of(size).takes
            want = sum(gives[position] * takes[at] for at in range(size) if at != position)
            assert sent == want
            assert log == ([["all_to_all", want]] if size > 1 else [])


@every_communicator
def test_a_trace_tells_which_ranks_met_in_which_exchange(world):
    def work(comm):
        clock = getattr(getattr(comm, "_world", None), "clock", None)
        now = time.perf_counter if clock is None else lambda: clock.now_s
        recorder = comm.traffic.recorder = Recorder(comm.ranks[comm.position], now)
        for turn in range(2):
            recorder.open()
            exchange(comm, SHAPES["uneven"](comm.size), turn=turn)
            recorder.close("gather", 0, turn)
        comm.traffic.recorder = None
        sent = [sum(part.num_bytes for part in task.parts) for task in recorder.tasks]
        ids = [sorted({part.exchange for part in task.parts} - {""}) for task in recorder.tasks]
        return comm.position, sent, ids

    size, found = WORLDS[world][0], in_world(world, work)
    assert [sent for _, sent, _ in found] == [
        [SHAPES["uneven"](size).sent_by(position)] * 2 for position, _, _ in found
    ]
    met = [Counter(one for _, _, ids in found for one in ids[turn]) for turn in range(2)]
    if size > 1:
        assert all(ids[0] and ids[1] for _, _, ids in found)
        assert all(count > 1 for counts in met for count in counts.values())
    assert not met[0].keys() & met[1].keys()


def test_autograd_does_not_follow_an_exchange():
    def work(comm):
        sends = [torch.full((4,), 2.0, requires_grad=True) * 3 for _ in range(comm.size)]
        receives = [torch.zeros(2, 2, requires_grad=True) for _ in range(comm.size)]
        blocks = Blocks((16,) * comm.size, (1,) * comm.size)
        for _ in range(3):
            comm.all_to_all(sends, receives, blocks)
        return [
            receives[comm.position - 1].tolist(),
            all(one.is_leaf for one in receives),
            torch.is_grad_enabled(),
        ]

    for world in ("shared memory, 2 ranks", "network, 2 ranks", "torch, 2 ranks"):
        assert in_world(world, work) == [[[[6.0] * 2] * 2, True, True]] * 2
    assert run_virtual(2, work) == [[[[6.0] * 2] * 2, True, True]] * 2


@pytest.mark.parametrize("world", ["shared memory, 2 ranks", "virtual, 3 ranks"])
def test_tensors_with_gaps_or_of_other_sizes_are_refused(world):
    def work(comm):
        blocks, said = Blocks((8,) * comm.size, (3,) * comm.size), []
        good, gaps, short = torch.zeros(6), torch.zeros(6, 2)[:, 0], torch.zeros(5)
        for bad in (gaps, short, good.int()):
            for sends, receives in ((bad, good), (good, bad)):
                with pytest.raises(AssertionError) as caught:
                    comm.all_to_all([sends] * comm.size, [receives] * comm.size, blocks)
                said.append(str(caught.value))
        return said

    for said in in_world(world, work):
        gaps, short, dtypes = said[:2], said[2:4], said[4:]
        assert all("with gaps" in one for one in gaps)
        assert all("20 bytes, not 24" in one for one in short)
        assert all("int32" in one for one in dtypes)


# -- mismatches ------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize("is_warm", [False, True])
@pytest.mark.parametrize("world", CHECKED_WORLDS)
def test_an_exchange_and_another_collective_are_named_on_every_rank(world, is_warm, is_first):
    odd = 0 if is_first else CHECKED_WORLDS[world][0] - 1

    def work(comm, rank):
        blocks = SHAPES["uneven"](comm.size)
        if is_warm:  # the staging memory is there
            assert all(exchange(comm, blocks))
        if rank == odd:
            exchange(comm, blocks)
        else:
            comm.barrier()
        comm.barrier()

    for text in said_in(world, work):
        assert "all_to_all" in text
        assert "barrier" in text


def test_machines_that_call_different_collectives_notice_it():
    def work(comm, rank):
        exchange(comm, SHAPES["uneven"](comm.size)) if rank < 2 else comm.barrier()
        comm.barrier()

    for text in said_in("2 machines with 2 ranks", work):
        assert "all_to_all" in text
        assert "barrier" in text


@pytest.mark.parametrize("world", CHECKED_WORLDS)
def test_different_blocks_of_one_size_are_noticed(world):
    def work(comm, rank):
        one = SHAPES["uneven"](comm.size)
        other = blocks_among(one, tuple(reversed(range(comm.size))))
        exchange(comm, other if rank == 0 else one)
        comm.barrier()

    for text in said_in(world, work):
        assert "same calls in the same order" in text
        assert "all_to_all (checksum" in text


def test_virtual_ranks_notice_it_too():
    def work(comm):
        exchange(comm, SHAPES["even"](comm.size)) if comm.position else comm.barrier()

    # Exchanges of blocks run beside hooks: a barrier does not meet them.
    waits = r"rank 0: : barrier waits for rank 1, 2; rank 1: : all_to_all waits for rank 0"
    with pytest.raises(DeadlockError, match=waits):
        run_virtual(3, work)
