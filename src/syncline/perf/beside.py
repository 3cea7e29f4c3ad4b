"""Several explained runs beside each other: predicted and measured, and more and more ranks.

All of it is computed from what `numbers.py` has of each run.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Numbers = Mapping[str, Any]
"""What `to_json_dict` returned of a run."""

_LEAST_S = 1e-6
"""Tasks that take less of a step are not compared."""
BAND = 0.1
"""A task is predicted well if it is off by no more than this."""


def beside(runs: Sequence[Numbers]) -> dict[str, Any]:
    """Return all numbers of some runs, and what they say together."""
    return {"runs": list(runs), "predicted": list(_pairs(runs)), "scaling": scaling(runs)}


def _pairs(runs: Sequence[Numbers]) -> Iterator[dict[str, Any]]:
    """Yield each measured run with the simulated run of the same job."""
    for (at, one), (other_at, other) in itertools.product(enumerate(runs), repeat=2):
        is_pair = (one["clock"], other["clock"]) == ("measured", "virtual")
        if is_pair and _same_job(one, other):
            yield {"measured": at, "simulated": other_at, **compare(one, other)}


def _same_job(one: Numbers, other: Numbers) -> bool:
    keys = ("model", "parameters", "strategy", "ranks", "samples")
    return all(one[key] == other[key] for key in keys)


def compare(measured: Numbers, simulated: Numbers) -> dict[str, Any]:
    """Return how far each kind of task was predicted from how long it took."""
    tasks = []
    for name, took in measured["tasks_s"].items():
        said = simulated["tasks_s"].get(name)
        if said is not None and min(said["median_s"], took["median_s"]) >= _LEAST_S:
            tasks.append(
                {
                    "task": name,
                    "predicted_s": said["median_s"],
                    "predicted_low_s": said["low_s"],
                    "predicted_high_s": said["high_s"],
                    "measured_s": took["median_s"],
                    "measured_low_s": took["low_s"],
                    "measured_high_s": took["high_s"],
                    "error": said["median_s"] / took["median_s"] - 1.0,
                    "off_s": said["median_s"] - took["median_s"],
                }
            )
    tasks.sort(key=lambda one: -abs(one["off_s"]))
    whole_s = sum(one["measured_s"] for one in tasks)
    step_s, said_s = measured["steps_s"]["median_s"], simulated["steps_s"]["median_s"]
    interval = simulated["interval_s"]
    return {
        "step": {
            "predicted_s": said_s,
            "interval_s": interval,
            "measured_s": step_s,
            "measured_low_s": measured["steps_s"]["low_s"],
            "measured_high_s": measured["steps_s"]["high_s"],
            "error": said_s / step_s - 1.0 if step_s else 0.0,
            "is_inside": bool(interval) and interval[0] <= step_s <= interval[1],
        },
        "tasks": tasks,
        "band": BAND,
        "num_tasks": len(tasks),
        "num_near": sum(abs(one["error"]) <= BAND for one in tasks),
        "error": sum(abs(one["off_s"]) for one in tasks) / whole_s if whole_s else 0.0,
    }


def scaling(runs: Sequence[Numbers]) -> dict[str, Any] | None:
    """Return the speed of runs of one model by number of ranks; None if there is one number only.

    Of several models, the one with most runs.

    Speed-up and efficiency are against the run with the fewest ranks; a measured one, if there is.
    Low and high are the interval of a prediction, if it has one; else nine in ten steps.
    """
    models = Counter((run["model"], run["parameters"]) for run in runs)
    most = max(models, key=lambda one: models[one], default=None)
    known = [
        run
        for run in runs
        if run["samples_per_s"] > 0 and (run["model"], run["parameters"]) == most
    ]
    if len({run["ranks"] for run in known}) < 2:
        return None
    least = min(run["ranks"] for run in known)
    base = min((run for run in known if run["ranks"] == least), key=lambda run: run["clock"])
    series: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for run in sorted(known, key=lambda run: run["ranks"]):
        series.setdefault((run["strategy"], run["clock"]), []).append(_point(run, base))
    measured = [run["ranks"] for run in known if run["clock"] == "measured"]
    return {
        "base_ranks": base["ranks"],
        "base_samples_per_s": base["samples_per_s"],
        "measured_to": max(measured, default=0),
        "series": [
            {"strategy": strategy, "clock": clock, "points": points}
            for (strategy, clock), points in series.items()
        ],
    }


def _point(run: Numbers, base: Numbers) -> dict[str, Any]:
    times = run["interval_s"] or [run["steps_s"]["low_s"], run["steps_s"]["high_s"]]
    low, high = (run["samples_per_s"] * run["steps_s"]["median_s"] / one for one in times[::-1])
    speed_up = run["samples_per_s"] / base["samples_per_s"]
    return {
        "ranks": run["ranks"],
        "samples_per_s": run["samples_per_s"],
        "low": low,
        "high": high,
        "is_interval": bool(run["interval_s"]),
        "speed_up": speed_up,
        "efficiency": speed_up * base["ranks"] / run["ranks"],
    }
