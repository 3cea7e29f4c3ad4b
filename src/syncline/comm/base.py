"""The communicator: the only door to other ranks. One contract, one test suite for all.

Calls block. They run on the comm lane, one thread at a time, and on each channel (`hub.py`) in the
same order on every rank of the communicator. Collectives work on memory that the communicator
itself allocated:

- `allocate` gives each rank its own memory, which peers on the same machine may read;
- `allocate_common` gives one memory to all ranks of a machine.

Memory that a rank passes to a collective is *lent*: peers may read it until a later collective of
the same communicator returns, or `end_lending`. Until then the rank writes its own strip only.

`position` is the rank's place in this communicator, and the number of the strip that it owns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Protocol

import torch

from syncline.comm.blocks import Blocks as Blocks  # a part of the contract
from syncline.comm.blocks import Tensors
from syncline.comm.busy import BusyTime
from syncline.comm.limits import SMALL_BYTES
from syncline.comm.traffic import Traffic
from syncline.comm.tree import Spread, prepare_sum

if TYPE_CHECKING:
    from syncline.comm.window import Functions, Window


class Members(Protocol):
    """A group of ranks of the world, by position."""

    @property
    def ranks(self) -> tuple[int, ...]: ...


class PeerParts(Sequence[torch.Tensor]):
    """A part of each peer's memory, cut when it is asked for: most are never."""

    def __init__(self, peers: Sequence[torch.Tensor], start: int, stop: int) -> None:
        self._peers, self._start, self._stop = peers, start, stop

    def __len__(self) -> int:
        return len(self._peers)

    def __getitem__(self, position: Any) -> Any:
        return self._peers[position][self._start : self._stop]


