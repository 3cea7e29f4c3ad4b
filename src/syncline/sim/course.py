"""How ranks go through a run: which samples each of them computes on in each of its steps.

`EachItsPart` is the course of `train`: in every step each rank computes its own shards. With
`WhoeverComes` ranks that do not wait for each other take steps at their own pace, until all of them
together have taken the run's samples: a fast rank takes more steps than a slow one, and each sample
of an epoch is computed on once, whoever comes to it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from syncline.errors import ConfigError

Source = tuple[int, int]
"""A step and a shard of the run: these name samples."""


class Turn(NamedTuple):
    """One step of a rank."""

    number: int
    """How many steps the rank has taken before."""
    sources: tuple[Source, ...]
    """What each of the rank's shards is computed on."""
    total: int | None
    """How many steps the rank takes in all; None if it is not known yet."""


class Course(Protocol):
    """Deals the samples of a run to its ranks."""

    def turns(self, rank: int) -> Iterator[Turn]:
        """Yield a rank's steps, each when it begins. A rank that dies closes the iterator."""

    def shards_done(self, step: int, taken: Sequence[int]) -> int:
        """Return how many shards were computed when `step` steps of the run were done.

        `taken` are the steps that each rank has taken in the whole run.
        """


class EachItsPart:
    """Every rank takes every step, with its own shards."""

    def __init__(self, shards: Sequence[Sequence[int]], steps: int) -> None:
        """`shards` are those of each rank."""
        self._shards, self._steps = shards, steps

    def turns(self, rank: int) -> Iterator[Turn]:
        for step in range(self._steps):
            sources = tuple((step, shard) for shard in self._shards[rank])
            yield Turn(step, sources, self._steps)

    def shards_done(self, step: int, taken: Sequence[int]) -> int:
        """Count steps of ranks that have died until then only."""
        both = zip(taken, self._shards, strict=True)
        return sum(min(step, own) * len(mine) for own, mine in both)


class WhoeverComes:
    """Ranks take what comes next, in the order of the run's samples, until all is taken.

    A rank takes as many steps at once as it needs for one exchange: so the last of them ends with
    an exchange, and no gradient is computed in vain.
    """

    def __init__(self, shards: Sequence[Sequence[int]], steps: int, period: int = 1) -> None:
        """`shards` are those of each rank, equally many on each rank that computes."""
        workers = [mine for mine in shards if mine]
        if len({len(mine) for mine in workers}) > 1:
            raise ConfigError(
                "strategy.shards",
                f"got {sum(map(len, workers))} with {len(workers)} ranks that compute",
                "where each sample goes to whichever rank comes next, ranks have equally many",
                f"Use a multiple of {len(workers)}.",
            )
        self._parts, self._steps, self._period = workers, steps, period
        self._next = 0
        self._returned: deque[int] = deque()
        """What ranks that died have taken and not computed."""

    def turns(self, rank: int) -> Iterator[Turn]:
        number = 0
        while taken := self._take():
            total = number + len(taken) if len(taken) < self._period else None
            try:
                while taken:
                    step, place = divmod(taken[0], len(self._parts))
                    sources = tuple((step, shard) for shard in self._parts[place])
                    yield Turn(number, sources, total)
                    taken.popleft()
                    number += 1
            finally:
                self._returned.extend(taken)

    def _take(self) -> deque[int]:
        taken: deque[int] = deque()
        while len(taken) < self._period and self._returned:
            taken.append(self._returned.popleft())
        end = min(self._next + self._period - len(taken), self._steps * len(self._parts))
        taken.extend(range(self._next, end))
        self._next = end
        return taken

    def shards_done(self, step: int, taken: Sequence[int]) -> int:
        """Count what was computed; what a rank took and nobody computed does not count."""
        each = len(self._parts[0])
        return min(step * each * len(self._parts), sum(taken) * each)
