"""Buckets: a model's parameters and gradients as flat memory, cut into strips.

Parameters lie in the order in which forward first uses them, each on a 128-byte boundary, so that
the arithmetic on a parameter does not depend on where it lies. Strips are cut only between
parameters or at whole blocks from a parameter's start: a block is updated, and its norm taken, by
the same instructions on any owner. `layout.py` decides where parameters lie.

A bucket has two memories: what forward and backward read (`in_use`), and what ranks exchange
(`parameters`). In most cases they coincide. They differ for early updates, for private parameters,
which the user may change, and after a load, until the next step.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from syncline.comm.base import Communicator, Memory, Partials, Strips
from syncline.comm.hub import ALONE
from syncline.comm.tree import LeafPlan
from syncline.contract import Family, ParamGroups, UpdateSettings
from syncline.engine.layout import BLOCK_ELEMENTS, BucketPlace, Layout, num_blocks
from syncline.engine.share import Part
from syncline.linear_layers import LinearLayer
from syncline.sizes import Size

Address = tuple[int, tuple[int, ...]]
"""Where a parameter lies: its address and its strides."""


@dataclass(eq=False)
class Slot:
    """One parameter's place in its bucket, and the state of its gradient in this step."""

    name: str
    parameter: torch.nn.Parameter
    number: int
    """Place in registration order: the order of norms and flags, the same for any layout."""
    offset: int = 0
    bucket: Bucket | None = None
    gradients: list[torch.Tensor] = field(default_factory=list)
    """Views of the gradient's partial sums, shaped as the parameter."""
    fired: int = 0
    """Gradients that autograd delivered in this shard."""
    expected: int = 1
    """Gradients that a shard delivers, learned from earlier steps: take it when all have come."""
    is_taken: bool = False
    has_gradient: bool = False
    """Whether any shard of this step delivered a gradient."""
    place: Address | None = None
    """Address and strides that the engine gave the parameter; None until buckets are built."""
    linear: LinearLayer | None = None
    """Its linear layer, if that can be split."""
    is_split: bool = False
    """Whether this rank holds some of the rows only."""
    first_element: int = 0
    """Where this rank's part of the parameter begins, if it is split."""
    first_block: int = 0
    num_blocks: int = field(init=False)
    """Blocks of the whole parameter: each rank's part has its own, one part after the other."""
    shape: tuple[int, ...] = field(init=False)
    """The shape of the whole parameter."""
    num_elements: int = field(init=False)
    """How many elements this rank holds."""

    def __post_init__(self) -> None:
        self.shape = tuple(self.parameter.shape)
        self.num_elements = self.parameter.numel()
        self.num_blocks = num_blocks(self.num_elements)

    def keep_rows(self, parts: Sequence[range], place: int) -> None:
        """Keep this rank's rows of the parameter; `parts` are those of all places."""
        of_row = math.prod(self.shape[1:])
        rows = parts[place]
        blocks = [num_blocks(len(part) * of_row) for part in parts]
        mine = self.parameter.data[rows.start : rows.stop]
        self.parameter.data = mine.clone(memory_format=torch.contiguous_format)
        self.num_elements = self.parameter.numel()
        self.is_split, self.first_element = True, rows.start * of_row
        self.first_block, self.num_blocks = sum(blocks[:place]), sum(blocks)

    def size(self, *, is_used: bool = True) -> Size:
        """Return the facts about the whole parameter that plans and layouts are made from."""
        dtype, num_elements = self.parameter.dtype, math.prod(self.shape)
        name = str(dtype).removeprefix("torch.")
        how = (0, "") if self.linear is None else (self.linear.rows, self.linear.follows)
        return Size(self.name, self.number, num_elements, dtype.itemsize, name, is_used, *how)


