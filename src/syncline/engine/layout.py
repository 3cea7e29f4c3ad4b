"""Which parameters share a bucket, where strips are cut, and in which order buckets are sent.

A layout is a pure function of sizes, the plan, the shape of the groups and the user's wishes. Real
and virtual ranks call it with the same facts, so they get the same layout.

It is made in two stages. `choose` needs only the total size and is called before the first forward,
since the hooks on modules depend on it. `lay_out` needs the order of first use, which is known
after the first backward.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import msgspec

from syncline.comm.hub import ALONE
from syncline.contract import Family, Plan
from syncline.sizes import Size, aligned_elements

BLOCK_ELEMENTS = 1024
"""Strips and norms are cut at multiples of this from a parameter's start: a block is updated by the
same instructions on any owner. Smaller blocks would make more norms to exchange."""

SMALLEST_BUCKET_BYTES = 256 << 10
"""A smaller message takes as long as this one: meetings and calls dominate, not bytes."""
LARGEST_BUCKET_BYTES = 16 << 20
"""A larger bucket overlaps no better, and forward waits for the whole of its first bucket."""

INLINE_BYTES = 1 << 20
"""Below this size handing work to another thread costs more than it can hide (decision 3)."""


def num_blocks(num_elements: int) -> int:
    """Return how many blocks so many elements have."""
    return -(-num_elements // BLOCK_ELEMENTS)


@dataclass(frozen=True, slots=True)
class Shape:
    """A group of ranks: what a layout needs to know of it."""

    size: int
    num_channels: int = 1
    on_machine: tuple[int, ...] = ()
    """By position: how many positions before it lie on the same machine; () if all do."""
    owns: tuple[bool, ...] | None = None
    """By position: whether it may own strips; None if all may."""


@dataclass(frozen=True, slots=True)
class BucketPlace:
    """One bucket of a layout: its parameters, their offsets, cuts into strips, its channel."""

    index: int
    family: int
    numbers: tuple[int, ...]
    offsets: tuple[int, ...]
    num_elements: int
    cuts: tuple[int, ...]
    channel: int


@dataclass(frozen=True)
class Layout:
    """A model cut into buckets."""

    overlap: bool
    bucket_bytes: int
    places: tuple[BucketPlace, ...]
    """In the order of first use; unused parameters come last."""
    send_order: tuple[int, ...]
    """Indices of `places`: last layers first, unused parameters at the end."""
    step_channel: int

    def to_json_dict(self) -> dict[str, bool | int]:
        """Return the layout's figures for a run's result."""
        return {
            "overlap": self.overlap,
            "bucket_bytes": self.bucket_bytes,
            "num_buckets": len(self.places),
        }


@dataclass(frozen=True)
class Wishes:
    """What the user asked for; None: the engine chooses."""

    overlap: bool | None = None
    bucket_bytes: int | None = None


def choose_bucket_bytes(total_bytes: int) -> int:
    """Return a size that gives about sixteen buckets, none too small to be worth a message.

    With sixteen, only a sixteenth of the model (the first bucket) cannot overlap with compute.

    >>> choose_bucket_bytes(45_000_000 * 4) // 2**20
    10
    """
    return min(max(total_bytes // 16, SMALLEST_BUCKET_BYTES), LARGEST_BUCKET_BYTES)


def choose(total_bytes: int, plan: Plan, wishes: Wishes) -> tuple[bool, int]:
    """Return whether to overlap (or to run inline), and the size of buckets."""
    overlap = wishes.overlap if plan.overlap is None else plan.overlap
    if overlap is None:
        overlap = total_bytes >= INLINE_BYTES
    # Without overlap, several buckets would only add meetings.
    whole = max(2 * total_bytes, 1)
    return overlap, wishes.bucket_bytes or (choose_bucket_bytes(total_bytes) if overlap else whole)


@lru_cache(maxsize=64)  # all ranks of a virtual world call it with the same arguments
def lay_out(
    sizes: tuple[Size, ...],
    plan: Plan,
    shapes: tuple[Shape, ...],
    *,
    overlap: bool,
    bucket_bytes: int,
    cores: int,
    inside_parameters: bool,
    backward_s: tuple[tuple[str, float], ...] = (),
    place: int = 0,
) -> Layout:
    """Lay out parameters, given in their order of first use.

    `shapes` has one group for each family, `cores` is how many a machine has. With
    `inside_parameters` a strip may end inside a parameter. A bucket of unused parameters is sent
    last, so that it does not delay others. `place` is the rank's place in its group, if layers are
    split: buckets hold the same parameters on all ranks, but not always as many rows of them.
    """
    whole = {size.number: size for size in sizes}
    sizes = tuple(_held(plan, size, 0) for size in sizes)  # no place holds more than the first
    times = dict(backward_s)
    order = {size.number: at for at, size in enumerate(sizes)}
    filled: list[tuple[int, list[Size]]] = []
    for index, family in enumerate(plan.families):
        mine = [size for size in sizes if plan.family_of(size.number) == index]
        for is_used in (True, False):
            chosen = [size for size in mine if size.is_used == is_used]
            for bucket in family.buckets.split(chosen, bucket_bytes, times):
                filled += [(index, part) for part in _of_one_type(bucket)]
    filled.sort(key=lambda one: (not one[1][0].is_used, order[one[1][0].number]))
    places = []
    for index, (family_index, bucket) in enumerate(filled):
        family, shape = plan.families[family_index], shapes[family_index]
        bucket = [_held(plan, whole[size.number], place) for size in bucket]
        offsets = tuple(itertools.accumulate(map(aligned_elements, bucket[:-1]), initial=0))
        num_elements = offsets[-1] + aligned_elements(bucket[-1])
        spans = tuple(zip(offsets, (size.num_elements for size in bucket), strict=True))
        owns = owners(family, shape, cores, overlap=overlap)
        cuts = cut(spans, num_elements, owns, inside_parameters=inside_parameters)
        # Neighbouring buckets get different channels, so that both can be under way.
        channel = ALONE if shape.num_channels == 1 else 1 + index % (shape.num_channels - 1)
        numbers = tuple(size.number for size in bucket)
        places.append(
            BucketPlace(index, family_index, numbers, offsets, num_elements, cuts, channel)
        )
    num_used = sum(bucket[0].is_used for _, bucket in filled)
    send_order = (*reversed(range(num_used)), *range(num_used, len(places)))
    step_channel = ALONE if all(shape.num_channels == 1 for shape in shapes) else 0
    return Layout(overlap, bucket_bytes, tuple(places), send_order, step_channel)


def _of_one_type(sizes: Sequence[Size]) -> list[list[Size]]:
    """Split a bucket where the dtype changes: flat memory has one dtype."""
    return [list(alike) for _, alike in itertools.groupby(sizes, lambda size: size.dtype)]


def owners(family: Family, shape: Shape, cores: int, *, overlap: bool) -> tuple[bool, ...]:
    """Return by position whether it owns a strip."""
    owns = shape.owns or (True,) * shape.size
    if overlap or family.owners is not None:
        return owns
    # Small strips cost calls, not arithmetic: more strips than cores on a machine would only take
    # longer.
    places = shape.on_machine or range(shape.size)
    return tuple(place < cores for place in places)


def _held(plan: Plan, size: Size, place: int) -> Size:
    """Return the part of a parameter that a rank holds, in this place of its group."""
    if plan.split is None:
        return size
    return msgspec.structs.replace(size, num_elements=plan.elements_of(size, place))


@lru_cache(maxsize=4096)  # virtual ranks cut the same buckets, a few hundred of each model
def cut(
    spans: tuple[tuple[int, int], ...],
    num_elements: int,
    owns: tuple[bool, ...],
    *,
    inside_parameters: bool,
) -> tuple[int, ...]:
    """Cut a bucket into strips, one for each position, as equal as the allowed places permit.

    `spans` are the parameters' offsets and sizes. With `inside_parameters` a strip may end at any
    whole block of a parameter; without it, only between parameters, for optimizers that need whole
    parameters. Positions that own nothing get an empty strip.
    """
    allowed: list[int] = []
    for offset, length in spans:
        allowed.append(offset)
        if inside_parameters:
            allowed.extend(offset + at for at in range(BLOCK_ELEMENTS, length, BLOCK_ELEMENTS))
    allowed.append(num_elements)
    num_owners = sum(owns)
    ends = [0]
    for number in range(1, num_owners):
        ideal = num_elements * number / num_owners
        at = bisect_left(allowed, ideal)
        near = [allowed[i] for i in (at - 1, at) if 0 <= i < len(allowed)]
        ends.append(max(ends[-1], min(near, key=lambda place: abs(place - ideal))))
    ends.append(num_elements)
    # Each position's strip begins where those of the owners before it end.
    return tuple(ends[sum(owns[:position])] for position in range(len(owns) + 1))
