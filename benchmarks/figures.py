"""From step times to figures: medians, spreads, ratios, the table and the goals.

Ratios are taken within a round, between blocks that ran seconds apart, and only then summarised:
what slows the machine for a minute slows both sides of a ratio. All ratios are speeds, so that
more is better: 2 means half the time.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.table import Table

from benchmarks.arms import Arm


@dataclass(frozen=True)
class Spread:
    """A median and how far the rounds lie apart."""

    median: float
    lower_quartile: float
    upper_quartile: float
    least: float
    most: float


@dataclass
class ArmResult:
    """What was seen of one arm; `failure` says why there are no figures."""

    arm: Arm
    step_s: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    first_sums: list[float] = field(default_factory=list)
    final_sums: list[float] = field(default_factory=list)
    pss_bytes: int = 0
    failure: str | None = None


@dataclass
class Comparison:
    """All arms of one workload at one number of ranks."""

    workload: str
    num_ranks: int
    restarted_each_round: bool
    results: list[ArmResult]

    def of(self, method: str) -> ArmResult | None:
        """Find the arm of a method that has the best median, None if none was measured."""
        measured = [r for r in self.results if r.arm.method == method and r.failure is None]
        return min(measured, key=lambda r: statistics.median(r.step_s), default=None)

    def speed(self, method: str, against: str) -> Spread | None:
        """Compare speeds round by round, best arms of both methods."""
        mine, other = self.of(method), self.of(against)
        return None if mine is None or other is None else _speed(mine, other)

    def memory_share(self, method: str, against: str) -> float | None:
        """Compare total memory of all ranks."""
        mine, other = self.of(method), self.of(against)
        return None if mine is None or other is None else mine.pss_bytes / other.pss_bytes

    def to_json_dict(self) -> dict[str, Any]:
        arms = []
        best, alone = self.of("ddp"), self.of("no_exchange")
        for result in self.results:
            figures: dict[str, Any] = {"name": result.arm.name, "method": result.arm.method}
            if result.failure is not None:
                arms.append(figures | {"failure": result.failure})
                continue
            figures |= {
                "is_best_of_method": result is self.of(result.arm.method),
                "step_s": asdict(summarise(result.step_s)),
                "step_s_by_round": result.step_s,
                "speed_against_best_ddp": best and asdict(_speed(result, best)),
                "speed_against_no_exchange": alone and asdict(_speed(result, alone)),
                "pss_bytes": result.pss_bytes,
                "loss_by_rank": result.losses,
                "sum_by_rank_after_first_steps": result.first_sums,
                "sum_by_rank": result.final_sums,
            }
            arms.append(figures)
        return {
            "workload": self.workload,
            "ranks": self.num_ranks,
            "restarted_each_round": self.restarted_each_round,
            "best_ddp": best and best.arm.name,
            "arms": arms,
        }


def summarise(values: Sequence[float]) -> Spread:
    """Reduce the rounds' figures to a median and a spread.

    >>> summarise([1.0, 2.0, 3.0, 4.0, 10.0])
    Spread(median=3.0, lower_quartile=2.0, upper_quartile=4.0, least=1.0, most=10.0)
    """
    if len(values) == 1:
        return Spread(*(values[0],) * 5)
    lower, median, upper = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median, lower, upper, min(values), max(values))


def _speed(mine: ArmResult, other: ArmResult) -> Spread:
    pairs = zip(other.step_s, mine.step_s, strict=True)
    return summarise([theirs_s / ours_s for theirs_s, ours_s in pairs])


def table(comparison: Comparison) -> Table:
    """Lay out one comparison for people: medians, quartiles in brackets."""
    how = ", ranks started anew each round" if comparison.restarted_each_round else ""
    view = Table(title=f"{comparison.workload}, {comparison.num_ranks} ranks{how}")
    view.add_column("arm")
    for heading in ("step, ms", "against best DDP", "against no_exchange", "memory, MB"):
        view.add_column(heading, justify="right")
    best, alone = comparison.of("ddp"), comparison.of("no_exchange")
    for result in comparison.results:
        if result.failure is not None:
            view.add_row(result.arm.name, f"failed: {result.failure}", "", "", "")
            continue
        name = result.arm.name
        if result is best:
            sizes = [r.arm.bucket_mb for r in comparison.results if r.arm.method == "ddp"]
            name = f"DDP (best of {', '.join(str(size) for size in sizes)} MB: {name})"
        view.add_row(
            name,
            _in_words(summarise([s * 1e3 for s in result.step_s])),
            _in_words(_speed(result, best)) if best else "",
            _in_words(_speed(result, alone)) if alone else "",
            f"{result.pss_bytes / 1e6:.0f}",
            style="bold" if result.arm.method == "syncline" else None,
        )
    return view


def _in_words(spread: Spread) -> str:
    return f"{spread.median:.2f} ({spread.lower_quartile:.2f} to {spread.upper_quartile:.2f})"


def doubts(comparison: Comparison) -> list[str]:
    """Say what shows that an arm did not do its work; an empty list is what we want.

    Ranks have different data. So without communication their parameters differ, with it they are
    equal; and since all arms start from the same weights, those that average gradients agree after
    the first steps, far closer than the distance to `no_exchange`.
    """
    found = []
    ddp, alone = comparison.of("ddp"), comparison.of("no_exchange")
    for result in comparison.results:
        where = f"{comparison.workload}, {comparison.num_ranks} ranks, {result.arm.name}"
        if result.failure is not None:
            found.append(f"{where}: {result.failure}")
            continue
        if not all(abs(loss) < float("inf") for loss in result.losses):  # also false for NaN
            found.append(f"{where}: the loss is not finite: {result.losses}")
        is_equal = len(set(result.final_sums)) == 1
        if result.arm.is_synchronised and not is_equal:
            found.append(f"{where}: parameters differ between ranks: {result.final_sums}")
        if not result.arm.is_synchronised and is_equal and comparison.num_ranks > 1:
            found.append(f"{where}: parameters are equal on all ranks: {result.final_sums}")
        if ddp and alone and result.arm.is_synchronised:
            apart = abs(result.first_sums[0] - ddp.first_sums[0])
            distance = min(abs(total - ddp.first_sums[0]) for total in alone.first_sums)
            if apart > 0.05 * distance:
                found.append(
                    f"{where}: after the first steps {apart:.3g} from DDP, "
                    f"no_exchange is {distance:.3g}"
                )
    return found


@dataclass(frozen=True)
class Goal:
    """A figure of Syncline's, against another method, and its bound."""

    workload: str
    num_ranks: int
    figure: str
    against: str
    bound: float


