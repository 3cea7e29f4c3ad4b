"""The fixed order of summation, against the recursive definition written out."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from syncline.comm.tree import (
    CHUNK_ELEMENTS,
    Spread,
    cover,
    largest_nodes,
    plan_leaves,
    plan_sum,
    prepare_sum,
    prepare_sums,
    shard_range,
    split,
)

worlds = st.integers(1, 24).flatmap(lambda s: st.tuples(st.just(s), st.integers(1, s)))


def tree_sum(leaves, node):
    """The definition: a node is the sum of its two children."""
    if node[1] - node[0] == 1:
        return leaves[node[0]]
    left, right = split(node)
    return tree_sum(leaves, left) + tree_sum(leaves, right)


def accumulate(leaves, spread, position):
    """Do what a rank does with its shards, one after the other; return its sums."""
    plans, num_sums = plan_leaves(spread.nodes[position])
    sums = [torch.full_like(leaves[0], float("nan")) for _ in range(num_sums)]
    low, high = spread.nodes[position][0][0], spread.nodes[position][-1][1]
    for shard in range(low, high):
        plan = plans[shard]
        if plan.fresh:
            sums[plan.into].copy_(leaves[shard])
        else:
            sums[plan.into].add_(leaves[shard])
        for into, from_ in plan.merges:
            sums[into].add_(sums[from_])
    return sums


@given(worlds, st.integers(0, 2**32 - 1))
@settings(deadline=None)
def test_any_number_of_ranks_gives_the_bits_of_the_whole_tree(world, seed):
    shards, size = world
    generator = torch.Generator().manual_seed(seed)
    leaves = [torch.randn(37, generator=generator) * 10.0 ** (i % 5) for i in range(shards)]
    expected = tree_sum(leaves, (0, shards)) * (1 / shards)

    spread = Spread.even(shards, range(size))
    sources = []
    for position in range(size):
        sums = accumulate(leaves, spread, position)
        sources += list(zip(spread.nodes[position], sums, strict=False))
    out = sources[0][1]
    prepare_sum((0, shards), sources, out, 1 / shards)()

    assert torch.equal(out, expected)


@st.composite
def grouped_worlds(draw):
    """Shards, some ranks with shards or without, and any partition of them into groups."""
    shards = draw(st.integers(1, 20))
    held_by = [draw(st.integers(0, 5)) for _ in range(shards)]
    size = max(held_by) + 1
    group_of = [draw(st.integers(0, size - 1)) for _ in range(size)]
    groups = [[at for at in range(size) if group_of[at] == k] for k in set(group_of)]
    nodes = [
        tuple(largest_nodes((0, shards), [s for s in range(shards) if held_by[s] == at]))
        for at in range(size)
    ]
    return Spread(shards, tuple(nodes)), groups


@given(grouped_worlds(), st.integers(0, 2**32 - 1))
@settings(deadline=None)
def test_a_sum_in_stages_has_the_bits_of_the_flat_one(world, seed):
    spread, groups = world
    generator = torch.Generator().manual_seed(seed)
    leaves = [torch.randn(7, generator=generator) * 10.0 ** (i % 5) for i in range(spread.shards)]

    across = spread.across_groups(groups)
    counted = [shard for nodes in across.nodes for node in nodes for shard in range(*node)]
    assert sorted(counted) == list(range(spread.shards))
    sums = []
    for group, ends in zip(groups, across.nodes, strict=True):
        sources = [(n, tree_sum(leaves, n)) for at in group for n in spread.nodes[at]]
        outs = [torch.full((7,), float("nan")) for _ in ends]
        prepare_sums(ends, sources, outs)()
        sums += zip(ends, outs, strict=True)
    out = torch.empty(7)
    prepare_sum((0, spread.shards), sums, out, 1.0)()

    assert torch.equal(out, tree_sum(leaves, (0, spread.shards)))


def test_stages_may_be_stages_of_stages():
    # Six ranks with a shard each, in three groups, of which two are grouped again.
    spread = Spread.even(6, range(6))
    pairs = spread.across_groups([(0, 1), (2, 5), (3, 4)])
    assert pairs.nodes == (((0, 2),), ((2, 3), (5, 6)), ((3, 4), (4, 5)))
    assert pairs.across_groups([(0,), (1, 2)]).nodes == (((0, 2),), ((2, 4), (4, 6)))


def test_the_order_of_summation_matters_at_all():
    leaves = [torch.tensor([1.0]), torch.tensor([1e8]), torch.tensor([-1e8])]
    assert tree_sum(leaves, (0, 3)) != leaves[0] + (leaves[1] + leaves[2])


@given(worlds)
def test_ranks_hold_every_shard_once_and_in_order(world):
    shards, size = world
    held = [shard for rank in range(size) for shard in range(*shard_range(shards, size, rank))]
    assert held == list(range(shards))


@given(worlds)
def test_sums_grow_with_the_logarithm_of_the_shards_a_rank_has(world):
    shards, size = world
    spread = Spread.even(shards, range(size))
    per_rank = -(-shards // size)
    for nodes in spread.nodes:
        assert plan_leaves(nodes)[1] <= 2 * (per_rank.bit_length() + 1)
    if shards == size:
        assert all(plan_leaves(nodes)[1] == 1 for nodes in spread.nodes)


def test_shards_are_given_to_ranks_in_rank_order_whatever_their_position():
    spread = Spread.even(4, (0, 2, 1, 3))
    assert spread.nodes == (((0, 1),), ((2, 3),), ((1, 2),), ((3, 4),))


def test_sums_longer_than_a_chunk_are_whole():
    a, b, c = (torch.randn(2 * CHUNK_ELEMENTS + 5) for _ in range(3))
    out = torch.empty_like(a)
    prepare_sum((0, 3), [((0, 1), a), ((1, 2), b), ((2, 3), c)], out, 0.5)()
    assert torch.equal(out, ((a + b) + c) * 0.5)


def test_one_source_is_copied_when_it_lies_elsewhere_and_left_when_it_does_not():
    source = torch.tensor([1.0, 2.0])
    out = torch.zeros(2)
    prepare_sum((0, 2), [((0, 2), source)], out, 0.5)()
    assert out.tolist() == [0.5, 1.0]
    prepare_sum((0, 2), [((0, 2), source)], source, 1.0)()
    assert source.tolist() == [1.0, 2.0]


def test_cover_takes_the_largest_nodes():
    assert cover((0, 8), 0, 8) == [(0, 8)]
    assert cover((0, 8), 1, 7) == [(1, 2), (2, 4), (4, 6), (6, 7)]


def test_a_sum_over_four_ranks_pairs_neighbours_first():
    adds = plan_sum((0, 4), [(0, 1), (1, 2), (2, 3), (3, 4)])
    assert adds == [(4, 0, 1), (5, 2, 3), (4, 4, 5)]