class StripOptimizer(Protocol):
    """The user's optimizer on one strip, with its state."""

    settings: ParamGroups
    """The settings of each parameter group when it was made."""

    def run(self, update: UpdateSettings) -> None:
        """Update the strip with the settings of one step."""

    def keep(self, without: frozenset[int]) -> None:
        """Keep the state, so that the next `run`, which leaves out `without`, can be undone."""

    def undo(self) -> None:
        """Restore the state that was kept. The caller restores the parameters."""

    def forget_kept(self) -> None:
        """Forget the state that was kept: every rank has entered the step of the early update."""

    lock: threading.Lock
    """Held by a thread that reads state, and while it is kept or loaded."""

    def held_of(
        self, slot: Slot, *, before_load: bool = False
    ) -> Iterator[tuple[int, int, dict[str, Any]]]:
        """Yield the state of a parameter's pieces: start and stop in the bucket, and state.

        It is without an early update, and with `before_load` without what was loaded since the last
        update.
        """

    def load_state(self, whole: Mapping[str, dict[str, Any]], spread: Set[str]) -> None:
        """Load this strip's part of the whole state, by parameter name, for the next update on.

        `spread` are the keys of values with one number for each element.
        """


class Event(Protocol):
    """An event between threads, or on the virtual clock."""

    def is_set(self) -> bool: ...

    def set(self) -> None: ...

    def clear(self) -> None: ...

    def wait_for(self, why: Callable[[], str]) -> None:
        """Wait until it is set; `why` returns the reason, for error messages."""


@dataclass(eq=False)
class Bucket:
    """Some parameters that are reduced, updated and gathered together."""

    index: int
    slots: list[Slot]
    num_elements: int
    dtype: torch.dtype
    family: Family
    channel: int
    part: Part
    """This rank's part in the sums of the group that holds these parameters."""
    parameters: Strips
    """The memory that the update writes and ranks exchange."""
    gradient: Partials
    ready: Event
    """Set when the parameters may be read."""
    comm: Communicator = field(init=False)
    """The ranks that hold these parameters and add up their gradients."""
    in_use: Strips = field(init=False)
    """The memory that forward and backward read."""
    has_copy: bool = False
    """Whether `in_use` is not the same memory as `parameters`."""
    is_private: bool = False
    """Whether the copy is for good, and the user may change it."""
    is_loaded: bool = False
    """Whether the copy was made for a load. It is given back after the next step."""
    gather_channel: int = field(init=False)
    optimizer: StripOptimizer = field(init=False)
    holders: Communicator = field(init=False)
    """The ranks that together hold all of these parameters: more than `comm` if they are split."""
    ends_lending: bool = field(init=False)
    """Whether the engine must call `end_lending` before the bucket is ready (`steps.py`)."""
    scale: float = field(init=False)
    """The factor that turns a sum over the group's shards into a mean."""
    leaf: LeafPlan = field(init=False)
    """Where the gradient of the current shard goes."""
    step: int = 0
    """The number of the step that its next update belongs to."""
    untaken: int = 0
    """How many gradients of its parameters are still to come in this shard."""
    is_reduced: bool = False
    is_early: bool = False
    """Whether the parameters hold an update for which `step()` has not been called yet."""
    is_in_flight: bool = False
    """Whether a reader of its parameters must first wait."""

    def __post_init__(self) -> None:
        self.comm = self.holders = self.part.comm
        if self.family.updates == "each":
            # Where hooks do not overtake each other, the flags' sum comes after this one's.
            self.ends_lending = self.channel != ALONE
        else:
            self.ends_lending = not self.parameters.memory.is_common
        self.in_use = self.parameters
        self.gather_channel = self.channel
        self.scale = self.part.scale
        self.untaken = len(self.slots)
        for slot in self.slots:
            slot.bucket = self
            if not self.gradient.sums[0].mine.is_meta:  # else there is no gradient to take
                slot.gradients = [view_of(each.mine, slot) for each in self.gradient.sums]

    @property
    def size_bytes(self) -> int:
        return self.num_elements * self.dtype.itemsize

    @property
    def owned(self) -> tuple[int, int]:
        """The elements that this rank's optimizer updates: first, and one past the last."""
        if self.family.updates == "each":
            return 0, self.num_elements
        low, high = self.parameters.cuts[self.comm.position : self.comm.position + 2]
        return low, high

    def copy_for_user(self) -> None:
        """Give forward and backward memory that no other rank maps, with values of its own."""
        values = self.parameters.memory.mine
        self.in_use = Strips(Memory(torch.empty_like(values).copy_(values)), self.parameters.cuts)
        self.has_copy = True

    def adopt(self) -> None:
        """Let the next update begin with the values in use, which were changed outside it."""
        low, high = self.owned
        self.parameters.memory.mine[low:high].copy_(self.in_use.memory.mine[low:high])

    def give_back(self) -> None:
        """Let forward and backward read `parameters` again, without a copy."""
        self.in_use = self.parameters
        self.has_copy = self.is_loaded = False
        for slot in self.slots:
            point_to(self.parameters.memory.mine, slot)

    @property
    def summed(self) -> torch.Tensor:
        """The gradient that the optimizer reads, laid out like the bucket; valid where `owned`."""
        each = self.family.updates == "each"
        return self.gradient.result if each else self.gradient.sums[0].mine


