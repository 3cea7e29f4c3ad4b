"""How good predictions were: errors, intervals that held, the right order, and null predictors."""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from benchmarks.prediction_cases import Case

GOALS = {
    "mean_error": 0.05,
    "p90_error": 0.12,
    "p90_error_crowded": 0.15,
    "order": 0.95,
    "coverage": 0.90,
    "median_half_width": 0.08,
    "most_half_width": 0.25,
}
"""At most these, but for `order` and `coverage`, which are at least these."""


def error_of(row: dict[str, Any], key: str = "predicted_s") -> float:
    """Return how far a predicted step is from the median of the measured ones, relative to it."""
    return float(row[key] / statistics.median(row["measured_s"]) - 1.0)


def is_inside(row: dict[str, Any]) -> bool:
    return bool(row["low_s"] <= statistics.median(row["measured_s"]) <= row["high_s"])


def half_width(row: dict[str, Any]) -> float:
    return float((row["high_s"] - row["low_s"]) / 2 / row["predicted_s"])


def order_of(rows: Iterable[dict[str, Any]]) -> tuple[int, int]:
    """Return how many pairs of strategies differ by more than the spread, and how many of those
    are predicted in the right order."""
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[Case(*row["case"]).group].append(row)
    told = right = 0
    for group in groups.values():
        for one, other in itertools.combinations(group, 2):
            slow, fast = sorted((one, other), key=lambda row: -statistics.median(row["measured_s"]))
            if min(slow["measured_s"]) > max(fast["measured_s"]):
                told += 1
                right += slow["predicted_s"] > fast["predicted_s"]
    return told, right


def figures(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of all rows together, by stable keys."""
    errors = [abs(error_of(row)) for row in rows]
    crowded = [abs(error_of(row)) for row in rows if Case(*row["case"]).is_crowded]
    others = [abs(error_of(row)) for row in rows if not Case(*row["case"]).is_crowded]
    widths = [half_width(row) for row in rows]
    told, right = order_of(rows)
    return {
        "cases": len(rows),
        "mean_error": statistics.fmean(errors),
        "p90_error": float(np.quantile(others, 0.9)) if others else None,
        "p90_error_crowded": float(np.quantile(crowded, 0.9)) if crowded else None,
        "coverage": sum(map(is_inside, rows)) / len(rows),
        "median_half_width": statistics.median(widths),
        "most_half_width": max(widths),
        "order": right / told if told else None,
        "pairs": told,
        "null": {
            name: statistics.fmean(abs(error_of(row, name)) for row in rows)
            for name in ("free_s", "in_turn_s")
        },
    }


def missed(found: dict[str, Any]) -> list[str]:
    """Return the goals that are not met."""
    at_least = ("order", "coverage")
    return [
        key
        for key, goal in GOALS.items()
        if found[key] is not None and (found[key] < goal if key in at_least else found[key] > goal)
    ]
