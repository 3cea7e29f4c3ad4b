"""The fixed order of summation: one binary tree over the logical shards of a step.

A node is a range (low, high) of shards. It splits at the largest power of two below its length,
so the tree depends on the number of shards alone. Ranks hold contiguous ranges of shards. Each
adds up the largest nodes inside its range, and the owner of a strip adds up the ranks' nodes,
always the same pairs. Floating-point addition is commutative but not associative: same pairs, same
bits.

A sum may be taken in stages: each group of ranks first adds up its largest nodes, then the groups'
nodes are added (`Spread.across_groups`). The pairs stay the same, whatever the groups.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch

Node = tuple[int, int]

CHUNK_ELEMENTS = 1 << 16
"""Sums run in pieces of this many elements, so that partial results stay in the core's cache."""


def split(node: Node) -> tuple[Node, Node]:
    """Return the two children of an inner node.

    >>> split((0, 6))
    ((0, 4), (4, 6))
    """
    low, high = node
    middle = low + (1 << (high - low - 1).bit_length() - 1)
    return (low, middle), (middle, high)


def cover(node: Node, low: int, high: int) -> list[Node]:
    """Return the largest nodes below `node` that together make up shards low..high.

    >>> cover((0, 8), 3, 8)
    [(3, 4), (4, 8)]
    """
    if low >= node[1] or high <= node[0]:
        return []
    if low <= node[0] and node[1] <= high:
        return [node]
    left, right = split(node)
    return cover(left, low, high) + cover(right, low, high)


def largest_nodes(node: Node, held: Sequence[int]) -> list[Node]:
    """Return the largest nodes below `node` that hold no other shards than `held`, in order.

    >>> largest_nodes((0, 8), [0, 1, 3, 4, 5, 6, 7])
    [(0, 2), (3, 4), (4, 8)]
    """
    low, high = node
    num_held = bisect_left(held, high) - bisect_left(held, low)
    if num_held == 0:
        return []
    if num_held == high - low:
        return [node]
    left, right = split(node)
    return largest_nodes(left, held) + largest_nodes(right, held)


def shard_range(shards: int, size: int, rank: int) -> tuple[int, int]:
    """Return the contiguous shards of a rank: as equal as possible, the first ranks get one more.

    >>> [shard_range(8, 3, rank) for rank in range(3)]
    [(0, 3), (3, 6), (6, 8)]
    """
    share, more = divmod(shards, size)
    low = rank * share + min(rank, more)
    return low, low + share + (rank < more)


@dataclass(frozen=True)
class Spread:
    """How the shards of a step are spread over the ranks of a communicator.

    `nodes[position]` are the partial sums that the rank in this position holds, in their order.
    """

    shards: int
    nodes: tuple[tuple[Node, ...], ...]

    @classmethod
    def even(cls, shards: int, ranks: Sequence[int]) -> Spread:
        """Spread shards over ranks, in the order of the ranks; `ranks` are given by position."""
        return _spread_evenly(shards, tuple(ranks))

    def across_groups(self, groups: Sequence[Sequence[int]]) -> Spread:
        """Return how the sum is spread over groups of positions, once each has added up its own.

        The groups may have any shape; each position is in one of them. `nodes[k]` of the answer are
        the results of the sums inside group k (`prepare_sums`) and its terms in the sum across.
        """
        ends = []
        for group in groups:
            nodes = [node for position in group for node in self.nodes[position]]
            held = sorted(shard for node in nodes for shard in range(*node))
            ends.append(tuple(largest_nodes((0, self.shards), held)))
        return Spread(self.shards, tuple(ends))

    @cached_property
    def num_sums(self) -> int:
        """How many sums a rank keeps while it adds up its shards: the maximum over ranks."""
        return max(plan_leaves(nodes)[1] for nodes in self.nodes)


def spread_over(counts: Sequence[int], order: Sequence[int], ranks: Sequence[int]) -> Spread:
    """Spread shards over ranks: `counts[k]` of them to `order[k]`, in that order.

    `ranks` are given by position. If all counts are 0, one empty shard goes to `order[0]`.
    """
    return _spread_over(tuple(counts), tuple(order), tuple(ranks))


@lru_cache(maxsize=64)  # every sum and every virtual rank asks for the same few
def _spread_over(counts: tuple[int, ...], order: tuple[int, ...], ranks: tuple[int, ...]) -> Spread:
    shards = max(1, sum(counts))
    ranges: dict[int, Node] = {}
    low = 0
    for rank, count in zip(order, counts, strict=True):
        ranges[rank] = (low, low + count)
        low += count
    if not low:
        ranges[order[0]] = (0, 1)  # no gradient is written: its term is what the memory holds
    return Spread(shards, tuple(tuple(cover((0, shards), *ranges[rank])) for rank in ranks))


@lru_cache(maxsize=64)  # every sum and every virtual rank asks for the same few
def _spread_evenly(shards: int, ranks: tuple[int, ...]) -> Spread:
    order = {rank: place for place, rank in enumerate(sorted(ranks))}
    ranges = [shard_range(shards, len(ranks), order[rank]) for rank in ranks]
    return Spread(shards, tuple(tuple(cover((0, shards), low, high)) for low, high in ranges))