@dataclass(eq=False)
class Memory:
    """Flat memory of one rank. `peers[position]` is that peer's memory; None over a network."""

    mine: torch.Tensor
    peers: Sequence[torch.Tensor] | None = None
    is_common: bool = False
    owner: Members | None = field(default=None, repr=False)
    """The group that allocated it; `peers` is in the order of its positions."""
    origin: tuple[int, int] | None = None
    """The number of the allocation and the first element in it: peers find the memory by these."""
    number: int = 0
    """How many allocations came before it in its group: the same on all ranks."""

    def part(self, start: int, stop: int) -> Memory:
        peers = self.peers and PeerParts(self.peers, start, stop)
        origin = self.origin and (self.origin[0], self.origin[1] + start)
        mine = self.mine[start:stop]
        return Memory(mine, peers, self.is_common, self.owner, origin, self.number)


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
    """A rank's partial sums of a sum over all shards: `sums[k]` is the k-th node of its spread.

    After `reduce_scatter` the rank's own strip of `sums[0]` holds scale * sum. After `all_reduce`
    `result` holds all of it; peers do not read `result` of a small sum.
    """

    sums: list[Memory]
    cuts: tuple[int, ...]
    spread: Spread
    scale: float
    plans: dict[str, Any] = field(default_factory=dict, repr=False)
    """What the communicator has prepared, by operation."""
    announced_by: int | None = None
    """After `announce`: the number of the collective that tells peers that the sums are ready."""

    def __post_init__(self) -> None:
        whole = self.sums[0].mine
        self.is_small = whole.numel() * whole.itemsize <= SMALL_BYTES
        has_own_result = self.is_small and len(self.spread.nodes) > 1
        self._result = torch.zeros_like(whole) if has_own_result else whole

    @property
    def result(self) -> torch.Tensor:
        """Where `all_reduce` leaves the sum, always the same memory.

        A small sum has memory of its own, since peers may still read `sums` when `all_reduce`
        returns. A large one, or that of a rank alone, is left in `sums[0]`.
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
        """What carries the bytes, in a word or two, for log lines."""

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

        Positions go round the machines: of the first `num_machines` positions one lies on each
        machine, and so on. `Network` counts each rank as a machine unless it is given `machines`.
        """

    @property
    def num_machines(self) -> int:
        """How many machines there are in `machines`."""

    @property
    def traffic(self) -> Traffic:
        """How many bytes this rank has handed to its peers, in all communicators of the world."""

    @property
    def num_channels(self) -> int:
        """How many hooks the comm lane may have under way at once."""

    @property
    def leaders_busy(self) -> BusyTime | None:
        """When a leader exchanges for this rank's group; None if no leader speaks for it."""

    def allocate(self, num_elements: int, dtype: torch.dtype) -> Memory:
        """Return zeroed memory of this rank's own. Every rank calls it, with the same numbers."""

    def allocate_common(self, num_elements: int, dtype: torch.dtype) -> Memory:
        """Return zeroed memory that the ranks of one machine share. Every rank calls it."""

    def announce(self, partials: Partials) -> None:
        """Say that this rank's sums are ready for an `all_reduce` some collectives later.

        The next collective tells the peers, so the `all_reduce` itself need not wait for them.
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
        """Copy the tensor of the rank in position `root` to all. Any tensor will do."""

    def all_to_all(self, sends: Tensors, receives: Tensors, blocks: Blocks) -> None:
        """Send sends[k] to position k and fill receives[k] with what position k sent here.

        Every rank calls it, with equal blocks. `sends` and `receives` are by position, contiguous,
        of the blocks' sizes and of one dtype; those of this rank's own position are not used. If
        all of `sends` are one tensor, as in a gather, it is staged once. Any tensors will do, and
        nothing is lent: the caller may write all of them when it returns. A call with larger blocks
        than any before it allocates: such calls come in one order, also on different channels.
        """

    def barrier(self) -> None:
        """Return when every rank has called it."""

    def end_lending(self) -> None:
        """Return when no peer reads memory any more that this rank has lent on this channel.

        Every rank calls it, before it writes what it passed to the channel's last collective:
        after a `reduce_scatter` or `all_reduce` peers may still read the sums, after an
        `all_gather` of private memory the strip. It costs a barrier where peers read memory in
        place, and nothing where they are sent copies.
        """

    def window(self, num_elements: int, dtype: torch.dtype, functions: Functions) -> Window:
        """Return a window in which each rank may publish `num_elements`. Every rank calls it."""

    def subgroup(self, ranks: Sequence[int]) -> Communicator | None:
        """Return a communicator of some of these ranks; None where this rank is not in it.

        Every rank of this communicator calls it, with the same set of ranks, in any order. The
        world's communicator owns the subgroup and closes it, if it is still open then.
        """

    def close(self) -> None:
        """Free memory and connections, without waiting for peers.

        Closing a subgroup does not touch the world's communicator. Closing that one also closes
        the subgroups that are still open.
        """


def check_owner(memories: Iterable[Memory], owner: Members) -> None:
    """Refuse memory of another communicator, in which positions mean other ranks.

    Called when an operation is prepared; later nothing would notice sums of the wrong memory.
    """
    for memory in memories:
        if memory.owner is not owner:
            found = "no group" if memory.owner is None else f"ranks {memory.owner.ranks}"
            raise AssertionError(
                f"memory that {found} allocated was given to another communicator, of ranks "
                f"{owner.ranks}: pass memory to the communicator that allocated it"
            )


def prepare_peer_sum(
    partials: Partials, start: int, stop: int, out: torch.Tensor
) -> Callable[[], None]:
    """Return a function that adds up elements of all ranks' partial sums, read in place."""
    sources = [
        (node, memory.peers[position][start:stop])
        for position, nodes in enumerate(partials.spread.nodes)
        for node, memory in zip(nodes, partials.sums, strict=False)
        if memory.peers is not None
    ]
    return prepare_sum((0, partials.spread.shards), sources, out, partials.scale)


def each_element_once(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view without the repetitions of `expand`: torch refuses to write to those."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


@lru_cache(maxsize=256)  # the ranks of a virtual world cut the same memory, each by itself
def even_cuts(num_elements: int, size: int) -> tuple[int, ...]:
    """Cut memory into strips of nearly equal size, where strips may begin at any element.

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


def tell_all(comm: Communicator, mine: Sequence[float]) -> list[list[float]]:
    """Return the numbers of each rank, by position. Every rank calls it, with equally many."""
    partials = small_sum(comm, comm.size * len(mine), torch.float64)
    rows = partials.sums[0].mine.view(comm.size, len(mine))
    rows.zero_()
    rows[comm.position] = torch.tensor(mine, dtype=torch.float64)
    comm.all_reduce(partials)
    comm.barrier()  # peers have read this rank's numbers
    found: list[list[float]] = partials.result.view(comm.size, len(mine)).tolist()
    return found


def sum_by_rank(comm: Communicator, mine: torch.Tensor) -> torch.Tensor:
    """Return the sum of a small tensor over all ranks, added in the order of ranks.

    Every rank calls it, and gets the same bits. It allocates no memory of the communicator's.
    """
    total = torch.zeros_like(mine)
    for rank in sorted(comm.ranks):
        root = comm.ranks.index(rank)
        term = mine.clone() if root == comm.position else torch.zeros_like(mine)
        comm.broadcast(term, root)
        total += term
    return total


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
