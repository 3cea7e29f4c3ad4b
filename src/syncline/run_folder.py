"""The run folder: the names of its files, and how they are written and read.

job.toml               the job as it is run, everything automatic filled in
metrics.jsonl          a line per step
summary.json           the result
checkpoints/           what --resume starts from
checkpoints/rank-N/    rank N's own parameters and state, with strategies that need them to resume

No torch here: the command line looks at the folder before it imports torch, which takes seconds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from syncline.config import printable
from syncline.errors import SynclineError
from syncline.files import write_atomically
from syncline.result import RunResult

JOB, METRICS, SUMMARY, CHECKPOINTS = "job.toml", "metrics.jsonl", "summary.json", "checkpoints"


@dataclass(frozen=True, kw_only=True)
class Summary(RunResult):
    """The result of a real run."""

    samples_per_s: float
    communicator: str
    num_parameters: int
    seconds: float
    resumed_at: int
    run_folder: str

    def to_json_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def own_checkpoints(folder: Path, rank: int) -> Path:
    """Return the folder of the checkpoints that belong to one rank alone."""
    return folder / CHECKPOINTS / f"rank-{rank}"


def holds_a_run(folder: Path) -> bool:
    """Tell whether the folder holds any file of a run."""
    return any((folder / name).exists() for name in (JOB, METRICS, SUMMARY, CHECKPOINTS))


def has_checkpoint(folder: Path) -> bool:
    """Tell whether there is a complete checkpoint to resume from."""
    try:
        names = os.listdir(folder / CHECKPOINTS)
    except OSError:
        return False
    return any(name.startswith("step-") and not name.endswith(".tmp") for name in names)


def write_summary(folder: Path, summary: Summary) -> None:
    """Write summary.json. A crash leaves the old file or the new one, never half of it."""
    text = json.dumps(summary.to_json_dict(), indent=2) + "\n"
    write_atomically(folder / SUMMARY, text.encode())


def read_summary(folder: Path) -> dict[str, Any]:
    """Read summary.json. Numbers that JSON does not have (a loss of NaN) become None."""
    path = folder / SUMMARY
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise SynclineError(
            f"{printable(path)} is missing or damaged though every rank ended well"
        ) from None
    return finite(summary)


def finite(summary: dict[str, Any]) -> dict[str, Any]:
    """Replace infinities and NaN by None."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in summary.items()
    }


def is_finished(folder: Path, steps: int) -> bool:
    """Tell whether summary.json is there and tells of a run of `steps` steps."""
    try:
        text = (folder / SUMMARY).read_bytes()
        return bool(msgspec.json.decode(text)["steps"] == steps)
    except (OSError, msgspec.DecodeError, KeyError):
        return False


class Metrics:
    """metrics.jsonl, for the rank that writes it."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / METRICS
        self._last_step: int | None = None

    def append(self, line: dict[str, Any]) -> None:
        """Add the line of a step, unless the file already has one."""
        if self._last_step is None:
            # Read before the first line: after rank 0 is lost the next rank continues its file.
            self._last_step = self._read_last_step()
        if line["step"] > self._last_step:
            with open(self._path, "a") as file:
                file.write(json.dumps(line) + "\n")
            self._last_step = line["step"]

    def _read_last_step(self) -> int:
        """Return the last step that has a line; 0 if none has."""
        lines = self._path.read_bytes().splitlines() if self._path.exists() else []
        for line in reversed(lines):
            # A line that a kill has cut short is skipped.
            with contextlib.suppress(msgspec.DecodeError, KeyError):
                return int(msgspec.json.decode(line)["step"])
        return 0

    def keep_until(self, step: int) -> None:
        """Drop the lines of later steps: a resumed run takes those steps again."""
        if not self._path.exists():
            return
        kept = []
        for line in self._path.read_bytes().splitlines(keepends=True):
            try:
                if msgspec.json.decode(line)["step"] <= step:
                    kept.append(line)
            except (msgspec.DecodeError, KeyError, TypeError):
                break  # a kill has cut this line short
        write_atomically(self._path, b"".join(kept))
