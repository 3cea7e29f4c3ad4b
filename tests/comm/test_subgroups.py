"""Subgroups of any shape, on every communicator: they work, they are closed alone, they end."""

from __future__ import annotations

import gc
import itertools
import logging
import os
import re

import pytest
import torch

from comm.test_every_communicator import (
    WORLDS,
    bits,
    every_communicator,
    expected,
    in_world,
    make_partials,
)
from syncline.comm.base import Blocks, Strips, even_cuts
from syncline.comm.shape import kind_of
from syncline.session import current_session

pytestmark = pytest.mark.processes


def shapes_of(size):
    """Sets of ranks: all, pairs that are near and far, all but one, single ones; in any order."""
    pairs = [(0, 1), (0, 2), (1, 3), (2, 1), (3, 4), (1, 5)]
    found = [tuple(range(size)), *pairs, (3, 1, 0), (4, 0, 3, 1), (5, 2, 1, 4), (0,), (size - 1,)]
    return list(dict.fromkeys(one for one in found if max(one) < size))


def use(group):
    """Do a bit of everything in a group; return whether it came out right."""
    right = []
    for num_elements in (50, 40_000):
        partials = make_partials(group, group.size + 1, num_elements)
        group.all_reduce(partials)
        right.append(bits(partials.result) == bits(expected(group.size + 1, num_elements)))
    for allocate in (group.allocate, group.allocate_common):
        strips = Strips(allocate(33, torch.float32), even_cuts(33, group.size))
        strips.mine(group.position).fill_(1.0 + group.position)
        group.all_gather(strips)
        cuts = strips.cuts
        want = [1.0 + at for at in range(group.size) for _ in range(cuts[at], cuts[at + 1])]
        right.append(strips.memory.mine.tolist() == want)
    others = [torch.zeros(9) for _ in group.ranks]
    mine = [torch.full((9,), 1.0 + group.position)] * group.size
    group.all_to_all(mine, others, Blocks((36,) * group.size, (1,) * group.size))
    right += [
        one.tolist() == [1.0 + at] * 9 for at, one in enumerate(others) if at != group.position
    ]
    root = torch.tensor([group.position])
    group.broadcast(root, group.size - 1)
    right.append(root.item() == group.size - 1)
    group.barrier()
    return all(right)


def call_around(group):
    """Let each rank of a group get from the next one and call it."""
    kept = []
    window = group.window(5, torch.float32, {"keep": lambda call: kept.append(call.sender) or 7})
    window.publish(torch.full((5,), float(group.ranks[group.position])))
    group.barrier()
    after = (group.position + 1) % group.size
    pending = window.get(after)
    pending.wait()
    right = pending.values.tolist() == [float(group.ranks[after])] * 5
    pending.release()
    right = right and window.call(after, "keep").wait() == 7
    group.barrier()
    return right and kept == [group.ranks[group.position - 1]]


@every_communicator
def test_a_subgroup_of_any_shape_works_and_is_closed_alone(world):
    size, _, kind, *_ = WORLDS[world]
    shapes = shapes_of(size)

    def work(comm):
        me = comm.ranks[comm.position]
        found = []
        for number, ranks in enumerate(shapes):
            group = comm.subgroup(ranks)
            assert (group is None) == (me not in ranks)
            if group is None:
                found.append(None)
                continue
            assert group.ranks[group.position] == me
            assert sorted(itertools.chain(*group.machines)) == sorted(ranks)
            assert group.num_machines == len(group.machines)
            right = use(group) and (kind == "torch" or call_around(group))
            found.append([right, sorted(group.ranks), group.name])
            if number % 2:
                group.close()
                group.close()  # once is enough, twice does no harm
        found.append(use(comm))
        return found

    for rank, found in enumerate(in_world(world, work)):
        *groups, after = found
        assert after
        for ranks, answer in zip(shapes, groups, strict=True):
            assert (answer is None) == (rank not in ranks)
            if answer is not None:
                assert answer[:2] == [True, sorted(ranks)]
                if len(ranks) == 1:
                    assert answer[2] == "alone"


@every_communicator
def test_a_subgroup_of_a_subgroup_outlives_it(world):
    size = WORLDS[world][0]
    outer, inner = list(range(1, size)), [size - 1, size - 2]

    def work(comm):
        if size < 4:
            return None
        group = comm.subgroup(outer)
        twin = comm.subgroup(inner)  # of the same ranks, but another group
        if group is None:
            assert twin is None
            return use(comm)
        nested = group.subgroup(inner)
        assert use(group)
        group.close()
        for one in (nested, twin, nested):
            assert one is None or use(one)
        return use(comm)

    assert set(in_world(world, work)) <= {True, None}


