"""What the figures are held against: our goals, and the rule of speed between versions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from benchmarks.figures import Comparison, Spread, speed


@dataclass(frozen=True)
class Goal:
    """A figure of Syncline's, against another method, and its bound.

    "speed" and "upper quartile of speed" are at least the bound, "memory" is at most.
    """

    workload: str
    num_ranks: int
    figure: str
    against: str
    bound: float


# These come from our release goals.
GOALS: tuple[Goal, ...] = (
    Goal("mlp", 2, "speed", "ddp", 2.5),
    Goal("cnn", 2, "speed", "ddp", 0.98),
    Goal("cd-dnn", 2, "speed", "ddp", 1.25),
    Goal("vgg-a", 2, "speed", "ddp", 0.98),
    Goal("resnet-18", 2, "speed", "ddp", 0.98),
    Goal("cd-dnn", 2, "speed", "no_exchange", 0.93),
    Goal("vgg-a", 2, "speed", "no_exchange", 0.93),
    Goal("resnet-18", 2, "speed", "no_exchange", 0.93),
    Goal("mlp", 4, "speed", "ddp", 3.0),
    Goal("cnn", 4, "speed", "ddp", 1.0),
    Goal("cd-dnn", 4, "speed", "ddp", 1.0),
    Goal("vgg-a", 4, "speed", "ddp", 1.0),
    Goal("resnet-18", 4, "speed", "ddp", 1.0),
    Goal("cd-dnn", 4, "memory", "ddp", 0.70),
)


QUARTILE_BOUND = 0.98
QUARTILE_RANKS = (2, 4)
"""On every workload, at these numbers of ranks, DDP may be ahead by noise alone: the upper quartile
of the paired ratios against it is at least the bound."""


def check_goals(comparisons: Sequence[Comparison]) -> list[dict[str, Any]]:
    """Compare with the goals; a listed goal that was not measured is not met.

    The goal of quartiles is checked on whatever workload was measured.
    """
    quartiles = [
        Goal(c.workload, c.num_ranks, "upper quartile of speed", "ddp", QUARTILE_BOUND)
        for c in comparisons
        if c.num_ranks in QUARTILE_RANKS
    ]
    by_key = {(c.workload, c.num_ranks): c for c in comparisons}
    rows = []
    for goal in (*GOALS, *quartiles):
        comparison = by_key.get((goal.workload, goal.num_ranks))
        measured = None if comparison is None else _figure(comparison, goal)
        is_met = measured is not None and (
            measured <= goal.bound if goal.figure == "memory" else measured >= goal.bound
        )
        rows.append(asdict(goal) | {"measured": measured, "is_met": is_met})
    return rows


def _figure(comparison: Comparison, goal: Goal) -> float | None:
    if goal.figure == "memory":
        return comparison.memory_share("syncline", goal.against)
    spread = comparison.speed("syncline", goal.against)
    if spread is None:
        return None
    return spread.median if goal.figure == "speed" else spread.upper_quartile


def goals_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Lay out the goals for people."""
    view = Table("goal", "bound", "measured", "ok", title="Goals")
    for row in rows:
        sign = "at most" if row["figure"] == "memory" else "at least"
        measured = "not measured" if row["measured"] is None else f"{row['measured']:.3f}"
        where = f"{row['workload']}, {row['num_ranks']} ranks"
        view.add_row(
            f"{where}: {row['figure']} against {row['against']}",
            f"{sign} {row['bound']:.2f}",
            measured,
            "yes" if row["is_met"] else "NO",
        )
    return view


MARGIN = 0.02
RULE_WORKLOADS = ("mlp", "cd-dnn", "resnet-18")
RULE_MACHINES = 4
"""The rule of speed: on these workloads at 2 and 4 ranks, and over the wire with so many machines,
a version is behind another by no more than the margin in median, beyond what the control shows."""


def rule_of_speed(
    case: str,
    this_s: Sequence[float],
    other_s: Sequence[float],
    control_s: Sequence[float],
) -> dict[str, Any]:
    """Judge one case from step times in the same rounds: this version, the other one, it again.

    The control arm runs the other version's code once more. If it is behind too, by chance, this
    version may be behind by as much more. An arm that has no times has failed: the rule is not met.

    >>> rule_of_speed("mlp", [1.03], [1.0], [1.02])["is_met"]
    True
    >>> rule_of_speed("mlp", [1.03], [1.0], [0.98])["is_met"]
    False
    """
    if not (this_s and other_s and control_s):
        return {"case": case, "ratio": None, "control": None, "is_met": False}
    ratio, control = speed(this_s, other_s), speed(control_s, other_s)
    is_met = ratio.median >= 1 - MARGIN - max(0.0, 1 - control.median)
    return {
        "case": case,
        "ratio": ratio.median,
        "control": control.median,
        "is_met": is_met,
        "ratio_quartiles": _quartiles(ratio),
        "control_quartiles": _quartiles(control),
    }


def _quartiles(spread: Spread) -> list[float]:
    return [spread.lower_quartile, spread.upper_quartile]


def check_rule(comparisons: Sequence[Comparison]) -> list[dict[str, Any]]:
    """Judge all cases of a run with --against."""
    return [
        rule_of_speed(
            f"{comparison.workload}, {comparison.num_ranks} ranks",
            *(
                [] if (result := comparison.of(method)) is None else result.step_s
                for method in ("syncline", "other", "control")
            ),
        )
        for comparison in comparisons
    ]


def rule_table(rows: Sequence[dict[str, Any]], commit: str) -> Table:
    """Lay out the rule of speed for people: ratios of speed, so less than 1 is behind."""
    title = f"Rule of speed, against {commit[:12]}: at most {MARGIN:.0%} behind beyond the control"
    view = Table("case", "this / other", "control / other", "ok", title=title)
    for row in rows:
        cells = ["not measured"] * 2
        if row["ratio"] is not None:
            cells = [
                f"{row[key]:.3f} ({row[f'{key}_quartiles'][0]:.3f} to"
                f" {row[f'{key}_quartiles'][1]:.3f})"
                for key in ("ratio", "control")
            ]
        view.add_row(row["case"], *cells, "yes" if row["is_met"] else "NO")
    return view
