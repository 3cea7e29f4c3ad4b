"""The speed of a rank's steps."""

from __future__ import annotations

import itertools
import statistics


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

    def median_step_s(self) -> float | None:
        """Return the median time of a step; None before the second."""
        gaps = [end - start for start, end in itertools.pairwise(self._ends_s)]
        return statistics.median(gaps) if gaps else None