def slots_at(place: BucketPlace, slots: Sequence[Slot]) -> list[Slot]:
    """Return the slots of a new bucket, and set their offsets."""
    mine = [slots[number] for number in place.numbers]
    for slot, offset in zip(mine, place.offsets, strict=True):
        slot.offset = offset
    return mine


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
    """Return the slot's part of flat memory, with the parameter's shape and strides."""
    like = slot.parameter
    stride = like.stride() if is_dense(like) else torch.empty(like.shape, device="meta").stride()
    return torch.as_strided(flat, like.shape, stride, flat.storage_offset() + slot.offset)


def point_to(flat: torch.Tensor, slot: Slot) -> None:
    """Let a parameter use its part of flat memory."""
    view = view_of(flat, slot)
    slot.parameter.data = view
    slot.place = (view.data_ptr(), view.stride())


def add_gradient(slot: Slot, plan: LeafPlan, gradient: torch.Tensor | None, scale: float) -> None:
    """Move a shard's gradient into flat memory and add it to the rank's partial sums.

    `plan` and `scale` are the bucket's. The mean's factor is applied here, where the gradient is
    copied anyway: that saves a pass.
    """
    target = slot.gradients[plan.into]
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


def spans_of(bucket: Bucket) -> tuple[tuple[int, int], ...]:
    """Return the offset and the size of each parameter."""
    return tuple((slot.offset, slot.num_elements) for slot in bucket.slots)


@dataclass(frozen=True)
class Piece:
    """The part of a parameter that lies in one strip, in elements of the bucket."""

    slot: Slot
    start: int
    stop: int

    @property
    def first_block(self) -> int:
        """Number of the piece's first block, counted from the parameter's start."""
        return self.slot.first_block + (self.start - self.slot.offset) // BLOCK_ELEMENTS


def pieces_of(
    bucket: Bucket, start: int, stop: int, *, with_empty: bool = False
) -> Iterable[Piece]:
    """Yield the pieces of the bucket's parameters between two elements.

    With `with_empty` also the parameters without elements: each lies in one strip of the bucket.
    """
    for slot in bucket.slots:
        at = slot.offset
        first, last = max(start, at), min(stop, at + slot.num_elements)
        is_in = start <= at < stop or (
            at == stop == bucket.num_elements and (start < stop or not at)
        )
        if first < last or (with_empty and not slot.num_elements and is_in):
            yield Piece(slot, first, last)


def send_order(layout: Layout, buckets: Sequence[Bucket]) -> list[Bucket]:
    """Return the buckets in the order in which their gradients are exchanged."""
    return [buckets[index] for index in layout.send_order]


def must_end_lending(comm: Communicator, buckets: Sequence[Bucket]) -> bool:
    """Say whether a sum of the step group must be followed by `end_lending`.

    If the whole step group holds some bucket, that bucket's exchange ends the lending in each step.
    If only smaller groups hold buckets, a rank may be a step ahead of a rank of another group.
    """
    return not any(bucket.comm is comm for bucket in buckets)
