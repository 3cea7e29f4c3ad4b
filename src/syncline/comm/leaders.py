"""Let leaders speak for groups of ranks, in real and in virtual time."""

from __future__ import annotations

from collections.abc import Sequence

from syncline.comm.base import Communicator
from syncline.comm.led import lead_real
from syncline.comm.real import RealCommunicator
from syncline.comm.shape import Groups
from syncline.comm.virtual import VirtualComm
from syncline.comm.virtual_led import lead_virtual


def lead(world: Communicator, groups: Groups, leaders: Sequence[int]) -> Communicator:
    """Return a communicator of the same ranks, in which leaders speak for groups (`led.py`).

    Every rank calls it. `groups` hold each rank once; `leaders[k]`, one of the ranks of
    `groups[k]`, speaks for it; leaders are in ascending order. It has no windows.
    """
    if world.size == 1:
        return world
    if isinstance(world, VirtualComm):
        return lead_virtual(world, groups, leaders)
    assert isinstance(world, RealCommunicator), world
    return lead_real(world, groups, leaders)
