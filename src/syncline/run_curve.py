"""What a run folder's files say, as numbers: the summary, and loss and accuracy by step.

No torch here, and no trace: `syncline explain` and the report read runs that have ended.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

from syncline.config import printable
from syncline.errors import ConfigError
from syncline.files import explained
from syncline.run_folder import EVALUATIONS, JOB, METRICS, SUMMARY, finite

MOST_POINTS = 400
"""A curve has no more points than a picture can show."""


def read_curve(folder: Path) -> dict[str, Any] | None:
    """Return the summary and the curve of a run folder; None if no run has ended there.

    A point has the samples of all ranks, and the seconds since the first step ended; a figure that
    is not known is None.
    """
    if not (folder / SUMMARY).exists():
        return None
    with explained(folder):
        texts = [
            path.read_text() if path.exists() else ""
            for path in (folder / name for name in (SUMMARY, METRICS, JOB, EVALUATIONS))
        ]
    try:
        summary: dict[str, Any] = dict(finite(json.loads(texts[0])))
        lines = [dict(finite(json.loads(line))) for line in texts[1].splitlines() if line]
        evaluated = {
            line["step"]: {name: line.get(name) for name in ("test_loss", "accuracy")}
            for line in map(json.loads, texts[3].splitlines())
        }
        batch = tomllib.loads(texts[2]).get("data", {}).get("batch")
        points = [_point(line, summary, batch) | evaluated.get(line["step"], {}) for line in lines]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        rule = f"{JOB}, {METRICS} and {SUMMARY} are as `syncline train` wrote them"
        fix = "Train once more, or take these files away and give the trace alone."
        raise ConfigError(printable(folder), "a file of this run is damaged", rule, fix) from None
    if points:
        points[-1] |= {name: summary.get(name) for name in ("test_loss", "accuracy")}
    every = max(1, -(-len(points) // MOST_POINTS))
    last = len(points) - 1
    kept = [
        point
        for at, point in enumerate(points)
        if at % every == 0 or at == last or point["accuracy"] is not None
    ]
    return {"summary": summary, "curve": kept}


def _point(line: dict[str, Any], summary: dict[str, Any], batch: int | None) -> dict[str, Any]:
    step = int(line["step"])
    return {
        "step": step,
        "time_s": line.get("time_s", _since_first_s(line, summary, batch)),
        "samples": None if batch is None else step * batch,
        "sent_bytes": step * summary.get("sent_bytes", 0.0) * summary.get("ranks", 1),
        "loss": line.get("loss"),
        "test_loss": None,
        "accuracy": None,
    }


def _since_first_s(
    line: dict[str, Any], summary: dict[str, Any], batch: int | None
) -> float | None:
    """Return when a step ended, from the samples a second until then: for runs without `time_s`."""
    samples_per_s = line.get("samples_per_s")
    if batch is None or not samples_per_s:
        return None
    return (line["step"] - summary.get("resumed_at", 0) - 1) * batch / samples_per_s