@dataclass(frozen=True)
class LeafPlan:
    """Where the gradient of one shard goes: to sum `into`; each merge then adds one sum to another.

    `fresh`: the gradient overwrites the sum; otherwise it is added.
    """

    into: int
    fresh: bool
    merges: tuple[tuple[int, int], ...]


def plan_leaves(nodes: Sequence[Node]) -> tuple[dict[int, LeafPlan], int]:
    """Plan how a rank adds up its shards, in order, into one sum per node of its own.

    Returns the plan of every shard and the number of sums needed: one for each of the rank's nodes,
    then about log2 of the longest node for intermediate sums.
    """
    plans: dict[int, LeafPlan] = {}
    num_sums = len(nodes)

    def visit(node: Node, into: int, spare: int, fresh: bool, after: list[tuple[int, int]]) -> None:
        """Plan `node` into sum `into`, then the merges `after`; sums from `spare` on are free."""
        nonlocal num_sums
        num_sums = max(num_sums, into + 1)
        if node[1] - node[0] == 1:
            plans[node[0]] = LeafPlan(into, fresh, tuple(after))
            return
        left, right = split(node)
        visit(left, into, spare, fresh, [])
        if right[1] - right[0] == 1:
            # A single shard is added straight onto its sibling: no sum of its own.
            visit(right, into, spare, False, after)
        else:
            visit(right, spare, spare + 1, True, [(into, spare), *after])

    for index, node in enumerate(nodes):
        visit(node, index, len(nodes), True, [])
    return plans, num_sums


Add = tuple[int, int, int]


def plan_sum(root: Node, sources: Sequence[Node]) -> list[Add]:
    """Plan the sum of `sources`, nodes that make up `root`, along the tree.

    Returns additions (to, left, right) over registers: 0 to len(sources) - 1 are the sources,
    higher ones temporary. The last addition gives the result; none are needed for one source.
    """
    index = {node: position for position, node in enumerate(sources)}
    adds: list[Add] = []

    def visit(node: Node, free: int) -> int:
        if node in index:
            return index[node]
        left, right = split(node)
        left_register = visit(left, free)
        right_register = visit(right, free + 1 if left_register == free else free)
        adds.append((free, left_register, right_register))
        return free

    visit(root, len(sources))
    return adds


def prepare_sum(
    root: Node,
    sources: Sequence[tuple[Node, torch.Tensor]],
    out: torch.Tensor,
    scale: float,
) -> Callable[[], None]:
    """Return a function that writes scale * (the tree sum of the sources) to `out`.

    `out` may be one of the sources: it is written by the last addition only. Views are made here,
    once, so that a call does arithmetic only. Memory without numbers (`meta`) needs none.
    """
    if out.is_meta:
        return lambda: None
    adds = plan_sum(root, [node for node, _ in sources])
    num_spare = max((to + 1 - len(sources) for to, _, _ in adds[:-1]), default=0)
    size = min(CHUNK_ELEMENTS, out.numel())
    spare = [torch.empty(size, dtype=out.dtype, device=out.device) for _ in range(num_spare)]
    chunks: list[tuple[list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]], torch.Tensor]] = []
    for start in range(0, out.numel(), CHUNK_ELEMENTS):
        stop = min(start + CHUNK_ELEMENTS, out.numel())
        target = out[start:stop]
        registers = [tensor[start:stop] for _, tensor in sources]
        registers += [piece[: stop - start] for piece in spare]
        calls = [(registers[a], registers[b], registers[to]) for to, a, b in adds[:-1]]
        calls += [(registers[a], registers[b], target) for _, a, b in adds[-1:]]
        chunks.append((calls, target))
    whole = None
    if not adds and out.numel() and sources[0][1].data_ptr() != out.data_ptr():
        whole = sources[0][1]

    def run() -> None:
        if whole is not None:
            out.copy_(whole)
        for calls, target in chunks:
            for left, right, to in calls:
                torch.add(left, right, out=to)
            if scale != 1.0:
                target.mul_(scale)

    return run


def prepare_sums(
    ends: Sequence[Node],
    sources: Sequence[tuple[Node, torch.Tensor]],
    outs: Sequence[torch.Tensor],
) -> Callable[[], None]:
    """Return a function that writes the tree sum of the sources below each end to its `out`.

    An `out` may be one of the sources of its own end, not of another.
    """
    sums = [
        prepare_sum(end, sources_below(end, sources), out, 1.0)
        for end, out in zip(ends, outs, strict=True)
    ]

    def run() -> None:
        for add_up in sums:
            add_up()

    return run


def sources_below(
    end: Node, sources: Sequence[tuple[Node, torch.Tensor]]
) -> list[tuple[Node, torch.Tensor]]:
    return [source for source in sources if end[0] <= source[0][0] and source[0][1] <= end[1]]
