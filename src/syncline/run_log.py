"""What the rank that writes the run folder says of steps and evaluations, there and to loggers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from syncline.config import Job
from syncline.evaluation_log import EvaluationLog
from syncline.loggers.log import Log
from syncline.run_folder import Metrics


class RunLog:
    """The metrics of a run. Loggers get what metrics.jsonl gets, and evaluations."""

    def __init__(self, folder: Path, job: Job, say: Callable[[str], None] | None) -> None:
        self._metrics, self._evaluations = Metrics(folder), EvaluationLog(folder)
        self.begin, self.apart = self._evaluations.begin, self._evaluations.apart
        self._log = Log(
            *job.run.log, config=settings_of(job), title=folder.name, folder=folder, say=say
        )

    def keep_until(self, step: int) -> None:
        """Drop what the files have of later steps, which a resumed run takes again."""
        self._metrics.keep_until(step)
        self._evaluations.keep_until(step)

    def append(self, line: dict[str, Any]) -> None:
        """Add the line of a step, unless there is one."""
        if self._metrics.append(line):
            self._log.write(line["step"], **{key: line[key] for key in line if key != "step"})

    def evaluated(self, step: int, loss: float, accuracy: float | None) -> None:
        """Add what an evaluation found."""
        self._evaluations.append(step, loss, accuracy)
        self._log.write(step, test_loss=loss, accuracy=accuracy)

    def close(self, *, failed: bool = False) -> None:
        """Let the loggers finish."""
        self._log.close(failed=failed)


def settings_of(job: Job) -> dict[str, object]:
    """Return a job's settings by dotted name; without the cluster, which training ignores."""
    tables = msgspec.to_builtins(job)
    del tables["cluster"]
    tables["strategy"][job.strategy.name] = tables["strategy"].pop("settings")
    return dict(_flat(tables, ""))


def _flat(table: dict[str, Any], above: str) -> list[tuple[str, object]]:
    found: list[tuple[str, object]] = []
    for name, value in table.items():
        key = f"{above}{name}"
        if isinstance(value, dict):
            found += _flat(value, f"{key}.")
        elif value is not None:
            found.append((key, value))
    return found
