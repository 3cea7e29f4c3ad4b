"""The speed of a rank's steps, and of all ranks' together."""

from __future__ import annotations

import itertools
import math
import statistics
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass


class Pace:
    """Times of a rank's steps, from the end of the first: the first step includes set-up."""

    def __init__(self, batch: int) -> None:
        self._batch = batch
        self._ends_s: list[float] = []
        self._counts: list[tuple[float, float]] = []
        """Time and mean number of steps over ranks: at the end of this rank's first step, and at
        the last end of a step at which all ranks had steps to take."""

    def end_step(self, now_s: float, mean_steps: float, *, is_any_done: bool = False) -> None:
        """Record the end of a step. `mean_steps` is how many steps a rank has taken, on average.

        `is_any_done` says whether a rank has taken all its steps. What the others then do is not
        the pace of all.
        """
        self._ends_s.append(now_s)
        if len(self._counts) < 2 or not is_any_done:
            self._counts[1:] = [(now_s, mean_steps)]

    @property
    def since_first_s(self) -> float:
        """The time from the end of this rank's first step to that of its last."""
        return self._ends_s[-1] - self._ends_s[0] if self._ends_s else 0.0

    @property
    def samples_per_s(self) -> float:
        """Samples per second of all ranks together, so far; 0 before the second step."""
        if len(self._counts) < 2:
            return 0.0
        (start_s, first_steps), (end_s, last_steps) = self._counts
        return self._batch * (last_steps - first_steps) / (end_s - start_s)

    def own_samples_per_s(self, samples: float) -> float:
        """Return the samples per second of this rank alone, which has `samples` in a step."""
        if len(self._ends_s) < 2:
            return 0.0
        return samples * (len(self._ends_s) - 1) / self.since_first_s

    def exposed(self, waited_s: float) -> float:
        """Return the share of the time since the first step that was spent waiting."""
        if len(self._ends_s) < 2:
            return 0.0
        return min(1.0, waited_s / self.since_first_s)

    def to_json_dict(self, waited_s: float, input_waited_s: float) -> dict[str, float]:
        """Return what a line of metrics.jsonl says of it."""
        # Rounded well below what repeats from run to run, to keep lines short.
        return {
            "time_s": round(self.since_first_s, 6),
            "samples_per_s": round(self.samples_per_s, 3),
            "exposed_communication": round(self.exposed(waited_s), 5),
            "exposed_input": round(self.exposed(input_waited_s), 5),
        }

    def median_step_s(self) -> float | None:
        """Return the median time of a step; None before the second."""
        gaps = [end - start for start, end in itertools.pairwise(self._ends_s)]
        return statistics.median(gaps) if gaps else None


@dataclass(frozen=True)
class RankSteps:
    """When a rank's steps ended, and how many samples each of them has."""

    began_s: float
    ends_s: Sequence[float]
    samples: float
    is_whole: bool
    """Whether the rank has taken all its steps: one that died has not."""

    def steps_at(self, now_s: float) -> float:
        """Return how many steps were done at a time; one under way counts in part."""
        done = bisect_right(self.ends_s, now_s)
        if done == len(self.ends_s):
            return float(done)
        start_s = self.ends_s[done - 1] if done else self.began_s
        return done + max(0.0, now_s - start_s) / (self.ends_s[done] - start_s)


def samples_per_s_of(ranks: Sequence[RankSteps]) -> float:
    """Return the samples per second of all ranks together, on one clock.

    They count from the first end of a step until a rank has taken all its steps. After that ranks
    have nothing to do, because runs are short, not because they are slow. If ranks took one
    step only, time counts from its beginning.
    """
    taken = [rank for rank in ranks if rank.ends_s]
    if not taken:
        return 0.0
    whole = [rank.ends_s[-1] for rank in taken if rank.is_whole]
    end_s = min(whole) if whole else max(rank.ends_s[-1] for rank in taken)
    start_s = min(rank.ends_s[0] for rank in taken)
    if start_s >= end_s:
        start_s = min(rank.began_s for rank in taken)
    if start_s >= end_s:
        return math.inf
    done = (rank.samples * (rank.steps_at(end_s) - rank.steps_at(start_s)) for rank in taken)
    return math.fsum(done) / (end_s - start_s)
