"""Buckets: a model's parameters and gradients as flat memory, cut into strips.

Parameters lie in the order in which forward first uses them, each on a 128-byte boundary, so that
the arithmetic on a parameter does not depend on where it lies. Strips are cut only between
parameters or at whole blocks from a parameter's start: a block is updated, and its norm taken,
by the same instructions whoever owns it. Layout is a pure function of sizes.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from syncline.comm.base import Memory, Partials, Strips
from syncline.comm.hub import ALONE
from syncline.comm.tree import LeafPlan, Spread

ALIGN_BYTES = 128
BLOCK_ELEMENTS = 1024
"""Strips and norms are cut at multiples of this from a parameter's start."""

SMALLEST_BUCKET_BYTES = 256 << 10
LARGEST_BUCKET_BYTES = 16 << 20


@dataclass(eq=False)
class Slot:
    """One parameter's place in its bucket, and what became of its gradient in this step."""

    name: str
    parameter: torch.nn.Parameter
    number: int
    """Place in registration order: the order of norms and flags, the same for any layout."""
    offset: int = 0
    bucket: Bucket | None = None
    gradients: list[torch.Tensor] = field(default_factory=list)
    """Views of the gradient's slots, shaped as the parameter."""
    fired: int = 0
    """Gradients that autograd delivered in this shard."""
    expected: int = 1
    """Gradients a shard delivers, as learned: the gradient is taken when this many have come."""
    is_taken: bool = False
    has_gradient: bool = False
    """Whether any shard of this step delivered one."""

    num_elements: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_elements = self.parameter.numel()


class Update(Protocol):
    """The user's optimizer on one strip, with the state that it keeps for it."""

    hyper: list[dict[str, Any]]
    """The settings of each parameter group for the next run."""

    @property
    def without(self) -> Set[int]:
        """The parameters that are left out."""

    def run(self) -> None: ...

    def keep(self) -> None:
        """Remember the state, so that the next run can be undone."""

    def undo(self) -> None:
        """Go back to the state that was kept. The parameters are the caller's business."""

    def leave_out(self, numbers: Set[int]) -> None:
        """Do not touch these parameters in the next run: no rank has a gradient for them."""

    def held_of(self, slot: Slot) -> Iterator[tuple[int, int, dict[str, Any]]]:
        """Yield what is held of a parameter: first and last element in the bucket, and state."""

    def load_state(self, slot: Slot, state: dict[str, Any]) -> None:
        """Take this strip's part of a parameter's whole state."""


@dataclass(eq=False)
class Bucket:
    """Some parameters that are reduced, updated and gathered together."""

    index: int
    slots: list[Slot]
    num_elements: int
    dtype: torch.dtype
    parameters: Strips = field(init=False)
    """What the update writes and ranks exchange."""
    in_use: Strips | None = None
    """What forward and backward read, where updates are taken early; else `parameters` itself."""
    gradient: Partials = field(init=False)
    step: int = 0
    untaken: int = 0
    is_reduced: bool = False
    is_early: bool = False
    """Whether the parameters hold an update that `step()` has not asked for yet."""
    is_in_flight: bool = False
    channel: int = ALONE
    gather_channel: int = ALONE
    ready: threading.Event = field(default_factory=threading.Event)
    update: Update = field(init=False)

    def update_strip(self) -> None:
        """Run the user's optimizer on this rank's strip."""
        self.update.run()

    @property
    def size_bytes(self) -> int:
        return self.num_elements * self.dtype.itemsize


@dataclass(eq=False)
class Step:
    """What belongs to a step as a whole and to no bucket."""

    number: int
    flags: Partials
    """Small numbers, summed over ranks: which parameters have a gradient, whether buffers changed,
    the shards' losses."""
    statistics: Partials | None
    """Running statistics of norm layers, averaged over shards."""


