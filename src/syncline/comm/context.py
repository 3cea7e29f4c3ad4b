"""What all communicators of one rank share: hub, control connections, traffic, open subgroups."""

from __future__ import annotations

from typing import Protocol

from syncline.comm.control import Control
from syncline.comm.group_numbers import GroupNames
from syncline.comm.hub import Hub
from syncline.comm.traffic import Traffic


class Closable(Protocol):
    def close(self) -> None: ...


class Context:
    """Made once for the world's communicator, and passed to each of its subgroups."""

    def __init__(self, control: Control, hub: Hub) -> None:
        self.control = control
        self.hub = hub
        self.rank = control.place.rank
        self.traffic = Traffic()
        self.names = GroupNames()
        self._subgroups: dict[int, Closable] = {}
        control.on_failure(lambda failure: hub.wake())
        control.on_gone(lambda rank: hub.wake())

    def keep(self, subgroup: Closable) -> None:
        """Note an open subgroup, which the world's communicator closes if nothing else does."""
        self._subgroups[id(subgroup)] = subgroup

    def forget(self, subgroup: Closable) -> None:
        self._subgroups.pop(id(subgroup), None)

    def close_subgroups(self) -> None:
        for subgroup in reversed(list(self._subgroups.values())):
            subgroup.close()
