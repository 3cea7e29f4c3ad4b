"""Who is first on so many ranks, and which strategies cannot be told apart from the first.

Runs with one seed begin with the same weights and see the samples in the same order, whatever the
strategy. So two strategies are compared seed by seed: by the ratio of their times to the target, or
by the difference of their accuracies at the end. The first is the one with the best mean. Another
one is behind it if Student's 95 % interval of the mean (over logarithms, for ratios) leaves out
"no difference"; if not, they cannot be told apart. With one seed nothing can. No torch here.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import Any

from syncline.compare.curves import interval_of

BySeed = Mapping[int, float | None]

WORDS = (
    "The first has the best mean over seeds. Another strategy is behind it if the 95 % interval of"
    " its differences from the first, seed by seed, leaves out none; otherwise they cannot be told"
    " apart. Each is compared with the first alone, without a correction for many comparisons. A"
    " strategy that misses the target with some seed is behind those that reach it with all."
)


def by_time(times: Mapping[str, BySeed]) -> dict[str, Any]:
    """Return who is first by time to target; None stands for a target that was not reached."""
    whole = _with_all_seeds(times)
    if not whole:
        return _nobody("no strategy reached the target with all seeds")
    logs = {name: {seed: math.log(one) for seed, one in by.items()} for name, by in whole.items()}
    first = min(logs, key=lambda name: statistics.fmean(logs[name].values()))
    others = []
    for name, by_seed in times.items():
        if name == first:
            continue
        row: dict[str, Any] = {"variant": name, "ratio": None, "low": None, "high": None}
        if name in logs:
            apart = _apart(logs[name], logs[first])
            row |= {key: one if one is None else math.exp(one) for key, one in apart.items()}
            row["ratio"] = row.pop("mean")
            low = row["low"]
            row |= {"is_behind": low is not None and low > 1, "why": _why(low)}
        else:
            reached = sum(one is not None for one in by_seed.values())
            row |= {"is_behind": True, "why": f"reached {reached} of {len(by_seed)}"}
        others.append(row)
    return _found(first, others)


def by_accuracy(accuracies: Mapping[str, BySeed]) -> dict[str, Any]:
    """Return who is first by accuracy at the end; None stands for a run that failed."""
    whole = _with_all_seeds(accuracies)
    if not whole:
        return _nobody("no strategy came to the end with all seeds")
    first = max(whole, key=lambda name: statistics.fmean(whole[name].values()))
    others = []
    for name, by_seed in accuracies.items():
        if name == first:
            continue
        row: dict[str, Any] = {"variant": name, "difference": None, "low": None, "high": None}
        if name in whole:
            row |= _apart(whole[name], whole[first])
            row["difference"] = row.pop("mean")
            high = row["high"]
            row |= {"is_behind": high is not None and high < 0, "why": _why(high)}
        else:
            ended = sum(one is not None for one in by_seed.values())
            row |= {"is_behind": True, "why": f"{ended} of {len(by_seed)} came to the end"}
        others.append(row)
    return _found(first, others)


def _with_all_seeds(by_name: Mapping[str, BySeed]) -> dict[str, dict[int, float]]:
    found = {}
    for name, by_seed in by_name.items():
        there = {seed: one for seed, one in by_seed.items() if one is not None}
        if there and len(there) == len(by_seed):
            found[name] = there
    return found


def _apart(one: Mapping[int, float], first: Mapping[int, float]) -> dict[str, float | None]:
    """Return the mean of the differences by seed, and its interval."""
    differences = [one[seed] - first[seed] for seed in first if seed in one]
    interval = interval_of(differences)
    if interval is None:
        mean = statistics.fmean(differences) if differences else None
        return {"mean": mean, "low": None, "high": None}
    return interval._asdict()


def _why(bound: float | None) -> str:
    return "one seed: no spread" if bound is None else ""


def _found(first: str, others: list[dict[str, Any]]) -> dict[str, Any]:
    tied = [one["variant"] for one in others if not one["is_behind"]]
    words = f"cannot be told apart: {', '.join([first, *tied])}" if tied else first
    return {"first": first, "tied": tied, "words": words, "others": others}


def _nobody(why: str) -> dict[str, Any]:
    return {"first": None, "tied": [], "words": why, "others": []}
