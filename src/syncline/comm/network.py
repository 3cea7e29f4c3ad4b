"""Ranks on several machines: strips exchanged directly.

Each rank sends every peer the strip that the peer owns and adds up what it receives in the tree's
order: the fewest bytes, and an order of summation that is the same for any number of ranks.

The bytes are carried by a transport: `Streams` (TCP connections of our own) or `ProcessGroup`
(torch.distributed).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import pairwise
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
)
from syncline.comm.blocks import Blocks, Tensors
from syncline.comm.context import Context
from syncline.comm.hub import NUM_CHANNELS
from syncline.comm.limits import SMALL_BYTES, TOKEN_BYTES
from syncline.comm.operations import about, about_blocks, about_size
from syncline.comm.real import Prepared, RealCommunicator, join_plans
from syncline.comm.shape import Machines, choose, positions_of
from syncline.comm.tree import Node, prepare_sum
from syncline.comm.window import Functions, Window

Addressed = tuple[int, torch.Tensor]
"""A rank of the world, and what goes to it or comes from it."""


class Transport(Protocol):
    """Carries messages between ranks of the world."""

    name: str
    num_channels: int

    def prepare(
        self, sends: Sequence[Addressed], receives: Sequence[Addressed], about: int
    ) -> Callable[[str], None]:
        """Return a function that sends and receives everything at once and waits for all of it.

        The function takes the collective's name; `about` says which one of this name it is.
        """

    def begin(
        self, sends: Sequence[Addressed], receives: Sequence[Addressed], what: str, about: int
    ) -> Callable[[], None]:
        """Begin to send and receive everything; return a function that waits for all of it."""

    def part(self, ranks: Sequence[int]) -> Transport:
        """Return a transport for a group of some of the ranks. Only these ranks call it."""

    def window(
        self,
        context: Context,
        ranks: tuple[int, ...],
        num_elements: int,
        dtype: torch.dtype,
        functions: Functions,
    ) -> Window:
        """Return a window among ranks. Only these ranks call it."""

    def close(self) -> None:
        """Free what belongs to this transport; the world's transport closes the connections."""


