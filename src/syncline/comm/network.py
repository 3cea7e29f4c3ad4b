"""Ranks on several machines: strips exchanged directly over torch.distributed.

Each rank sends every peer the strip that the peer owns and adds up what it receives in the tree's
order. Gloo's own reduce_scatter is slower than its all_reduce and adds in an order that depends on
the number of ranks; a direct exchange moves the least bytes and keeps the order ours.

Gloo and NCCL authenticate nobody: only numbers travel here. NCCL is untested.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from syncline.comm.alone import Alone
from syncline.comm.base import Communicator, Memory, Partials, Strips, even_cuts
from syncline.comm.control import Control
from syncline.comm.tree import Node, Spread, prepare_sum
from syncline.errors import CommError

_SMALL_ELEMENTS = 1 << 14


class Network:
    """Collectives by point-to-point messages in a torch.distributed group."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        ranks: Sequence[int],
        control: Control,
        device: torch.device | None = None,
    ) -> None:
        self._group = group
        self._control = control
        self._device = device or torch.device("cpu")
        self._is_batched = dist.get_backend(group) == "nccl"
        self.name = f"network ({dist.get_backend(group)})"
        self.ranks = tuple(ranks)
        self.size = self.num_machines = len(self.ranks)
        self.position = self.ranks.index(dist.get_rank())
        self._peers = [peer for peer in range(self.size) if peer != self.position]
        self._received = torch.empty(0, dtype=torch.uint8, device=self._device)

    def allocate(self, num_elements: int, dtype: torch.dtype) -> Memory:
        return Memory(torch.zeros(num_elements, dtype=dtype, device=self._device))

    def allocate_common(self, num_elements: int, dtype: torch.dtype) -> Memory:
        return self.allocate(num_elements, dtype)

    def exchange(
        self,
        sends: Sequence[tuple[int, torch.Tensor]],
        receives: Sequence[tuple[int, torch.Tensor]],
        what: str,
    ) -> None:
        """Send to and receive from positions, everything at once, and wait for all of it."""
        calls: list[tuple[Any, int, torch.Tensor]] = []
        calls += [(dist.irecv, peer, tensor) for peer, tensor in receives if tensor.numel()]
        calls += [(dist.isend, peer, tensor) for peer, tensor in sends if tensor.numel()]
        try:
            if self._is_batched:
                ops = [
                    dist.P2POp(call, tensor, self.ranks[peer], self._group)
                    for call, peer, tensor in calls
                ]
                works: list[Any] = dist.batch_isend_irecv(ops) if ops else []
            else:
                works = [
                    call(tensor, self.ranks[peer], group=self._group)
                    for call, peer, tensor in calls
                ]
        except RuntimeError as error:
            raise self._failure(what, error) from None
        for work, (_, peer, _) in zip(works, calls, strict=False):
            try:
                work.wait()
            except RuntimeError as error:
                raise self._failure(what, error, self.ranks[peer]) from None

    def _failure(self, what: str, error: Exception, peer: int | None = None) -> CommError:
        if peer is not None and "imed out" in str(error):
            self._control.call_hung(peer, self._control.hung_s, what)
        return self._control.verdict() or CommError(
            f"rank {self._control.place.rank}: {what} failed on the network: {error}"
        )

    def scratch(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory for what arrives; one exchange at a time uses it."""
        size_bytes = num_elements * dtype.itemsize
        if self._received.numel() < size_bytes:
            self._received = torch.empty(size_bytes, dtype=torch.uint8, device=self._device)
        return self._received[:size_bytes].view(dtype)

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
        rank's strip of the sum.
        """
        start, stop = strips[self.position]
        num_received = sum(len(nodes[peer]) for peer in self._peers)
        scratch = self.scratch(num_received * (stop - start), out.dtype)
        sends = [
            (peer, tensor[strips[peer][0] : strips[peer][1]])
            for peer in self._peers
            for tensor in mine
        ]
        receives: list[tuple[int, torch.Tensor]] = []
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
        add_up = prepare_sum((0, shards), sources, out, scale)

        def run(what: str) -> None:
            self.exchange(sends, receives, what)
            add_up()

        return run

    def publish(self, partials: Partials) -> None:
        pass

    def reduce_scatter(self, partials: Partials) -> None:
        if partials.plan is None:
            nodes = partials.spread.nodes
            mine = [slot.mine for slot in partials.slots[: len(nodes[self.position])]]
            strips = list(zip(partials.cuts, partials.cuts[1:], strict=False))
            out = partials.strip(self.position)
            shards = partials.spread.shards
            partials.plan = self.prepare(shards, nodes, mine, strips, out, partials.scale)
        partials.plan("reduce_scatter")

    def all_gather(self, strips: Strips) -> None:
        pieces = [strips.mine(position) for position in range(self.size)]
        self.exchange(
            [(peer, pieces[self.position]) for peer in self._peers],
            [(peer, pieces[peer]) for peer in self._peers],
            "all_gather",
        )

    def all_reduce(self, partials: Partials) -> None:
        whole = partials.slots[0].mine
        if whole.numel() > _SMALL_ELEMENTS:
            self.reduce_scatter(partials)
            self.all_gather(Strips(partials.slots[0], partials.cuts))
            return
        if partials.plan is None:
            nodes = partials.spread.nodes
            mine = [slot.mine for slot in partials.slots[: len(nodes[self.position])]]
            everything = [(0, whole.numel())] * self.size
            partials.result = torch.empty_like(whole)
            shards = partials.spread.shards
            partials.plan = self.prepare(
                shards, nodes, mine, everything, partials.result, partials.scale
            )
        partials.plan("all_reduce")

    def reduce(self, partials: Partials, root: int) -> None:
        self.reduce_scatter(partials)
        pieces = [partials.strip(position) for position in range(self.size)]
        if self.position == root:
            self.exchange([], [(peer, pieces[peer]) for peer in self._peers], "reduce")
        else:
            self.exchange([(root, pieces[self.position])], [], "reduce")

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        try:
            dist.broadcast(tensor.detach(), self.ranks[root], group=self._group)
        except RuntimeError as error:
            raise self._failure("broadcast", error) from None

    def barrier(self) -> None:
        token = Partials(
            [Memory(torch.zeros(1, device=self._device))],
            even_cuts(1, self.size),
            Spread.even(self.size, range(self.size)),
            1.0,
        )
        self.all_reduce(token)

    def subgroup(self, ranks: Sequence[int]) -> Communicator | None:
        return self.group_of([rank for rank in self.ranks if rank in ranks])

    def group_of(self, ranks: Sequence[int]) -> Communicator | None:
        """Make a communicator of any ranks of the world; only they need to call."""
        mine = self._control.place.rank
        if mine not in ranks:
            return None
        if len(ranks) == 1:
            return Alone(mine)
        timeout = datetime.timedelta(seconds=self._control.hung_s)
        group = dist.new_group(list(ranks), timeout=timeout, use_local_synchronization=True)
        return Network(group, ranks, self._control, self._device)

    def close(self) -> None:
        pass