# These come from our release goals. "speed" is at least the bound, "memory" at most.
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


def check_goals(comparisons: Sequence[Comparison]) -> list[dict[str, Any]]:
    """Compare with the goals; what was not measured is not met."""
    by_key = {(c.workload, c.num_ranks): c for c in comparisons}
    rows = []
    for goal in GOALS:
        comparison = by_key.get((goal.workload, goal.num_ranks))
        measured: float | None = None
        if comparison is not None and goal.figure == "speed":
            spread = comparison.speed("syncline", goal.against)
            measured = None if spread is None else spread.median
        elif comparison is not None:
            measured = comparison.memory_share("syncline", goal.against)
        is_met = measured is not None and (
            measured >= goal.bound if goal.figure == "speed" else measured <= goal.bound
        )
        rows.append(asdict(goal) | {"measured": measured, "is_met": is_met})
    return rows


def goals_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Lay out the goals for people."""
    view = Table("goal", "bound", "measured", "ok", title="Goals")
    for row in rows:
        sign = "at least" if row["figure"] == "speed" else "at most"
        measured = "not measured" if row["measured"] is None else f"{row['measured']:.3f}"
        where = f"{row['workload']}, {row['num_ranks']} ranks"
        view.add_row(
            f"{where}: {row['figure']} against {row['against']}",
            f"{sign} {row['bound']:.2f}",
            measured,
            "yes" if row["is_met"] else "NO",
        )
    return view
