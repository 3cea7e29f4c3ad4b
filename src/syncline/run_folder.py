"""The run folder: the names of its files, and how they are written and read.

job.toml               the job as it is run, everything automatic filled in
metrics.jsonl          a line per step
evaluations.jsonl      a line per evaluation
summary.json           the result
checkpoints/           what --resume starts from
checkpoints/rank-N/    rank N's own parameters and state, with strategies that need them to resume
.lock                  there while a run uses the folder (`run_lock.py`)

JSON has no NaN and no infinity: the files hold null instead, and any reader of JSON reads them.

No torch here: the command line looks at the folder before it imports torch, which takes seconds.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from syncline.config import Job, job_to_toml, printable
from syncline.errors import SynclineError
from syncline.files import explained, make_folder, remove_partials, write_atomically
from syncline.result import RunResult

JOB, METRICS, SUMMARY, CHECKPOINTS = "job.toml", "metrics.jsonl", "summary.json", "checkpoints"
EVALUATIONS = "evaluations.jsonl"


@dataclass(frozen=True, kw_only=True)
class Summary(RunResult):
    """The result of a real run."""

    communicator: str
    num_parameters: int
    seconds: float
    resumed_at: int
    run_folder: str

    def to_json_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json_dict(cls, found: dict[str, Any]) -> Summary:
        """Return a summary as it was written; raise ValueError if another version wrote it."""
        try:
            gone = {int(rank): how for rank, how in found.get("gone", {}).items()}
            return cls(**found | {"gone": gone})
        except (AttributeError, TypeError) as error:
            raise ValueError(str(error)) from None


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


def remove_leftovers(folder: Path) -> None:
    """Remove half-written files of a run that was killed. Call it with the folder's lock."""
    checkpoints = folder / CHECKPOINTS
    for one in (folder, checkpoints, *checkpoints.glob("rank-*")):
        remove_partials(one)


def write_job(folder: Path, job: Job) -> None:
    """Write job.toml again: settings were chosen."""
    path = folder / JOB
    with explained(path):
        make_folder(folder)
        write_atomically(path, job_to_toml(job).encode())


def write_summary(folder: Path, summary: Summary) -> None:
    """Write summary.json. A crash leaves the old file or the new one, never half of it."""
    text = json.dumps(finite(summary.to_json_dict()), indent=2, allow_nan=False) + "\n"
    path = folder / SUMMARY
    with explained(path):
        write_atomically(path, text.encode())


def read_summary(folder: Path) -> dict[str, Any]:
    """Read summary.json. Numbers that JSON does not have, from version 0.1.0, become None."""
    path = folder / SUMMARY
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(summary, dict):
            raise ValueError("not an object")
    except (OSError, ValueError, RecursionError):
        raise SynclineError(
            f"{printable(path)} is missing or damaged though every rank ended well"
        ) from None
    return dict(finite(summary))


def finite(value: Any) -> Any:
    """Return plain data with None in place of every infinity and NaN, however deep."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [finite(one) for one in value]
    return value


def finished(folder: Path, steps: int) -> Summary | None:
    """Return the summary of a run of `steps` steps that is finished; None if it is not."""
    try:
        found = Summary.from_json_dict(read_summary(folder))
    except (SynclineError, ValueError):
        return None
    return found if found.steps == steps else None


def is_finished(folder: Path, steps: int) -> bool:
    """Tell whether summary.json is there and tells of a run of `steps` steps."""
    try:
        return bool(read_summary(folder)["steps"] == steps)
    except (SynclineError, KeyError):
        return False


def remove_summary(folder: Path, steps: int) -> None:
    """Remove the summary of an earlier run of `steps` steps: it must not pass for this run's."""
    if is_finished(folder, steps):
        with explained(folder / SUMMARY):
            (folder / SUMMARY).unlink()


class Metrics:
    """metrics.jsonl, or another file with a line per step, for the rank that writes it."""

    def __init__(self, folder: Path, name: str = METRICS) -> None:
        self._path = folder / name
        self._last_step: int | None = None

    def append(self, line: dict[str, Any]) -> bool:
        """Add the line of a step, unless the file already has one; say whether it was added."""
        with explained(self._path):
            if self._last_step is None:
                # Read before the first line: after rank 0 is lost the next rank continues its file.
                self._last_step = self._read_last_step()
            if line["step"] <= self._last_step:
                return False
            with open(self._path, "a") as file:
                file.write(_to_line(line))
            self._last_step = line["step"]
            return True

    def _read_last_step(self) -> int:
        """Return the last step that has a line, 0 if none has; end a line that was cut short."""
        text = self._path.read_bytes() if self._path.exists() else b""
        if text and not text.endswith(b"\n"):
            with open(self._path, "a") as file:
                file.write("\n")
        steps = (line["step"] for line in map(_read_line, reversed(text.splitlines())) if line)
        return int(next(steps, 0))

    def keep_until(self, step: int) -> None:
        """Drop the lines of later steps, which a resumed run takes again, and broken lines."""
        with explained(self._path):
            if not self._path.exists():
                return
            lines = map(_read_line, self._path.read_bytes().splitlines())
            kept = [_to_line(line) for line in lines if line and line["step"] <= step]
            write_atomically(self._path, "".join(kept).encode())


def _to_line(line: dict[str, Any]) -> str:
    try:
        return json.dumps(line, allow_nan=False) + "\n"
    except ValueError:
        return json.dumps(finite(line)) + "\n"


def _read_line(text: bytes) -> dict[str, Any] | None:
    """Return the line of a step; None for one that a kill has cut short.

    Lines of version 0.1.0 may hold NaN, which Python's reader takes though it is no JSON.
    """
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    is_line = isinstance(line, dict) and isinstance(line.get("step"), int)
    return line if is_line else None
