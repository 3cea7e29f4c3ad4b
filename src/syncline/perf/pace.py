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
        self._first_steps = self._mean_steps = 0.0
        """Mean number of steps over ranks at the end of this rank's first step, and of its last."""

    def end_step(self, now_s: float, mean_steps: float) -> None:
        """Record the end of a step. `mean_steps` is how many steps a rank has taken, on average."""
        if not self._ends_s:
            self._first_steps = mean_steps
        self._ends_s.append(now_s)
        self._mean_steps = mean_steps

    @property
    def _since_first_s(self) -> float:
        return self._ends_s[-1] - self._ends_s[0] if self._ends_s else 0.0

    @property
    def samples_per_s(self) -> float:
        """Samples per second of all ranks together; 0 before the second step."""
        if len(self._ends_s) < 2:
            return 0.0
        return self._batch * (self._mean_steps - self._first_steps) / self._since_first_s

    def exposed(self, waited_s: float) -> float:
        """Return the share of the time since the first step that was spent waiting."""
        if len(self._ends_s) < 2:
            return 0.0
        return min(1.0, waited_s / self._since_first_s)

    def to_json_dict(self, waited_s: float, input_waited_s: float) -> dict[str, float]:
        """Return what a line of metrics.jsonl says of it."""
        # Rounded well below what repeats from run to run, to keep lines short.
        return {
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

    As `Pace` counts them, on the fastest rank: from the first end of a step until a rank has taken
    all its steps. After that ranks have nothing to do, because runs are short, not because they
    are slow. If ranks took one step only, time counts from its beginning.
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
