"""The promises that every communicator keeps. A new one joins by a line in WORLDS."""

from __future__ import annotations

import hashlib
import os

import pytest
import torch

import syncline
from ranks import run_ranks
from syncline.comm.base import Memory, Partials, Strips, even_cuts, exchange_bytes
from syncline.comm.leaders import lead
from syncline.comm.tree import Spread, plan_leaves, shard_range, split
from syncline.session import current_session
from worlds import run_virtual

pytestmark = pytest.mark.processes

WORLDS = {
    "alone": (1, 1, "auto"),
    "shared memory, 2 ranks": (2, 1, "auto"),
    "shared memory, 3 ranks": (3, 1, "auto"),
    "shared memory, 5 ranks": (5, 1, "auto"),
    "network, 2 ranks": (2, 1, "network"),
    "network, 3 ranks": (3, 1, "network"),
    "torch, 2 ranks": (2, 1, "torch"),
    "2 machines with 2 ranks": (4, 2, "auto"),
    "2 machines with 2 ranks, dealt in turn": (4, 2, "in turn"),
    "2 machines with 3 ranks": (6, 2, "auto"),
    "3 machines with 2 ranks": (6, 3, "auto"),
    "virtual, 1 rank": (1, 1, "virtual"),
    "virtual, 3 ranks": (3, 1, "virtual"),
    "virtual, 3 machines with 2 ranks": (6, 3, "virtual"),
    "led, 4 ranks, groups across each other": (4, 1, "auto", ((0, 2), (1, 3)), (0, 1)),
    "led, 3 ranks, one alone": (3, 1, "auto", ((0,), (1, 2)), (0, 2)),
    "led, 3 ranks in one group": (3, 1, "auto", ((0, 1, 2),), (1,)),
    "led, network, 4 ranks": (4, 1, "network", ((0, 1), (2, 3)), (0, 3)),
    "led, 2 machines with 3 ranks": (6, 2, "auto", ((0, 1, 2), (3, 4, 5)), (2, 3)),
    "led, 2 machines, 4 groups": (6, 2, "auto", ((0,), (1, 2), (3, 5), (4,)), (0, 1, 3, 4)),
    "led, 2 machines, groups of both": (4, 2, "auto", ((0, 2), (1, 3)), (0, 3)),
    "led, virtual, 2 machines with 3 ranks": (6, 2, "virtual", ((0, 1, 2), (3, 4, 5)), (0, 5)),
    "led, virtual, groups of both": (4, 2, "virtual", ((0, 2), (1, 3)), (0, 1)),
}
"""Ranks, machines, kind; if leaders speak for groups, the groups and the leaders."""

every_communicator = pytest.mark.parametrize("world", sorted(WORLDS))


