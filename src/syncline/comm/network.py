"""Ranks on several machines: strips exchanged directly.

Each rank sends every peer the strip that the peer owns and adds up what it receives in the tree's
order: the least bytes, and an order of summation that does not depend on the number of ranks.

The bytes are carried by a transport: `Streams` (TCP, for processors) or `ProcessGroup`
(torch.distributed: NCCL where the model is on GPUs).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from syncline.comm.alone import Alone
from syncline.comm.base import (
    Communicator,
    Memory,
    Partials,
    Strips,
    check_owner,
    even_cuts,
    small_sum,
)
from syncline.comm.context import Context
from syncline.comm.hub import NUM_CHANNELS
from syncline.comm.limits import SMALL_BYTES
from syncline.comm.shape import Machines, choose, positions_of
from syncline.comm.tree import Node, prepare_sum
from syncline.comm.window import Functions, Window

Message = tuple[int, torch.Tensor]
"""A rank of the world, and what goes to it or comes from it."""


class Transport(Protocol):
    """Carries messages between ranks of the world."""

    name: str
    num_channels: int
    device: torch.device

    def prepare(
        self, sends: Sequence[Message], receives: Sequence[Message]
    ) -> Callable[[str], None]:
        """Return what sends and receives everything at once, and waits for all of it."""

    def part(self, ranks: Sequence[int]) -> Transport:
        """Return a transport for a group of some of the ranks, which alone call this."""

    def window(
        self, ranks: tuple[int, ...], num_elements: int, dtype: torch.dtype, functions: Functions
    ) -> Window:
        """Make a window among ranks, which alone call this."""

    def close(self) -> None:
        """Give back what is this transport's own; that of all ranks closes the connections."""


