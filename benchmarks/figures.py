"""From step times to figures: medians, spreads, ratios, the table and what looks wrong.

Ratios are taken within a round, between blocks that ran seconds apart, and only then summarised:
what slows the machine for a minute slows both sides of a ratio. All ratios are speeds, so that
more is better: 2 means half the time.

Of a method with several arms one is chosen in selection rounds, which come first; ratios are taken
from the rounds after them. The best of several in the same rounds would be partly the luckiest.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.table import Table

from benchmarks.arms import Arm

BASELINES: dict[str, str] = {"best DDP": "ddp", "no_exchange": "no_exchange", "other": "other"}
"""What the arms are compared with: how it is called, and its method."""


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
    """What was seen of one arm; `failure` says why there are no figures.

    `step_s` is empty for an arm that was not chosen in the selection rounds.
    """

    arm: Arm
    step_s: list[float] = field(default_factory=list)
    selection_s: list[float] = field(default_factory=list)
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
        """Find the arm of a method that was compared, None if there is none or it failed."""
        for result in self.results:
            if result.arm.method == method and result.step_s and result.failure is None:
                return result
        return None

    def speed(self, method: str, against: str) -> Spread | None:
        """Compare speeds round by round."""
        mine, other = self.of(method), self.of(against)
        return None if mine is None or other is None else speed(mine.step_s, other.step_s)

    def memory_share(self, method: str, against: str) -> float | None:
        """Compare total memory of all ranks."""
        mine, other = self.of(method), self.of(against)
        return None if mine is None or other is None else mine.pss_bytes / other.pss_bytes

    def baselines(self) -> dict[str, ArmResult]:
        """Return what the others are compared with, as far as it was measured."""
        found = {name: self.of(method) for name, method in BASELINES.items()}
        return {name: result for name, result in found.items() if result is not None}

    def to_json_dict(self) -> dict[str, Any]:
        best = self.of("ddp")
        return {
            "workload": self.workload,
            "ranks": self.num_ranks,
            "restarted_each_round": self.restarted_each_round,
            "best_ddp": best and best.arm.name,
            "arms": [self._arm_to_json_dict(result) for result in self.results],
        }

    def _arm_to_json_dict(self, result: ArmResult) -> dict[str, Any]:
        figures: dict[str, Any] = {"name": result.arm.name, "method": result.arm.method}
        if result.failure is not None:
            return figures | {"failure": result.failure}
        figures |= {
            "is_best_of_method": bool(result.step_s),
            "selection_s_by_round": result.selection_s,
            "step_s_by_round": result.step_s,
            "pss_bytes": result.pss_bytes,
            "loss_by_rank": result.losses,
            "sum_by_rank_after_first_steps": result.first_sums,
            "sum_by_rank": result.final_sums,
        }
        if result.step_s:
            figures["step_s"] = asdict(summarise(result.step_s))
            for name, base in self.baselines().items():
                key = f"speed_against_{name.replace(' ', '_').lower()}"
                figures[key] = asdict(speed(result.step_s, base.step_s))
        return figures


def choose_best(results: Sequence[ArmResult]) -> list[ArmResult]:
    """Keep the arm of each method that was fastest in median in the selection rounds.

    A method with one arm has no such rounds, and keeps it. Arms that failed are left out.
    """
    best: dict[str, ArmResult] = {}
    for result in (one for one in results if one.failure is None):
        rival = best.setdefault(result.arm.method, result)
        if rival is not result and _selection_s(result) < _selection_s(rival):
            best[result.arm.method] = result
    return list(best.values())


def _selection_s(result: ArmResult) -> float:
    return statistics.median(result.selection_s)


def summarise(values: Sequence[float]) -> Spread:
    """Reduce the rounds' figures to a median and a spread.

    >>> summarise([1.0, 2.0, 3.0, 4.0, 10.0])
    Spread(median=3.0, lower_quartile=2.0, upper_quartile=4.0, least=1.0, most=10.0)
    """
    if len(values) == 1:
        return Spread(*(values[0],) * 5)
    lower, median, upper = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median, lower, upper, min(values), max(values))


def speed(mine_s: Sequence[float], other_s: Sequence[float]) -> Spread:
    """Compare the speeds of two arms, from their step times in the same rounds.

    >>> speed([1.0, 2.0], [2.0, 4.0]).median
    2.0
    """
    return summarise([other / mine for mine, other in zip(mine_s, other_s, strict=True)])


def table(comparison: Comparison) -> Table:
    """Lay out one comparison for people: medians, quartiles in brackets."""
    how = ", ranks started anew each round" if comparison.restarted_each_round else ""
    view = Table(title=f"{comparison.workload}, {comparison.num_ranks} ranks{how}")
    view.add_column("arm")
    baselines = comparison.baselines()
    for heading in ("step, ms", *(f"against {name}" for name in baselines), "memory, MB"):
        view.add_column(heading, justify="right")
    for result in comparison.results:
        name = result.arm.name
        if result.failure is not None:
            view.add_row(name, f"failed: {result.failure}")
            continue
        if result.step_s:
            ratios = [in_words(speed(result.step_s, base.step_s)) for base in baselines.values()]
        else:
            name, ratios = f"{name} (selection rounds)", [""] * len(baselines)
        view.add_row(
            name,
            in_words(summarise([s * 1e3 for s in result.step_s or result.selection_s])),
            *ratios,
            f"{result.pss_bytes / 1e6:.0f}",
            style="bold" if result.arm.method == "syncline" else None,
        )
    return view


def in_words(spread: Spread) -> str:
    """Write a median with its quartiles.

    >>> in_words(Spread(1.0, 0.951, 1.049, 0.5, 2.0))
    '1.00 (0.95 to 1.05)'
    """
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
