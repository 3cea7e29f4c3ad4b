"""The communicator of a group of one: it adds up its own partial sums and sends nothing.

It reads no peer's memory, so it also takes memory that another communicator allocated.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from syncline.comm.base import Communicator, Memory, Partials, Strips
from syncline.comm.blocks import Blocks, Tensors
from syncline.comm.traffic import Traffic
from syncline.comm.tree import prepare_sum
from syncline.comm.window import AloneWindow, Functions, Window


class Alone:
    """One rank, no peers."""

    name = "alone"
    position = 0
    size = 1
    num_machines = 1
    num_channels = 1
    leaders_busy = None

    def __init__(
        self, rank: int = 0, traffic: Traffic | None = None, device: torch.device | None = None
    ) -> None:
        self.traffic = traffic or Traffic()
        self.ranks = (rank,)
        self.machines = (self.ranks,)
        self._device = device

    @classmethod
    def of(
        cls,
        rank: int,
        wanted: Sequence[int],
        traffic: Traffic,
        device: torch.device | None = None,
    ) -> Alone | None:
        """Return the communicator of this rank alone; None if the rank is not among `wanted`."""
        return cls(rank, traffic, device) if rank in wanted else None

    def allocate(self, num_elements: int, dtype: torch.dtype) -> Memory:
        mine = torch.zeros(num_elements, dtype=dtype, device=self._device)
        return Memory(mine, (mine,), owner=self)

    def allocate_common(self, num_elements: int, dtype: torch.dtype) -> Memory:
        mine = torch.zeros(num_elements, dtype=dtype, device=self._device)
        return Memory(mine, is_common=True, owner=self)

    def announce(self, partials: Partials) -> None:
        pass

    def reduce_scatter(self, partials: Partials) -> None:
        add_up = partials.plans.get("reduce_scatter")
        if add_up is None:
            nodes = partials.spread.nodes[0]
            sources = [
                (node, memory.mine) for node, memory in zip(nodes, partials.sums, strict=False)
            ]
            root = (0, partials.spread.shards)
            add_up = prepare_sum(root, sources, partials.result, partials.scale)
            partials.plans["reduce_scatter"] = add_up
        add_up()

    def all_reduce(self, partials: Partials) -> None:
        self.reduce_scatter(partials)

    def reduce(self, partials: Partials, root: int) -> None:
        self.reduce_scatter(partials)

    def all_gather(self, strips: Strips) -> None:
        pass

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        pass

    def all_to_all(self, sends: Tensors, receives: Tensors, blocks: Blocks) -> None:
        pass

    def barrier(self) -> None:
        pass

    def end_lending(self) -> None:
        pass

    def subgroup(self, ranks: Sequence[int]) -> Communicator | None:
        return Alone.of(self.ranks[0], ranks, self.traffic, self._device)

    def window(self, num_elements: int, dtype: torch.dtype, functions: Functions) -> Window:
        return AloneWindow(self.ranks[0], functions)

    def close(self) -> None:
        pass
