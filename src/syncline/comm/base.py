"""The communicator: the only door to other ranks. One contract, one test suite for all.

Calls block and run on the comm lane, on each channel (`hub.py`) in the same order on every rank of
the communicator; one thread at a time. Collectives work on memory that the communicator itself
handed out:

- `allocate` gives each rank its own memory, which its peers may read as far as they can reach it;
- `allocate_common` gives one memory to all ranks of a machine.

What a rank passes to a collective is *lent*: peers may read it until a later collective of the same
communicator returns, or `end_lending`. Until then only the rank's own strip may be written.

`position` is the rank's place in this communicator, and the number of the strip that it owns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import torch

from syncline.comm.limits import SMALL_BYTES
from syncline.comm.traffic import Traffic
from syncline.comm.tree import Spread, prepare_sum

if TYPE_CHECKING:
    from syncline.comm.window import Functions, Window


class Members(Protocol):
    """Some ranks of the world, by position."""

    @property
    def ranks(self) -> tuple[int, ...]: ...


@dataclass(eq=False)
class Memory:
    """Flat memory of one rank. `peers[position]` is the peer's, where it can be reached."""

    mine: torch.Tensor
    peers: tuple[torch.Tensor, ...] | None = None
    is_common: bool = False
    owner: Members | None = field(default=None, repr=False)
    """The group that allocated it, by whose positions `peers` are."""
    origin: tuple[int, int] | None = None
    """The number of the allocation and the first element in it, where peers find it by that."""

    def part(self, start: int, stop: int) -> Memory:
        peers = self.peers and tuple(peer[start:stop] for peer in self.peers)
        origin = self.origin and (self.origin[0], self.origin[1] + start)
        return Memory(self.mine[start:stop], peers, self.is_common, self.owner, origin)


@dataclass(eq=False)
class Strips:
    """Memory cut into one strip per position: strip k is elements cuts[k] to cuts[k + 1]."""

    memory: Memory
    cuts: tuple[int, ...]
    plans: dict[str, Any] = field(default_factory=dict, repr=False)
    """What the communicator has prepared, by operation."""

    def mine(self, position: int) -> torch.Tensor:
        return self.memory.mine[self.cuts[position] : self.cuts[position + 1]]


@dataclass(eq=False)
class Partials:
    """What a rank knows of a sum over all shards: `sums[k]` is the k-th node of its spread.

    After `reduce_scatter` the rank's own strip of `sums[0]` holds scale * sum. After `all_reduce`
    `result` holds all of it, and is the rank's to keep.
    """

    sums: list[Memory]
    cuts: tuple[int, ...]
    spread: Spread
    scale: float
    plans: dict[str, Any] = field(default_factory=dict, repr=False)
    """What the communicator has prepared, by operation: one does not replay another's."""
    told_by: int | None = None
    """The collective with which peers hear that the sums are there, if that was announced."""

    def __post_init__(self) -> None:
        whole = self.sums[0].mine
        self.is_small = whole.numel() * whole.itemsize <= SMALL_BYTES
        has_own_result = self.is_small and len(self.spread.nodes) > 1
        self._result = torch.zeros_like(whole) if has_own_result else whole

    @property
    def result(self) -> torch.Tensor:
        """Where `all_reduce` leaves the sum, always the same memory.

        A small sum has memory of its own, since peers still read `sums` when it is there. A
        large one, or that of a rank alone, is left in `sums[0]`.
        """
        return self._result

    @cached_property
    def gathered(self) -> Strips:
        """`sums[0]` as strips, for the second half of a large all-reduce."""
        return Strips(self.sums[0], self.cuts)

    def strip(self, position: int) -> torch.Tensor:
        return self.sums[0].mine[self.cuts[position] : self.cuts[position + 1]]


