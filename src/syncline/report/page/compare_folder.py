"""Reads the folder of a comparison: its summary, and its points as curves (docs/compare.md)."""

from __future__ import annotations

import csv
import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from syncline.config import printable
from syncline.errors import ConfigError

SUMMARY, POINTS = "summary.json", "points.csv"
FORMAT, VERSION = "syncline-compare", 1
ACROSS = ("time_s", "step", "samples", "sent_bytes")
UPS = ("accuracy", "loss", "test_loss")


@dataclass(frozen=True)
class Comparison:
    """A comparison that is shown."""

    name: str
    summary: dict[str, Any]
    curves: dict[tuple[str, str, int, str], list[dict[str, float | None]]]
    """By grid, scenario, number of ranks and variant: points, mean over seeds; the range of each
    figure is in NAME_low and NAME_high."""

    @property
    def variants(self) -> list[str]:
        """All variants, in the study's order: each has one colour and shape throughout."""
        names = (name for found in self.summary["tables"] for name in found["variants"])
        return list(dict.fromkeys(names))


def holds_comparison(folder: Path) -> bool:
    """Say whether a folder holds a comparison, of any version."""
    try:
        found = json.loads((folder / SUMMARY).read_text())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(found, dict) and found.get("format") == FORMAT


def read_comparison(folder: Path) -> Comparison:
    """Read a comparison; raise ConfigError if another version wrote it or it is damaged."""
    summary = json.loads((folder / SUMMARY).read_text())
    if summary.get("version") != VERSION:
        raise ConfigError(
            printable(folder / SUMMARY),
            f"this is a comparison of format version {summary.get('version')}",
            f"this version of syncline reads version {VERSION}",
            "Run the comparison again, with this version.",
        )
    try:
        with (folder / POINTS).open(newline="") as file:
            curves = _curves(list(csv.DictReader(file)))
    except (OSError, ValueError, KeyError, TypeError) as error:
        rule = f"{POINTS} has a row for each evaluation"
        found = f"it cannot be read ({printable(error)})"
        fix = "Run the comparison again: runs that have ended are not run again."
        raise ConfigError(printable(folder / POINTS), found, rule, fix) from None
    return Comparison(str(summary.get("name", folder.name)), summary, curves)


def _curves(
    rows: list[dict[str, str]],
) -> dict[tuple[str, str, int, str], list[dict[str, float | None]]]:
    """Return the mean curve of each variant: points of all seeds at the same place of a run."""
    found: defaultdict[tuple[str, str, int, str], defaultdict[int, list[dict[str, str]]]] = (
        defaultdict(lambda: defaultdict(list))
    )
    for row in rows:
        key = (row["grid"], row["scenario"], int(row["ranks"]), row["variant"])
        found[key][int(row["point"])].append(row)
    return {
        key: [_point(points[number]) for number in sorted(points)] for key, points in found.items()
    }


def _point(rows: list[dict[str, str]]) -> dict[str, float | None]:
    """Return the mean over seeds, and the range of what is drawn upwards."""
    point: dict[str, float | None] = {}
    for name in (*ACROSS, *UPS):
        known = [float(row[name]) for row in rows if row[name]]
        point[name] = sum(known) / len(known) if known else None
        if name in UPS and known:
            point[f"{name}_low"], point[f"{name}_high"] = min(known), max(known)
    return point
