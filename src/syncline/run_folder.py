"""The run folder: what lies in it under which name, and how that is written and read.

job.toml               the job as it is run, everything automatic filled in
metrics.jsonl          a line per recorded step
summary.json           the result
checkpoints/           what --resume starts from
checkpoints/rank-N/    what is rank N's own, with strategies whose ranks differ

No torch here: the command line looks at the folder before it pays for importing that.
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

JOB, METRICS, SUMMARY, CHECKPOINTS = "job.toml", "metrics.jsonl", "summary.json", "checkpoints"


@dataclass(frozen=True)
class Summary:
    """How a run went.

    With the synchronous strategy losses and accuracy do not depend on the number of ranks.
    """

    steps: int
    samples_per_s: float
    step_ms: float
    """Median time of a step."""
    loss: float
    """Mean training loss of the last step."""
    test_loss: float | None
    accuracy: float | None
    exposed_communication: float
    """Share of time that the compute lane waited for communication."""
    weights_sha256: str
    ranks: int
    shards: int
    communicator: str
    num_parameters: int
    seconds: float
    resumed_at: int
    run_folder: str
    strategy: dict[str, Any] = dataclasses.field(default_factory=dict)
    """What the strategy has to tell, as rank 0 saw it."""
    gone: dict[int, str] = dataclasses.field(default_factory=dict)
    """Ranks that were lost on the way, and how."""

    def to_json_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def own_checkpoints(folder: Path, rank: int) -> Path:
    """Return where the checkpoints lie that are one rank's own."""
    return folder / CHECKPOINTS / f"rank-{rank}"


def holds_a_run(folder: Path) -> bool:
    """Tell whether anything of a run is there."""
    return any((folder / name).exists() for name in (JOB, METRICS, SUMMARY, CHECKPOINTS))


def has_checkpoint(folder: Path) -> bool:
    """Tell whether a finished checkpoint of the whole is there."""
    try:
        names = os.listdir(folder / CHECKPOINTS)
    except OSError:
        return False
    return any(name.startswith("step-") and not name.endswith(".tmp") for name in names)


def write_summary(folder: Path, summary: Summary) -> None:
    """Write summary.json: whole or not at all."""
    text = json.dumps(summary.to_json_dict(), indent=2) + "\n"
    write_atomically(folder / SUMMARY, text.encode())


def read_summary(folder: Path) -> dict[str, Any]:
    """Read what rank 0 wrote at the end. Numbers JSON cannot hold (a loss of NaN) become null."""
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
    """Tell whether there is a summary of a run of so many steps."""
    try:
        text = (folder / SUMMARY).read_bytes()
        return bool(msgspec.json.decode(text)["steps"] == steps)
    except (OSError, msgspec.DecodeError, KeyError):
        return False


class Metrics:
    """metrics.jsonl as the rank sees it that writes it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / METRICS
        self._written: int | None = None

    def append(self, line: dict[str, Any]) -> None:
        """Add the line of a step, unless the file has it already."""
        if self._written is None:
            # Rank 0's from the start; another's from where the one before it was gone.
            self._written = last_step(self.path)
        if line["step"] > self._written:
            with open(self.path, "a") as file:
                file.write(json.dumps(line) + "\n")
            self._written = line["step"]


def last_step(path: Path) -> int:
    """Return the last step that a file of metrics tells of; 0 if it tells of none."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    for line in reversed(lines):
        with contextlib.suppress(msgspec.DecodeError, KeyError):  # cut short by a kill
            return int(msgspec.json.decode(line)["step"])
    return 0


def keep_metrics_until(path: Path, step: int) -> None:
    """Drop lines of steps that a resumed run will take again."""
    if not path.exists():
        return
    kept = []
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            if msgspec.json.decode(line)["step"] <= step:
                kept.append(line)
        except (msgspec.DecodeError, KeyError, TypeError):
            break  # a line cut short by the kill
    write_atomically(path, b"".join(kept))