@pytest.mark.parametrize(
    ("world", "ranks", "name"),
    [
        ("2 machines with 2 ranks", (0, 1), "shared memory"),
        ("2 machines with 2 ranks", (0, 2), "network (tcp)"),
        ("2 machines with 2 ranks", (1, 2), "network (tcp)"),
        ("2 machines with 2 ranks, dealt in turn", (0, 2), "shared memory"),
        ("2 machines with 3 ranks", (5, 1, 0, 4), "shared memory inside machines, network (tcp)"),
        ("2 machines with 3 ranks", (0, 1, 5), "network (tcp)"),
    ],
)
def test_what_carries_a_subgroup_depends_on_where_its_ranks_are(world, ranks, name):
    def work(comm):
        lines = []
        handler = logging.Handler()
        handler.emit = lambda record: lines.append(record.getMessage())
        logger = logging.getLogger("syncline")
        logger.setLevel(logging.INFO)
        logger.addHandler(handler)
        group = comm.subgroup(ranks)
        logger.removeHandler(handler)
        return group and [group.name, list(group.machines), lines]

    answers = in_world(world, work)
    for rank, answer in enumerate(answers):
        if rank not in ranks:
            assert answer is None
            continue
        found, machines, lines = answer
        assert found.startswith(name)
        kind = kind_of(tuple(map(tuple, machines)))
        assert kind == ("hierarchical" if "inside" in found else found.split(" (")[0])
        if ranks == (0, 1, 5) and rank == 0:
            assert lines == [
                "the group of ranks [0, 1, 5] uses the network, not shared memory: "
                "its machines have different numbers of its ranks (2, 1)"
            ]
        else:
            assert lines == []


def held():
    """Count this process's open files, and the segments that it maps."""
    gc.collect()
    with open("/proc/self/maps") as file:
        segments = re.findall(r"/memfd:syncline \(deleted\)", file.read())
    return len(os.listdir("/proc/self/fd")), len(segments)


@pytest.mark.parametrize(
    "world", ["shared memory, 3 ranks", "network, 3 ranks", "2 machines with 2 ranks"]
)
def test_a_closed_subgroup_gives_back_files_segments_and_listeners(world):
    size = WORLDS[world][0]

    def once(comm):
        for ranks in (range(size), range(size - 1)):
            group = comm.subgroup(ranks)
            if group is not None:
                assert use(group)
                assert call_around(group)
                group.close()
        comm.barrier()

    def work(comm):
        once(comm)
        before = held()
        for _ in range(3):
            once(comm)
        after = held()
        everybody = getattr(comm, "_everybody", comm)
        transport = getattr(everybody, "_transport", None)
        peers = transport._peers.values() if transport is not None else []
        left = [len(peer._listeners) + sum(map(len, peer._posted.values())) for peer in peers]
        # The job's store, which rank 0 serves, closes files of its own by and by.
        return [
            after[0] <= before[0],
            before[1] == after[1],
            sum(left),
            current_session().comm is comm,
        ]

    assert in_world(world, work) == [[True, True, 0, True]] * size


@every_communicator
def test_memory_of_another_group_is_refused(world):
    size = WORLDS[world][0]

    def work(comm):
        group = comm.subgroup(range(size))
        partials = make_partials(comm, size, 10)
        strips = Strips(comm.allocate(10, torch.float32), even_cuts(10, size))
        refused = []
        for collective, argument in ((group.reduce_scatter, partials), (group.all_gather, strips)):
            try:
                collective(argument)
                refused.append("")
            except AssertionError as error:
                refused.append(str(error))
        return refused

    for refused in in_world(world, work):
        if size == 1:
            assert refused == ["", ""]  # a group of one reads no peer
        else:
            assert all("pass memory to the communicator that allocated it" in r for r in refused)


def test_a_call_with_values_of_another_group_is_refused():
    def work(comm):
        group = comm.subgroup([0, 1])
        window = group.window(0, torch.float32, {"keep": lambda call: 0})
        with pytest.raises(Exception, match="memory of the window's communicator"):
            window.call(1 - comm.position, "keep", comm.allocate(3, torch.float32))
        group.barrier()
        return True

    assert in_world("shared memory, 2 ranks", work) == [True, True]
