"""Blocks that ranks exchange: their bytes, their place in staging memory and what they cost."""

from __future__ import annotations

import hypothesis.strategies as some
import pytest
from hypothesis import given

from syncline.comm.base import Blocks
from syncline.comm.cost import phases, plan
from syncline.comm.shape import by_machine, led_shape, shape_of
from syncline.comm.staging import block_start, staged_bytes
from syncline.comm.volume import stages, volume_of_blocks

sizes = some.integers(0, 1 << 20)


@some.composite
def worlds(draw):
    """Machines of equal or any sizes, blocks of all ranks and, sometimes, groups with leaders."""
    equal = some.tuples(some.integers(1, 4), some.integers(1, 4)).map(lambda of: of[0] * [of[1]])
    counts = draw(equal | some.lists(some.integers(1, 4), min_size=1, max_size=4))
    ranks = draw(some.permutations(range(sum(counts))))
    starts = [sum(counts[:at]) for at in range(len(counts))]
    machines = tuple(
        tuple(ranks[start : start + count]) for start, count in zip(starts, counts, strict=True)
    )
    shape = shape_of(machines)
    if draw(some.booleans()):
        cut = draw(some.integers(0, len(ranks)))
        groups = tuple(group for group in (tuple(ranks[:cut]), tuple(ranks[cut:])) if group)
        shape = led_shape(machines, groups, [group[0] for group in groups])
    each = some.lists(sizes, min_size=len(ranks), max_size=len(ranks)).map(tuple)
    return shape, Blocks(draw(each), draw(each)), draw(some.booleans())


@given(worlds())
def test_stages_send_all_blocks_between_different_positions(found):
    shape, blocks, is_for_all = found
    size = len(blocks.gives)
    each = stages("all_to_all", shape, volume_of_blocks(blocks, is_for_all))
    want = [
        sum(blocks.gives[i] * blocks.takes[j] for j in range(size) if i != j) for i in range(size)
    ]
    assert [blocks.sent_by(at) for at in range(size)] == want
    assert blocks.num_bytes == sum(want)
    if size == 1:
        assert each == ()
    else:
        assert [sum(one.sent_by(at) for one in each) for at in range(size)] == want
        assert [sum(one) for one in zip(*(one.sent() for one in each), strict=True)] == want


@given(worlds())
def test_staged_blocks_lie_apart_and_inside_their_memory(found):
    _, blocks, _ = found
    size = len(blocks.gives)
    for me in range(size):
        peers, end, before = [at for at in range(size) if at != me], 64, 0
        for number, peer in enumerate(peers):
            start = block_start(blocks.gives[me], number, before)
            assert start % 64 == 0
            assert start >= end
            end = start + blocks.gives[me] * blocks.takes[peer]
            before += blocks.takes[peer]
        assert end <= staged_bytes(blocks)


def phases_of(machines, blocks, is_for_all=False):
    found = phases("all_to_all", shape_of(machines), volume_of_blocks(blocks, is_for_all))
    return [(one.where, one.rounds, one.num_bytes, one.messages) for one in found]


UNEVEN = Blocks((10, 20, 30, 0), (1, 2, 0, 5))


def test_exchanges_by_hand():
    # Position 1 sends 20 * (1 + 0 + 5) = 120, position 2 30 * 8 = 240. Position 3 reads 5 * 60 =
    # 300, the most. So staging takes the time of 240 bytes, reading that of 300.
    one_machine = ((0, 1, 2, 3),)
    assert phases_of(one_machine, UNEVEN) == [("inside", 0, 240, 0), ("inside", 1, 300, 0)]
    # Each for itself: 300 bytes come to position 3; position 2 sends messages to three takers.
    apart = ((0,), (1,), (2,), (3,))
    assert phases_of(apart, UNEVEN) == [("across", 1, 300, 3)]
    # Machines of positions 0, 2 and 1, 3. Inside, 2 sends 30 * 1 to 0 and 1 sends 20 * 5 to 3.
    # Across, the first machine sends (10 + 30) * (2 + 5) = 280; position 3 gets two messages.
    two = by_machine(range(4), 2)
    assert phases_of(two, UNEVEN) == [
        ("inside", 0, 100, 0),
        ("inside", 1, 100, 0),
        ("across", 1, 280, 2),
    ]


def test_what_is_for_all_is_staged_once():
    gather = Blocks((600,) * 4, (1,) * 4)
    one_machine = (tuple(range(4)),)
    assert phases_of(one_machine, gather, is_for_all=True) == [
        ("inside", 0, pytest.approx(600), 0),
        ("inside", 1, 1800, 0),
    ]
    assert phases_of(one_machine, gather) == [("inside", 0, 1800, 0), ("inside", 1, 1800, 0)]


def test_an_even_exchange_of_machines_costs_what_a_reduce_scatter_costs():
    world = {"machines": 4, "ranks_per_machine": 1}
    (exchange,), (reduce,) = plan("all_to_all", 8e6, **world), plan("reduce_scatter", 8e6, **world)
    assert exchange == reduce
