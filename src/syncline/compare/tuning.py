"""The settings that a search tries, the same number for every strategy, and which one it takes.

A search tries learning rates. They go from the job's own to the job's times workers to the power
that the strategy's settings name (`tuning_exponent`), in equal factors. The one that reaches the
target first is taken; if none does, the most accurate one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from syncline.compare.cell import Found
from syncline.compare.curves import ends_at, time_to
from syncline.config import Job

KEYS = ("optimizer.lr",)
"""What a search sets."""


class Trial(NamedTuple):
    """Settings that are tried, as after --set, and in words."""

    settings: tuple[str, ...]
    words: str


def trials_of(job: Job, workers: int, tries: int) -> list[Trial]:
    """Return what is tried for a job of one strategy; the first is the job as it is."""
    exponent = job.strategy.own.tuning_exponent
    found = [Trial((), "as it is")]
    for number in range(1, tries):
        factor = workers ** (exponent * number / (tries - 1))
        rate = float(f"{job.optimizer.lr * factor:.3g}")  # digits that can be read and typed
        found.append(Trial((f"optimizer.lr={rate!r}",), f"lr x {factor:.3g}"))
    return found


def best_of(found: Sequence[Found], target: float | None) -> int:
    """Return the index of the trial that is taken; of equal ones the first."""

    def rank(one: Found) -> tuple[bool, float, float]:
        accuracy = ends_at(one, "accuracy")
        time_s = None if target is None else time_to(one.points, target, "time_s")
        last = -math.inf if accuracy is None else accuracy
        return time_s is None, time_s or 0.0, -last

    return min(range(len(found)), key=lambda number: rank(found[number]))
