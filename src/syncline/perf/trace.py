"""A trace: tasks with the rank, lane, kind, bucket and step they belong to, and when they ran."""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass(frozen=True)
class Task:
    """One piece of work on one lane. Times are seconds of one clock."""

    rank: int
    lane: str
    kind: str
    bucket: int
    step: int
    start_s: float
    end_s: float


class Recorder:
    """Collects the tasks of one rank. Appending is atomic, so both lanes may write."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.tasks: list[Task] = []

    def add(self, lane: str, kind: str, bucket: int, step: int, start_s: float) -> None:
        end_s = time.perf_counter()
        self.tasks.append(Task(self.rank, lane, kind, bucket, step, start_s, end_s))
