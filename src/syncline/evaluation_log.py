"""evaluations.jsonl in a run folder: what each evaluation found, and after how much training.

Seconds count from the first step since the run was last started, without those of evaluating.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

from syncline.run_folder import EVALUATIONS, Metrics


class EvaluationLog:
    """Times evaluations, on every rank, and writes them, on the one that writes the folder."""

    def __init__(self, out: Path) -> None:
        self._file = Metrics(out, EVALUATIONS)
        self.keep_until = self._file.keep_until
        self._began_s = time.perf_counter()
        self._evaluating_s = self._seconds = 0.0

    def begin(self) -> float:
        """Start the clock; return its time."""
        self._began_s = time.perf_counter()
        return self._began_s

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Evaluate inside: this takes no time."""
        started_s = time.perf_counter()
        self._seconds = started_s - self._began_s - self._evaluating_s
        yield
        self._evaluating_s += time.perf_counter() - started_s

    def append(self, step: int, test_loss: float, accuracy: float | None) -> None:
        """Write what the last evaluation found."""
        seconds = round(self._seconds, 6)
        line = {"step": step, "seconds": seconds, "test_loss": test_loss, "accuracy": accuracy}
        self._file.append(line)