class Network:
    """Collectives by messages from rank to rank."""

    def __init__(
        self,
        context: Context,
        transport: Transport,
        ranks: Sequence[int],
        machines: Machines | None = None,
    ) -> None:
        """`transport` is for these ranks and is closed with the communicator."""
        self._context = context
        self._transport = transport
        self._hub = context.hub
        self.name = f"network ({transport.name})"
        self.num_channels = transport.num_channels
        self.ranks = tuple(ranks)
        self.machines = machines or tuple((rank,) for rank in self.ranks)
        self.num_machines = len(self.machines)
        self.size = len(self.ranks)
        self.position = self.ranks.index(context.rank)
        self._is_part = False
        self._is_closed = False
        self._peers = [peer for peer in range(self.size) if peer != self.position]
        self._received = [self._empty(0, torch.uint8) for _ in range(NUM_CHANNELS)]

    def _empty(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(num_elements, dtype=dtype, device=self._transport.device)

    def allocate(self, num_elements: int, dtype: torch.dtype) -> Memory:
        return Memory(self._empty(num_elements, dtype).zero_(), owner=self)

    def allocate_common(self, num_elements: int, dtype: torch.dtype) -> Memory:
        return self.allocate(num_elements, dtype)

    def prepare_exchange(
        self, sends: Sequence[Message], receives: Sequence[Message]
    ) -> Callable[[str], None]:
        """Prepare to send to and receive from positions, everything at once, and wait for all."""
        return self._transport.prepare(
            [(self.ranks[peer], tensor) for peer, tensor in sends if tensor.numel()],
            [(self.ranks[peer], tensor) for peer, tensor in receives if tensor.numel()],
        )

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message], what: str) -> None:
        self.prepare_exchange(sends, receives)(what)

    def _scratch(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory for what arrives; a channel has one exchange at a time."""
        size_bytes = num_elements * dtype.itemsize
        channel = self._hub.channel
        if self._received[channel].numel() < size_bytes:
            self._received[channel] = self._empty(size_bytes, torch.uint8)
        return self._received[channel][:size_bytes].view(dtype)

    def prepare(
        self,
        shards: int,
        nodes: Sequence[Sequence[Node]],
        mine: Sequence[torch.Tensor],
        strips: Sequence[tuple[int, int]],
        out: torch.Tensor,
        scale: float,
    ) -> Callable[[str], None]:
        """Prepare an exchange: `nodes[p]` are p's partial sums, `strips[p]` the elements p gets.

        `mine` are this rank's partial sums, whole, in the order of its nodes; `out` gets this
        rank's strip of the sum. What was prepared belongs to the channel that it was prepared on.
        """
        start, stop = strips[self.position]
        num_received = sum(len(nodes[peer]) for peer in self._peers)
        scratch = self._scratch(num_received * (stop - start), out.dtype)
        sends = [
            (peer, tensor[strips[peer][0] : strips[peer][1]])
            for peer in self._peers
            for tensor in mine
        ]
        receives: list[Message] = []
        sources: list[tuple[Node, torch.Tensor]] = []
        for peer in range(self.size):
            if peer == self.position:
                for node, tensor in zip(nodes[peer], mine, strict=True):
                    sources.append((node, tensor[start:stop]))
                continue
            for node in nodes[peer]:
                at = len(receives) * (stop - start)
                piece = scratch[at : at + stop - start]
                receives.append((peer, piece))
                sources.append((node, piece))
        exchange = self.prepare_exchange(sends, receives)
        add_up = prepare_sum((0, shards), sources, out, scale)
        channel = self._hub.channel

        def run(what: str) -> None:
            assert self._hub.channel == channel, "another channel's scratch memory"
            exchange(what)
            add_up()

        return run

    def publish(self, partials: Partials) -> None:
        pass

    def _prepare_all(
        self, partials: Partials, strips: Sequence[tuple[int, int]], out: torch.Tensor
    ) -> Callable[[str], None]:
        check_owner(partials.slots, self)
        nodes = partials.spread.nodes
        mine = [slot.mine for slot in partials.slots[: len(nodes[self.position])]]
        return self.prepare(partials.spread.shards, nodes, mine, strips, out, partials.scale)

    def reduce_scatter(self, partials: Partials) -> None:
        exchange = partials.plans.get("reduce_scatter")
        if exchange is None:
            strips = list(zip(partials.cuts, partials.cuts[1:], strict=False))
            exchange = self._prepare_all(partials, strips, partials.strip(self.position))
            partials.plans["reduce_scatter"] = exchange
        exchange("reduce_scatter")

    def all_gather(self, strips: Strips) -> None:
        exchange = strips.plans.get("all_gather")
        if exchange is None:
            check_owner([strips.memory], self)
            pieces = [strips.mine(position) for position in range(self.size)]
            exchange = strips.plans["all_gather"] = self.prepare_exchange(
                [(peer, pieces[self.position]) for peer in self._peers],
                [(peer, pieces[peer]) for peer in self._peers],
            )
        exchange("all_gather")

    def all_reduce(self, partials: Partials) -> None:
        if not partials.is_small:
            self.reduce_scatter(partials)
            self.all_gather(partials.gathered)
            return
        exchange = partials.plans.get("all_reduce")
        if exchange is None:
            everything = [(0, partials.result.numel())] * self.size
            exchange = self._prepare_all(partials, everything, partials.result)
            partials.plans["all_reduce"] = exchange
        exchange("all_reduce")

    def reduce(self, partials: Partials, root: int) -> None:
        self.reduce_scatter(partials)
        pieces = [partials.strip(position) for position in range(self.size)]
        if self.position == root:
            self.exchange([], [(peer, pieces[peer]) for peer in self._peers], "reduce")
        else:
            self.exchange([(root, pieces[self.position])], [], "reduce")

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Deal the root's tensor out in strips, then gather them: no link carries it N times."""
        flat = tensor.detach().view(-1)
        cuts = even_cuts(flat.numel(), self.size)
        strips = Strips(Memory(flat, owner=self), cuts)
        if flat.numel() * flat.itemsize <= SMALL_BYTES:
            strips.cuts = (0,) * (root + 1) + (flat.numel(),) * (self.size - root)
        elif self.position == root:
            self.exchange([(peer, strips.mine(peer)) for peer in self._peers], [], "broadcast")
        else:
            self.exchange([], [(root, strips.mine(self.position))], "broadcast")
        self.all_gather(strips)

    def barrier(self) -> None:
        self.all_reduce(small_sum(self, 1, torch.float32))

    def window(self, num_elements: int, dtype: torch.dtype, functions: Functions) -> Window:
        return self._transport.window(self.ranks, num_elements, dtype, functions)

    def subgroup(self, ranks: Sequence[int]) -> Communicator | None:
        if self._context.rank not in ranks:
            return None
        return self.group_of(choose(self.machines, ranks))

    def group_of(self, machines: Machines) -> Network | Alone:
        """Make a communicator of these ranks, which alone need to call."""
        ranks = positions_of(machines)
        if len(ranks) == 1:
            return Alone(ranks[0])
        group = Network(self._context, self._transport.part(ranks), ranks, machines)
        group._is_part = True
        self._context.keep(group)
        return group

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if self._is_part:
            self._context.forget(self)
        else:
            self._context.close_subgroups()
        self._transport.close()
