"""The center of elastic averaging: the strips that a rank holds, and its calls to the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Set

import torch

from syncline.comm.base import Memory
from syncline.comm.many_calls import PendingCalls, Strip, Targets
from syncline.comm.window import Call, Window
from syncline.strategies.vector import Vector


class Center:
    """The strips of one vector's center that a rank holds, and its calls to the others.

    If a strip's owner is gone, the next rank that is not gone takes the strip over and begins with
    its own parameters (as published: those of its last exchange): they are never far from the
    center.
    """

    window: Window

    def __init__(
        self,
        vector: Vector,
        cuts: tuple[int, ...],
        moves: Memory,
        beta: float,
        waits: bool,
    ) -> None:
        self.vector = vector
        self._cuts = cuts
        self.moves = moves
        self._beta = beta
        self._waits = waits
        """Whether the center moves only after all ranks of a round have called."""
        self.strips: dict[int, torch.Tensor] = {}
        self._waiting: dict[int, list[torch.Tensor]] = {}
        self._round = -1
        self._num_moves = 0
        self.asked: PendingCalls | None = None
        self.targets = Targets(())
        """The strips that were asked last, and who held them."""
        self._gone: Set[int] | None = None
        """The ranks that were gone then."""
        self.answer: torch.Tensor | None = None
        """A copy of answers that are not applied yet, if any."""

    @property
    def is_asked(self) -> bool:
        return self.asked is not None or self.answer is not None

    def part(self, memory: Memory, number: int) -> Memory:
        return memory.part(self._cuts[number], self._cuts[number + 1])

    def strip(self, number: int) -> torch.Tensor:
        if number not in self.strips:
            self.strips[number] = self.part(self.vector.memory, number).mine.clone()
        return self.strips[number]

    def held_by(self, position: int) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Yield the ends in the vector, and the values, of the strips that this rank holds now.

        A strip that it has taken over and that nobody has asked for yet is its own parameters.
        """
        for number, owner in self.owners(self.window.gone()).items():
            if owner == position:
                values = self.strips.get(number)
                if values is None:
                    values = self.part(self.vector.memory, number).mine
                yield self._cuts[number], self._cuts[number + 1], values

    def owners(self, gone: Set[int]) -> dict[int, int]:
        """Return, for each strip that is not empty, the position that holds it now."""
        size = len(self._cuts) - 1
        owners = {}
        for number in range(size):
            if self._cuts[number] < self._cuts[number + 1]:
                owner = number
                while owner % size in gone:
                    owner += 1
                owners[number] = owner % size
        return owners

    def find_targets(self, gone: Set[int], order: Callable[[], Iterable[int]]) -> Targets:
        """Return, and note, the strips to be asked and who holds them, in this order."""
        if gone != self._gone:
            self._gone, owners = gone, self.owners(gone)
            ends = self._cuts
            self.targets = Targets(
                tuple(Strip(k, owners[k], *ends[k : k + 2]) for k in order() if k in owners)
            )
        return self.targets

    def pull(self, call: Call) -> int:
        """Write the caller's move to `out`, and move the center by it: at once or, if synchronous,
        when all ranks of the round have called."""
        assert call.values is not None
        assert call.out is not None
        number, step, workers = map(int, call.note.split())
        if step != self._round:  # ranks have met since: all moves of the last round are here
            self._round = step
            self._move()
        center = self.strip(number)
        torch.sub(call.values, center, out=call.out).mul_(self._beta / workers)
        if self._waits:
            self._waiting.setdefault(number, []).append(call.out.clone())
        else:
            center.add_(call.out)
        self._num_moves += 1
        return self._num_moves

    def _move(self) -> None:
        """Apply the moves of the last round (synchronous only)."""
        for number, moves in self._waiting.items():
            for move in moves:
                self.strips[number].add_(move)
        self._waiting = {}

    def read(self, call: Call) -> int:
        assert call.out is not None
        self._move()
        call.out.copy_(self.strip(int(call.note)))
        return self._num_moves