def choose_bucket_bytes(total_bytes: int) -> int:
    """Choose a size: about sixteen buckets, none too small to be worth a message.

    >>> choose_bucket_bytes(45_000_000 * 4) // 2**20
    10
    """
    return min(max(total_bytes // 16, SMALLEST_BUCKET_BYTES), LARGEST_BUCKET_BYTES)


def is_dense(tensor: torch.Tensor) -> bool:
    """Say whether the tensor's elements fill memory without holes or overlap, in any order."""
    expected = 1
    for size, stride in sorted(
        ((n, s) for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1),
        key=lambda pair: pair[1],
    ):
        if stride != expected:
            return False
        expected *= size
    return True


def view_of(flat: torch.Tensor, slot: Slot) -> torch.Tensor:
    """Return the slot's part of flat memory, shaped and strided as the parameter."""
    like = slot.parameter
    stride = like.stride() if is_dense(like) else torch.empty(like.shape, device="meta").stride()
    return torch.as_strided(flat, like.shape, stride, flat.storage_offset() + slot.offset)


def add_gradient(slot: Slot, plan: LeafPlan, gradient: torch.Tensor | None, scale: float) -> None:
    """Move a shard's gradient into flat memory and add it to the rank's partial sums.

    The mean's factor goes in here, where the gradient is copied anyway: no pass of its own.
    """
    target = slot.gradients[plan.slot]
    if gradient is None:
        if plan.fresh:
            target.zero_()
    elif not plan.fresh:
        target.add_(gradient * scale)
    elif scale == 1.0:
        target.copy_(gradient)
    else:
        torch.mul(gradient, scale, out=target)
    for into, from_ in plan.merges:
        slot.gradients[into].add_(slot.gradients[from_])


def cut_buckets(slots: Sequence[Slot], bucket_bytes: int, first_index: int = 0) -> list[Bucket]:
    """Fill buckets with slots in order; a bucket holds one type and is closed when full."""
    buckets: list[Bucket] = []
    current: list[Slot] = []
    used = 0

    def close() -> None:
        nonlocal current, used
        if current:
            index = first_index + len(buckets)
            bucket = Bucket(index, current, used, current[0].parameter.dtype)
            for slot in current:
                slot.bucket = bucket
            buckets.append(bucket)
        current, used = [], 0

    for slot in slots:
        dtype = slot.parameter.dtype
        if current and (
            dtype != current[0].parameter.dtype
            or (used + slot.num_elements) * dtype.itemsize > bucket_bytes
        ):
            close()
        align = ALIGN_BYTES // dtype.itemsize
        slot.offset = used
        used += -(-slot.num_elements // align) * align
        current.append(slot)
    close()
    return buckets


def place(
    bucket: Bucket, parameters: Memory, slots: list[Memory], cuts: tuple[int, ...], spread: Spread
) -> None:
    """Give a bucket its memory: parameters, and a slot for each partial sum of the gradient."""
    bucket.parameters = Strips(parameters, cuts)
    bucket.gradient = Partials(slots, cuts, spread, 1.0)
    for slot in bucket.slots:
        slot.gradients = [view_of(each.mine, slot) for each in slots]


def cut_strips(
    bucket: Bucket, size: int, *, inside_parameters: bool, num_owners: int | None = None
) -> tuple[int, ...]:
    """Cut a bucket into `size` strips, as equal as the allowed places permit.

    With `inside_parameters` a strip may end at any whole block of a parameter; without, only
    between parameters, for optimizers that need to see a parameter whole. With `num_owners` only
    the first so many get anything.
    """
    allowed: list[int] = []
    for slot in bucket.slots:
        allowed.append(slot.offset)
        if inside_parameters:
            more = range(BLOCK_ELEMENTS, slot.num_elements, BLOCK_ELEMENTS)
            allowed.extend(slot.offset + at for at in more)
    allowed.append(bucket.num_elements)
    cuts = [0]
    num_owners = num_owners or size
    for position in range(1, num_owners):
        ideal = bucket.num_elements * position / num_owners
        at = bisect_left(allowed, ideal)
        near = [allowed[i] for i in (at - 1, at) if 0 <= i < len(allowed)]
        cuts.append(max(cuts[-1], min(near, key=lambda place: abs(place - ideal))))
    return (*cuts, *[bucket.num_elements] * (1 + size - num_owners))


@dataclass(frozen=True)
class Piece:
    """The part of a parameter that lies in one strip, in elements of the bucket."""

    slot: Slot
    start: int
    stop: int

    @property
    def first_block(self) -> int:
        """Number of the piece's first block, counted from the parameter's start."""
        return (self.start - self.slot.offset) // BLOCK_ELEMENTS


def pieces_of(bucket: Bucket, start: int, stop: int) -> Iterable[Piece]:
    """Yield the pieces of the bucket's parameters between two places."""
    for slot in bucket.slots:
        first = max(start, slot.offset)
        last = min(stop, slot.offset + slot.num_elements)
        if first < last:
            yield Piece(slot, first, last)
