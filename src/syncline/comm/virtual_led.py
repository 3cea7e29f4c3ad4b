"""A virtual rank's communicator in which leaders speak for groups: the contract of `led.py`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch

from syncline.comm.base import Communicator
from syncline.comm.blocks import Blocks, Tensors, blocks_among
from syncline.comm.shape import Groups, lie_inside
from syncline.comm.virtual import VirtualComm
from syncline.comm.virtual_group import VirtualGroup
from syncline.comm.window import Functions, Window


def lead_virtual(world: VirtualComm, groups: Groups, leaders: Sequence[int]) -> LedComm:
    """Return a communicator of all ranks of `world`. Each of them calls it."""
    key = (groups, tuple(leaders))
    world.num_parts[key] += 1
    return LedComm(world, world.group.led(*key, world.num_parts[key]))


class LedComm(VirtualComm):
    """Leaders speak for groups in sums and gathers; the rest is the world's (`led.py`)."""

    def __init__(self, world: VirtualComm, group: VirtualGroup) -> None:
        super().__init__(group, world.endpoint)
        self._all = world
        self.num_channels = world.num_channels
        self._in_world = tuple(self.ranks.index(rank) for rank in world.ranks)
        """By position in the world: the position here."""

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        self._all.broadcast(tensor, self._all.ranks.index(self.ranks[root]))

    def all_to_all(self, sends: Tensors, receives: Tensors, blocks: Blocks) -> None:
        order = self._in_world
        self._all.all_to_all(
            [sends[at] for at in order], [receives[at] for at in order], blocks_among(blocks, order)
        )

    def barrier(self) -> None:
        self._all.barrier()

    def end_lending(self) -> None:
        """Meet the ranks of this group, if they read each other's memory."""
        if lie_inside(self.group.shape.groups, self.group.shape.machines):
            self._own_group.end_lending()

    @cached_property
    def _own_group(self) -> VirtualComm:
        shape, me = self.group.shape, self.position
        mine = next(group for group in shape.groups if me in group)
        machines = (tuple(self.ranks[at] for at in mine),)
        return VirtualComm(self.group.part(machines, 0), self.endpoint)

    def window(self, num_elements: int, dtype: torch.dtype, functions: Functions) -> Window:
        raise AssertionError("calls do not go through leaders: make windows of the world's ranks")

    def subgroup(self, ranks: Sequence[int]) -> Communicator | None:
        return self._all.subgroup(ranks)