class Network(RealCommunicator):
    """Collectives by messages from rank to rank."""

    def __init__(
        self,
        context: Context,
        transport: Transport,
        ranks: Sequence[int],
        machines: Machines | None = None,
    ) -> None:
        """`transport` connects these ranks and is closed with the communicator."""
        super().__init__(context)
        self._transport = transport
        self.name = f"network ({transport.name})"
        self.num_channels = transport.num_channels
        self.ranks = tuple(ranks)
        self.machines = machines or tuple((rank,) for rank in self.ranks)
        self.num_machines = len(self.machines)
        self.size = len(self.ranks)
        self.position = self.ranks.index(context.rank)
        self._peers = [peer for peer in range(self.size) if peer != self.position]
        self._group = context.names.take(self.ranks)
        self._num_allocated = 0
        self._received = [self._empty(0, torch.uint8) for _ in range(NUM_CHANNELS)]
        tokens = self._empty(TOKEN_BYTES, torch.uint8).zero_()
        to_all = [(peer, tokens) for peer in self._peers]
        # Tokens that arrive are never read, so all channels may receive into the same memory.
        from_all = [(peer, torch.empty_like(tokens)) for peer in self._peers]
        self._meeting = self.prepare_exchange(to_all, from_all)

    def _empty(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(num_elements, dtype=dtype)

    def allocate(self, num_elements: int, dtype: torch.dtype) -> Memory:
        self._num_allocated += 1
        mine = self._empty(num_elements, dtype).zero_()
        return Memory(mine, owner=self, number=self._num_allocated - 1)

    def allocate_common(self, num_elements: int, dtype: torch.dtype) -> Memory:
        return self.allocate(num_elements, dtype)

    def prepare_exchange(
        self, sends: Sequence[Addressed], receives: Sequence[Addressed], about: int = 0
    ) -> Prepared:
        """Prepare an exchange with positions: send and receive everything at once, wait for all.

        `about` tells collectives of the same kind apart (`operations.py`).
        """
        outgoing = self._in_turn(sends)
        incoming = [(self.ranks[peer], tensor) for peer, tensor in receives if tensor.numel()]
        num_bytes = sum(tensor.numel() * tensor.itemsize for _, tensor in outgoing)
        carry = self._transport.prepare(outgoing, incoming, about)
        senders = {rank for rank, _ in incoming}
        peers = () if len(senders) == self.size - 1 else tuple(sorted(senders))
        traffic, hub, group = self.traffic, self.hub, self._group

        def run(what: str) -> None:
            recorder = traffic.recorder
            if recorder is None:
                carry(what)
                return
            recorder.end_part("work")
            exchange = recorder.next_id(f"{group}.{hub.channel}")
            carry(what)
            recorder.end_part("exchange" if senders else "send", exchange, peers)

        return Prepared(run, num_bytes)

    def begin_exchange(
        self, sends: Sequence[Addressed], receives: Sequence[Addressed], what: str, about: int
    ) -> Callable[[], None]:
        """Begin an exchange with positions; return a function that waits for its end."""
        outgoing = self._in_turn(sends)
        incoming = [(self.ranks[peer], tensor) for peer, tensor in receives if tensor.numel()]
        return self._transport.begin(outgoing, incoming, what, about)

    def _in_turn(self, sends: Sequence[Addressed]) -> list[Addressed]:
        """Return what is sent and to which rank, beginning with the position after this one's.

        If all began with the same position, its link would be full while the others are idle:
        decision 35 has figures.
        """
        turns = sorted(sends, key=lambda send: (send[0] - self.position) % self.size)
        return [(self.ranks[peer], tensor) for peer, tensor in turns if tensor.numel()]

    def end_exchange(self, ends: Sequence[Callable[[], None]], senders: Collection[int]) -> None:
        """Wait for ends of exchanges, and record that as one exchange with some ranks."""
        recorder = self.traffic.recorder
        if recorder is not None:
            recorder.end_part("work")
            exchange = recorder.next_id(f"{self._group}.{self.hub.channel}")
        for end in ends:
            end()
        if recorder is not None:
            kind, peers = "exchange" if senders else "send", tuple(sorted(senders))
            recorder.end_part(kind, exchange, peers)

    def scratch(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Return memory to receive into. A channel has its own: it runs one exchange at a time."""
        size_bytes = num_elements * dtype.itemsize
        channel = self.hub.channel
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
        about: int,
    ) -> Prepared:
        """Prepare a sum: `nodes[p]` are p's partial sums, `strips[p]` the elements that p gets.

        `mine` are this rank's partial sums, whole, in the order of its nodes; `out` gets this
        rank's strip of the sum. Run it only on the channel on which it was prepared.
        """
        start, stop = strips[self.position]
        num_received = sum(len(nodes[peer]) for peer in self._peers)
        scratch = self.scratch(num_received * (stop - start), out.dtype)
        sends = [
            (peer, tensor[strips[peer][0] : strips[peer][1]])
            for peer in self._peers
            for tensor in mine
        ]
        receives: list[Addressed] = []
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
        exchange = self.prepare_exchange(sends, receives, about)
        add_up = prepare_sum((0, shards), sources, out, scale)
        channel = self.hub.channel

        def run(what: str) -> None:
            assert self.hub.channel == channel, "another channel's scratch memory"
            exchange.run(what)
            add_up()
            self.traffic.spent("sum")

        return Prepared(run, exchange.num_bytes)

    def announce(self, partials: Partials) -> None:
        pass

    def end_lending(self) -> None:
        pass  # an exchange returns when everything is sent

    def meet(self, what: str) -> None:
        self._meeting.run(what)

    def _plan_sum(
        self, partials: Partials, strips: Sequence[tuple[int, int]], out: torch.Tensor
    ) -> Prepared:
        check_owner(partials.sums, self)
        nodes = partials.spread.nodes
        mine = [memory.mine for memory in partials.sums[: len(nodes[self.position])]]
        shards, which = partials.spread.shards, about(partials.sums[0])
        return self.prepare(shards, nodes, mine, strips, out, partials.scale, which)

    def plan_reduce_scatter(self, partials: Partials) -> Prepared:
        strips = list(pairwise(partials.cuts))
        return self._plan_sum(partials, strips, partials.strip(self.position))

    def plan_all_gather(self, strips: Strips) -> Prepared:
        check_owner([strips.memory], self)
        pieces = [strips.mine(position) for position in range(self.size)]
        return self.prepare_exchange(
            [(peer, pieces[self.position]) for peer in self._peers],
            [(peer, pieces[peer]) for peer in self._peers],
            about(strips.memory),
        )

    def plan_all_reduce(self, partials: Partials) -> Prepared:
        if not partials.is_small:
            gather = self.plan_all_gather(partials.gathered)
            return join_plans(self.plan_reduce_scatter(partials), gather)
        everything = [(0, partials.result.numel())] * self.size
        return self._plan_sum(partials, everything, partials.result)

    def plan_reduce(self, partials: Partials, root: int) -> Prepared:
        pieces = [partials.strip(position) for position in range(self.size)]
        sends: list[Addressed] = []
        receives: list[Addressed] = []
        if self.position == root:
            receives = [(peer, pieces[peer]) for peer in self._peers]
        else:
            sends = [(root, pieces[self.position])]
        to_root = self.prepare_exchange(sends, receives, about(partials.sums[0]))
        return join_plans(self.plan_reduce_scatter(partials), to_root)

    def copy_from(self, tensor: torch.Tensor, root: int) -> int:
        """Send each rank a strip of the root's tensor, then gather: no link carries N copies."""
        flat = tensor.view(-1)
        which = about_size(flat.numel())
        strips = Strips(Memory(flat, owner=self), even_cuts(flat.numel(), self.size))
        if flat.numel() * flat.itemsize <= SMALL_BYTES:
            strips.cuts = (0,) * (root + 1) + (flat.numel(),) * (self.size - root)
            dealt = self.prepare_exchange([], [], which)
        elif self.position == root:
            parts = [(peer, strips.mine(peer)) for peer in self._peers]
            dealt = self.prepare_exchange(parts, [], which)
        else:
            dealt = self.prepare_exchange([], [(root, strips.mine(self.position))], which)
        copies = join_plans(dealt, self.plan_all_gather(strips))
        copies.run("broadcast")
        return copies.num_bytes

    def exchange_blocks(self, sends: Tensors, receives: Tensors, blocks: Blocks) -> None:
        self.prepare_exchange(
            [(peer, sends[peer]) for peer in self._peers],
            [(peer, receives[peer]) for peer in self._peers],
            about_blocks(blocks),
        ).run("all_to_all")

    def window(self, num_elements: int, dtype: torch.dtype, functions: Functions) -> Window:
        return self._transport.window(self.context, self.ranks, num_elements, dtype, functions)

    def subgroup(self, ranks: Sequence[int]) -> Communicator | None:
        if self.context.rank not in ranks:
            return None
        return self.group_of(choose(self.machines, ranks))

    def group_of(self, machines: Machines) -> Network | Alone:
        """Return a communicator of these ranks. Only these ranks call it."""
        ranks = positions_of(machines)
        if len(ranks) == 1:
            return Alone(ranks[0], self.traffic)
        group = Network(self.context, self._transport.part(ranks), ranks, machines)
        self.adopt(group)
        return group

    def messages(self) -> Network:
        return self

    def release(self) -> None:
        self._transport.close()