class Communicator(Protocol):
    """Blocking collectives among the ranks of a group, in a fixed order."""

    @property
    def name(self) -> str:
        """What carries the bytes, in a word or two, for people."""

    @property
    def position(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def ranks(self) -> tuple[int, ...]:
        """The world's ranks in this communicator, by position."""

    @property
    def machines(self) -> tuple[tuple[int, ...], ...]:
        """The ranks by machine, machines in order.

        Positions go round the machines: the first `num_machines` lie on as many machines, and so
        on. The network counts each rank as a machine of its own, unless it is told otherwise.
        """

    @property
    def num_machines(self) -> int:
        """How many machines there are in `machines`."""

    @property
    def traffic(self) -> Traffic:
        """How many bytes this rank has handed to its peers, in all communicators of the world."""

    @property
    def num_channels(self) -> int:
        """How many hooks it pays to have under way at once."""

    def allocate(self, num_elements: int, dtype: torch.dtype) -> Memory:
        """Return zeroed memory of this rank's own. Every rank calls it, with the same numbers."""

    def allocate_common(self, num_elements: int, dtype: torch.dtype) -> Memory:
        """Return zeroed memory that the ranks of one machine share. Every rank calls it."""

    def announce(self, partials: Partials) -> None:
        """Say that this rank's sums are there, for an `all_reduce` some collectives later.

        The next collective tells the peers, so that the `all_reduce` itself need not meet them.
        """

    def reduce_scatter(self, partials: Partials) -> None:
        """Sum along the tree; this rank's strip of `sums[0]` holds the result."""

    def all_gather(self, strips: Strips) -> None:
        """Give every rank every strip, each as its owner has it."""

    def all_reduce(self, partials: Partials) -> None:
        """Sum along the tree; `result` holds all of it on every rank."""

    def reduce(self, partials: Partials, root: int) -> None:
        """Sum along the tree; `sums[0]` of the rank in position `root` holds all of it."""

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Copy the tensor of the rank in position `root` to all. Any contiguous tensor will do."""

    def barrier(self) -> None:
        """Return when every rank has called it."""

    def end_lending(self) -> None:
        """Return when no peer reads memory any more that this rank has lent on this channel.

        Every rank calls it, on a channel whose last collective closes nothing: after a
        `reduce_scatter` or `all_reduce` peers may still read the sums, after an `all_gather` of
        private memory the strip. It costs a meeting where peers read memory in place, and nothing
        where they are sent copies.
        """

    def window(self, num_elements: int, dtype: torch.dtype, functions: Functions) -> Window:
        """Make a window in which each rank may publish so many elements. Every rank calls it."""

    def subgroup(self, ranks: Sequence[int]) -> Communicator | None:
        """Return a communicator of some of these ranks; None where this rank is not in it.

        Every rank of this communicator calls it, with the same ranks: any set of them, whose order
        does not matter. The world owns it: it lives until it is closed or the world is.
        """

    def close(self) -> None:
        """Give back memory and connections. Peers are not waited for.

        A subgroup gives back what is its own, and the world goes on. The world closes the
        subgroups that are still open.
        """


def check_owner(memories: Iterable[Memory], owner: Members) -> None:
    """Refuse memory of another communicator, whose positions stand for other ranks.

    Called when an operation is prepared: sums of the wrong memory would go unnoticed later.
    """
    for memory in memories:
        if memory.owner is not owner:
            found = "no group" if memory.owner is None else f"ranks {memory.owner.ranks}"
            raise AssertionError(
                f"memory that {found} allocated was given to another communicator, of ranks "
                f"{owner.ranks}: pass memory to the communicator that allocated it"
            )


def prepare_reach(
    partials: Partials, start: int, stop: int, out: torch.Tensor
) -> Callable[[], None]:
    """Prepare the sum of some elements over everybody's partial sums, where all can be reached."""
    sources = [
        (node, memory.peers[position][start:stop])
        for position, nodes in enumerate(partials.spread.nodes)
        for node, memory in zip(nodes, partials.sums, strict=False)
        if memory.peers is not None
    ]
    return prepare_sum((0, partials.spread.shards), sources, out, partials.scale)


def even_cuts(num_elements: int, size: int) -> tuple[int, ...]:
    """Cut memory into strips of nearly equal size, for uses where any cut will do.

    >>> even_cuts(10, 4)
    (0, 2, 5, 7, 10)
    """
    return tuple(num_elements * position // size for position in range(size + 1))


def small_sum(comm: Communicator, num_elements: int, dtype: torch.dtype) -> Partials:
    """Allocate a sum to which every rank brings one term. Every rank calls it."""
    return allocate_sums(comm, num_elements, dtype, Spread.even(comm.size, comm.ranks), 1.0)


def allocate_sums(
    comm: Communicator, num_elements: int, dtype: torch.dtype, spread: Spread, scale: float
) -> Partials:
    """Allocate the partial sums of a spread, in strips of equal size. Every rank calls it."""
    sums = [comm.allocate(num_elements, dtype) for _ in range(spread.num_sums)]
    return Partials(sums, even_cuts(num_elements, comm.size), spread, scale)


def mean_over(comm: Communicator, number: float) -> float:
    """Return the mean of a number over all ranks. Every rank calls it."""
    partials = small_sum(comm, 1, torch.float64)
    partials.sums[0].mine.fill_(number)
    comm.all_reduce(partials)
    comm.barrier()  # peers have read this rank's number
    return float(partials.result) / comm.size


def exchange_bytes(comm: Communicator, mine: bytes) -> list[bytes]:
    """Give every rank the small message of every other, by position. For set-up, not for speed."""
    sizes = torch.zeros(comm.size, dtype=torch.int64)
    sizes[comm.position] = len(mine)
    for root in range(comm.size):
        comm.broadcast(sizes[root : root + 1], root)
    messages = []
    for root, length in enumerate(sizes.tolist()):
        buffer = torch.zeros(length, dtype=torch.uint8)
        if root == comm.position and length:
            buffer.copy_(torch.frombuffer(bytearray(mine), dtype=torch.uint8))
        if length:
            comm.broadcast(buffer, root)
        messages.append(bytes(buffer.numpy()))
    return messages