def in_world(world, work):
    """Run work(comm) on every rank of a world."""
    size, machines, kind, *led = WORLDS[world]

    def in_comm(comm):
        return work(lead(comm, *led) if led else comm)

    if kind == "virtual":
        return run_virtual(size, in_comm, machines)

    def on_rank():
        if kind == "in turn":
            # Ranks 0 and 2 on the first machine, 1 and 3 on the second.
            rank = int(os.environ["RANK"])
            os.environ["GROUP_RANK"] = str(rank % machines)
            os.environ["LOCAL_RANK"] = str(rank // machines)
        syncline.init(comm="auto" if kind == "in turn" else kind)
        return in_comm(current_session().comm)

    return run_ranks(size, on_rank, machines=machines)


def leaf(shard: int, num_elements: int) -> torch.Tensor:
    """The contribution of a shard: numbers whose sum depends on the order."""
    generator = torch.Generator().manual_seed(shard)
    return torch.randn(num_elements, generator=generator) * 10.0 ** (shard % 4)


def tree_sum(node, num_elements):
    if node[1] - node[0] == 1:
        return leaf(node[0], num_elements)
    left, right = split(node)
    return tree_sum(left, num_elements) + tree_sum(right, num_elements)


def make_partials(comm, shards, num_elements, cuts=None) -> Partials:
    """Fill a rank's sums with the partial sums of its shards."""
    spread = Spread.even(shards, comm.ranks)
    num_sums = max(plan_leaves(nodes)[1] for nodes in spread.nodes)
    memories = [comm.allocate(num_elements, torch.float32) for _ in range(num_sums)]
    cuts = cuts or even_cuts(num_elements, comm.size)
    partials = Partials(memories, cuts, spread, 1 / shards)
    fill(comm, partials)
    return partials


def fill(comm, partials) -> None:
    for memory, node in zip(partials.sums, partials.spread.nodes[comm.position], strict=False):
        memory.mine.copy_(tree_sum(node, memory.mine.numel()))


def bits(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()


def expected(shards, num_elements):
    return tree_sum((0, shards), num_elements) * (1 / shards)


@every_communicator
def test_reduce_scatter_gives_each_rank_its_strip_of_the_tree_sum(world):
    numbers_of_shards = [WORLDS[world][0] + more for more in (0, 1, 5)]

    def sums(comm, shards):
        partials = make_partials(comm, shards, 1000)
        results = []
        for _ in range(2):
            comm.reduce_scatter(partials)
            mine = partials.strip(comm.position)
            results.append(bits(mine))
            comm.barrier()
            fill(comm, partials)
            comm.barrier()
        low, high = partials.cuts[comm.position : comm.position + 2]
        return results, [low, high]

    answers = in_world(world, lambda comm: [sums(comm, shards) for shards in numbers_of_shards])
    for number, shards in enumerate(numbers_of_shards):
        whole = expected(shards, 1000)
        covered = []
        for results, (low, high) in (answer[number] for answer in answers):
            assert results == [bits(whole[low:high])] * 2, shards
            covered += range(low, high)
        assert sorted(covered) == list(range(1000)), shards


@every_communicator
def test_strips_may_be_empty(world):
    size = WORLDS[world][0]

    def work(comm):
        cuts = (0,) * comm.size + (10,)  # the last position owns everything
        partials = make_partials(comm, size, 10, cuts)
        comm.reduce_scatter(partials)
        return comm.position, bits(partials.strip(comm.position))

    whole = expected(size, 10)
    for position, found in in_world(world, work):
        assert found == bits(whole if position == size - 1 else torch.empty(0))


@every_communicator
def test_all_reduce_gives_everybody_the_tree_sum(world):
    size = WORLDS[world][0]
    sizes = (1, 7, 40_000)

    def work(comm):
        found = []
        for num_elements in sizes:
            partials = make_partials(comm, size + 2, num_elements)
            comm.all_reduce(partials)
            found.append(bits(partials.result))
        return found

    wanted = [bits(expected(size + 2, num_elements)) for num_elements in sizes]
    assert in_world(world, work) == [wanted] * size


@every_communicator
def test_operations_on_the_same_partials_do_not_replay_each_other(world):
    size = WORLDS[world][0]
    shards = size + 1
    sizes = (50, 40_000)

    def operate(comm, num_elements):
        partials = make_partials(comm, shards, num_elements)
        where = partials.result.data_ptr()
        found = []
        for what in ("reduce_scatter", "all_reduce", "reduce_scatter", "all_reduce"):
            fill(comm, partials)
            comm.barrier()
            getattr(comm, what)(partials)
            whole = what == "all_reduce"
            found.append(bits(partials.result if whole else partials.strip(comm.position)))
            assert partials.result.data_ptr() == where
            comm.barrier()
        is_in_sum = where == partials.sums[0].mine.data_ptr()
        return found, list(partials.cuts[comm.position : comm.position + 2]), is_in_sum

    answers = in_world(world, lambda comm: [operate(comm, one) for one in sizes])
    for number, num_elements in enumerate(sizes):
        whole = expected(shards, num_elements)
        for found, (low, high), is_in_sum in (answer[number] for answer in answers):
            strip = bits(whole[low:high])
            assert found == [strip, bits(whole), strip, bits(whole)], num_elements
            assert is_in_sum == (num_elements == 40_000 or size == 1)


@every_communicator
def test_the_result_of_an_all_reduce_is_the_rank_s_to_keep(world):
    size = WORLDS[world][0]

    def work(comm):
        partials = make_partials(comm, size, 7)
        comm.all_reduce(partials)
        partials.result.fill_(comm.position)
        comm.barrier()
        return partials.result.tolist()

    found = in_world(world, work)
    assert sorted(found) == [[float(position)] * 7 for position in range(size)]


@every_communicator
def test_announced_sums_travel_with_an_earlier_collective(world):
    size = WORLDS[world][0]

    def work(comm):
        found = []
        small = make_partials(comm, size, 9)
        gradients = make_partials(comm, size, 500)
        for turn in range(3):
            comm.barrier()
            small.sums[0].mine.fill_(float(turn * 10 + comm.position))
            if turn != 1:  # also without: both ways must agree
                comm.announce(small)
            comm.reduce_scatter(gradients)
            comm.all_reduce(small)
            found.append(small.result[0].item() * size)
        return found

    total = sum(range(size))
    for found in in_world(world, work):
        assert found == pytest.approx([total, 10 * size + total, 20 * size + total])


@every_communicator
def test_reduce_gives_the_root_the_tree_sum(world):
    size = WORLDS[world][0]

    def work(comm):
        root = comm.size - 1
        partials = make_partials(comm, size, 999)
        comm.reduce(partials, root)
        found = bits(partials.sums[0].mine) if comm.position == root else None
        comm.barrier()
        return found

    found = [answer for answer in in_world(world, work) if answer is not None]
    assert found == [bits(expected(size, 999))]


@every_communicator
def test_all_gather_gives_everybody_every_strip(world):
    size = WORLDS[world][0]

    def gather(comm, allocate):
        memory = allocate(100, torch.float32)
        strips = Strips(memory, even_cuts(100, comm.size))
        sums = []
        for turn in range(3):
            strips.mine(comm.position).fill_(10.0 * turn + comm.position + 1)
            comm.all_gather(strips)
            sums.append(memory.mine.tolist())
            comm.barrier()
        return sums

    def work(comm):
        return [gather(comm, allocate) for allocate in (comm.allocate_common, comm.allocate)]

    cuts = even_cuts(100, size)
    for answers in in_world(world, work):
        for turn, found in ((turn, found) for sums in answers for turn, found in enumerate(sums)):
            want = [
                10.0 * turn + position + 1
                for position in range(size)
                for _ in range(cuts[position], cuts[position + 1])
            ]
            assert found == want


@every_communicator
def test_broadcast_copies_any_tensor_from_any_root(world):
    dtypes = (torch.float32, torch.int64, torch.bool)

    def broadcast(comm, dtype):
        found = []
        for root in range(comm.size):
            tensor = torch.zeros(3, 5, dtype=dtype)
            if comm.position == root:
                tensor += torch.ones(3, 5, dtype=dtype)
            comm.broadcast(tensor, root)
            found.append(bool((tensor == 1).all()))
        return found

    def work(comm):
        found = [broadcast(comm, dtype) for dtype in dtypes]
        scalar = torch.tensor(float(comm.position))
        comm.broadcast(scalar, comm.size - 1)
        return found, scalar.item()

    size = WORLDS[world][0]
    assert in_world(world, work) == [[[[True] * size] * len(dtypes), size - 1.0]] * size


@every_communicator
def test_broadcast_copies_tensors_with_gaps_transposed_or_repeated(world):
    def work(comm):
        size = comm.size
        whole = torch.full((4, 6), float(comm.position))
        with_gaps = whole[:, ::2]
        transposed = torch.full((3, 5), float(comm.position)).t()
        repeated = torch.full((1, 6), float(comm.position)).expand(4, 6)
        for tensor in (with_gaps, transposed, repeated):
            comm.broadcast(tensor, size - 1)
        untouched = bool((whole[:, 1::2] == comm.position).all())
        ends = [bool((one == size - 1).all()) for one in (with_gaps, transposed, repeated)]
        return [untouched, *ends]

    size = WORLDS[world][0]
    assert in_world(world, work) == [[True] * 4] * size


@every_communicator
def test_messages_of_any_length_reach_everybody(world):
    def work(comm):
        mine = bytes([comm.position]) * (comm.position * 1000)
        return [len(m) for m in exchange_bytes(comm, mine)], comm.position

    size = WORLDS[world][0]
    for lengths, _ in in_world(world, work):
        assert lengths == [1000 * position for position in range(size)]


@every_communicator
def test_ranks_and_positions_name_the_whole_world(world):
    def work(comm):
        return comm.ranks[comm.position], list(comm.ranks), comm.size

    size = WORLDS[world][0]
    answers = in_world(world, work)
    assert [mine for mine, _, _ in answers] == list(range(size))
    assert all(sorted(ranks) == list(range(size)) for _, ranks, _ in answers)


@every_communicator
def test_a_subgroup_sums_among_its_ranks_only(world):
    size, machines, *_ = WORLDS[world]
    local_size = size // machines
    # One rank from each machine, or on one machine all but the last rank.
    ranks = (
        [m * local_size for m in range(machines)] if machines > 1 else list(range(max(1, size - 1)))
    )

    def work(comm):
        group = comm.subgroup(ranks)
        if group is None:
            return None
        partials = make_partials(group, group.size, 50)
        group.all_reduce(partials)
        memory = group.allocate_common(4, torch.float32)
        assert isinstance(memory, Memory)
        return bits(partials.result), list(group.ranks)

    answers = in_world(world, work)
    for rank, answer in enumerate(answers):
        if rank in ranks:
            assert answer == [bits(expected(len(ranks), 50)), ranks]
        else:
            assert answer is None


def test_shards_lie_side_by_side_on_a_machine():
    assert [shard_range(6, 4, rank) for rank in range(4)] == [(0, 2), (2, 4), (4, 5), (5, 6)]
