"""Meetings of ranks that otherwise do not wait for each other. Ranks that are gone do not count."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection

import torch

from syncline.comm.base import Communicator
from syncline.comm.window import Call


class Meeting:
    """Tells every rank how far each of the others has come. Every rank makes one."""

    def __init__(self, comm: Communicator, name: str = "meeting") -> None:
        self._comm = comm
        self._name = name
        self.reached: Counter[int] = Counter()
        """The number that each rank has told last, by rank."""
        self._window = comm.window(0, torch.float32, {"reach": self._serve})
        self._num_met = 0

    def _serve(self, call: Call) -> int:
        number = int(call.note)
        self.reached[call.sender] = number  # calls of one rank are served in order
        return number

    def tell(self, number: int) -> None:
        """Tell every rank, oneself included, a number that only grows."""
        for position in range(self._comm.size):
            # No answer is waited for, and to a rank that is gone nothing is sent.
            self._window.call(position, "reach", note=b"%d" % number)

    def until(
        self,
        number: int,
        ranks: Collection[int] | None = None,
        but: Callable[[int], bool] = lambda rank: False,
    ) -> None:
        """Wait until all ranks, or some, that are not gone have told a number or more.

        A rank for which `but` is true meanwhile is not waited for.
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
        """Return when every rank that is not gone has called it as often as this one."""
        self._num_met += 1
        self.tell(self._num_met)
        self.until(self._num_met)

    def until_called(
        self, positions: set[int], but: Callable[[int], bool] = lambda rank: False
    ) -> bool:
        """Wait until one of some ranks is in a meeting that this rank has not come to.

        False when all of them are gone, in whatever way, or will not call: those for which `but`
        is true.
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
        """Say whether a rank is in a meeting that this one has not come to."""
        return self.reached[rank] > self._num_met

    def missing(self) -> list[int]:
        """Return the ranks that did not come to the last meeting of this one."""
        return [rank for rank in self._comm.ranks if self.reached[rank] < self._num_met]

    def living(self) -> list[int]:
        """Return the positions of ranks that are not gone."""
        gone = self._window.gone()
        return [position for position in range(self._comm.size) if position not in gone]
