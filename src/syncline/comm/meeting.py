"""Barriers for asynchronous strategies, whose ranks otherwise do not wait for each other.

No rank waits for a rank that is gone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection

import torch

from syncline.comm.base import Communicator
from syncline.comm.window import Call


class Meeting:
    """A barrier among the ranks that are not gone. Every rank makes one."""

    def __init__(self, comm: Communicator, name: str = "meeting") -> None:
        self._comm = comm
        self._name = name
        self.reached: Counter[int] = Counter()
        """The last number that each rank has told, by rank."""
        self._window = comm.window(0, torch.float32, {"reach": self._serve})
        self._num_met = 0

    def _serve(self, call: Call) -> int:
        number = int(call.note)
        self.reached[call.sender] = number  # calls of one rank are served in order
        return number

    def tell(self, number: int) -> None:
        """Tell every rank, this one included, a number that only grows."""
        for position in range(self._comm.size):
            # Do not wait for an answer. A call to a rank that is gone sends nothing.
            self._window.call(position, "reach", note=b"%d" % number)

    def until(
        self,
        number: int,
        ranks: Collection[int] | None = None,
        but: Callable[[int], bool] = lambda rank: False,
    ) -> None:
        """Wait until each of `ranks` (None: all) has told `number` or a larger one.

        Ranks that are gone, or for which `but` is true, are not waited for.
        """
        positions = [
            at for at, rank in enumerate(self._comm.ranks) if ranks is None or rank in ranks
        ]

        def late() -> list[int]:
            gone = self._window.gone()
            there = [self._comm.ranks[at] for at in positions if at not in gone]
            return [rank for rank in there if self.reached[rank] < number and not but(rank)]

        self._window.until(
            lambda: not late(), lambda: f"{self._name} {number} waits for rank {late()}", late
        )

    def meet(self) -> None:
        """Return when every rank that is not gone has called `meet` as often as this one."""
        self._num_met += 1
        self.tell(self._num_met)
        self.until(self._num_met)

    def until_called(
        self, positions: set[int], but: Callable[[int], bool] = lambda rank: False
    ) -> bool:
        """Wait until a rank in `positions` has begun a meeting that this rank has not joined.

        Return False if none of them can begin one: each is gone, or `but` is true for it.
        """
        ranks = [self._comm.ranks[position] for position in positions]

        def is_called() -> bool:
            return any(map(self.is_called_by, ranks))

        def working() -> list[int]:
            there = [self._comm.ranks[at] for at in positions - self._window.gone()]
            return [rank for rank in there if not but(rank)]

        self._window.until(
            lambda: is_called() or not working(),
            lambda: f"{self._name}: rank {working()} still works",
            working,
        )
        return is_called()

    def is_called_by(self, rank: int) -> bool:
        """Say whether a rank has begun a meeting that this rank has not joined."""
        return self.reached[rank] > self._num_met

    def missing(self) -> list[int]:
        """Return the ranks that did not come to this rank's last meeting."""
        return [rank for rank in self._comm.ranks if self.reached[rank] < self._num_met]

    def living(self) -> list[int]:
        """Return the positions of ranks that are not gone."""
        gone = self._window.gone()
        return [position for position in range(self._comm.size) if position not in gone]
