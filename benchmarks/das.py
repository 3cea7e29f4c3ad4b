"""Five published speed-ups of Das et al. 2016, predicted: `python -m benchmarks.das`.

"Distributed Deep Learning Using Synchronous Stochastic Gradient Descent" (arXiv 1602.06709) says in
its abstract how many times as fast as one node several clusters train. Each is predicted on the
virtual clock from one file of constants (`das_constants.py`), against one node that computes the
same batch. Linear layers are split over groups of nodes; how many groups, the paper's rule says:
the number with the fewest bytes.

All of it twice: with exchanges in the paper's order, as far as it is known, and in Syncline's own,
which gathers after backward. Beside it: the number of groups with the shortest step, linear layers
not split at all, split over all nodes, and two null predictors: linear scaling, and free
communication. All constants are drawn from their ranges: the prediction is the median of the draws,
and the interval holds 90 % of them, widened by what the simulator leaves out; that of the paper's
order holds draws of both orders. Exit status 1 if a goal is missed in the paper's order.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.das_constants import CD_DNN_BATCHES, CONSTANTS, ROWS, Row
from benchmarks.das_model import (
    VALUES,
    AsPublished,
    Values,
    alone_s,
    free_speed_up,
    groups_of,
    speed_up,
    step_s,
)
from syncline.sim.interval import MODEL
from syncline.strategies import Hybrid

Draws = Sequence[Sequence[float]]
"""Speed-ups of all rows, by draw."""
SEED = 0
WITHIN = (0.10, 0.12, 0.15, 0.20, 0.25, 0.30)
ORDERS = {"paper": AsPublished, "own": Hybrid}
"""Orders of exchanges, by name. The first one is what goals are held against."""


def predict(row: Row, strategy: type[Hybrid]) -> dict[str, Any]:
    """Return what is predicted for a result, with all constants at their values."""
    groups = groups_of(row, VALUES)
    divisors = [one for one in range(1, row.nodes + 1) if row.nodes % one == 0]
    by_groups = {one: speed_up(row, VALUES, one, strategy=strategy) for one in divisors}
    fastest = max(by_groups, key=lambda one: by_groups[one])
    found = {
        "name": row.name,
        "published": row.published,
        "at_values": by_groups[groups],
        "groups": groups,
        "least_time": by_groups[fastest],
        "least_time_groups": fastest,
        "data_parallel": by_groups[row.nodes],
        "model_parallel": by_groups[1],
        "linear": float(row.nodes),
        "free": free_speed_up(row, VALUES, groups),
        "alone_s": alone_s(row, VALUES),
        "step_s": step_s(row, VALUES, groups, strategy=strategy),
    }
    for key in ("at_values", "least_time", "linear", "free"):
        found[f"{key}_error"] = found[key] / row.published - 1
    found["data_parallel_share"] = found["data_parallel"] / row.published
    return found


def draws_of(number: int, strategy: type[Hybrid], rows: Sequence[Row] = ROWS) -> Draws:
    """Return the rows' speed-ups with constants drawn evenly from their ranges."""
    source, found = random.Random(SEED), list[list[float]]()
    for _ in range(number):
        values = {name: one.at(source.random()) for name, one in CONSTANTS.items()}
        values["cd_dnn_batch"] = source.choice(CD_DNN_BATCHES)
        found.append(
            [speed_up(row, values, groups_of(row, values), strategy=strategy) for row in rows]
        )
    return found


def sensitivity() -> dict[str, list[float | None]]:
    """Return by change the change of each row, relative; None where it does not count."""
    base = [speed_up(row, VALUES, groups_of(row, VALUES)) for row in ROWS]

    def changes(predict_one: Callable[[Row], float]) -> list[float | None]:
        found = [predict_one(row) / one - 1 for row, one in zip(ROWS, base, strict=True)]
        return [None if abs(one) < 5e-4 else one for one in found]

    def with_values(values: Values, row: Row) -> float:
        return speed_up(row, values, groups_of(row, values))

    found = {}
    for name, constant in CONSTANTS.items():
        for value in (constant.low, constant.high):
            if value != constant.value:
                values = {**VALUES, name: value}
                changed = changes(functools.partial(with_values, values))
                found[f"{name} {constant.value:g} to {value:g}"] = changed
    rule = functools.partial(groups_of, values=VALUES)
    found["links carry one way at a time"] = changes(
        lambda row: speed_up(row, VALUES, rule(row), duplex="half")
    )
    found["linear layers data-parallel"] = changes(lambda row: speed_up(row, VALUES, row.nodes))
    found["linear layers model-parallel"] = changes(lambda row: speed_up(row, VALUES, 1))
    return found


def add_intervals(rows: Sequence[dict[str, Any]], draws: Draws, possible: Draws) -> None:
    """Add to each row the median of its draws, and the interval: the middle 90 % of all draws that
    are possible, widened by what the simulator leaves out (decision 34).

    A published number stands for all that are rounded to it.
    """
    columns = zip(rows, ROWS, zip(*draws, strict=True), zip(*possible, strict=True), strict=True)
    for row, known, drawn, all_drawn in columns:
        median = float(np.median(drawn))
        low, high = (float(one) for one in np.percentile(all_drawn, [5, 95]))
        down, up = (
            math.hypot(max(0.0, math.log(far)), math.log1p(MODEL))
            for far in (median / low, high / median)
        )
        low, high = median * math.exp(-down), median * math.exp(up)
        row |= {"low": low, "predicted": median, "high": high}
        row["predicted_error"] = median / known.published - 1
        row["is_inside"] = low <= known.published + known.half_unit and (
            known.published - known.half_unit <= high
        )
        row["widest"] = max(median - low, high - median) / median


def shares_of(draws: Draws) -> dict[str, float]:
    """Return the share of draws in which all rows are so near."""
    published = np.array([row.published for row in ROWS])
    worst = np.abs(np.array(draws) / published - 1).max(axis=1)
    return {f"{limit:.0%}": float((worst <= limit).mean()) for limit in WITHIN}


def goals_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Hold the rows against the goals, which were fixed beforehand."""
    errors = [abs(row["predicted_error"]) for row in rows]
    near = sum(error <= 0.12 for error in errors)
    outside = sum(not row["is_inside"] for row in rows)
    found = {
        "largest error": (max(errors), 0.25),
        "mean error": (sum(errors) / len(errors), 0.15),
        "results more than 12 % off": (len(errors) - near, 2),
        "published results outside the interval": (outside, 0),
        "widest interval, one way, of the median": (max(row["widest"] for row in rows), 0.30),
        "linear layers data-parallel, of published": (
            max(row["data_parallel_share"] for row in rows),
            0.60,
        ),
    }
    return {
        name: {"reached": reached, "at_most": most, "is_met": reached <= most}
        for name, (reached, most) in found.items()
    }


def run_all(num_draws: int) -> dict[str, Any]:
    draws = {name: draws_of(num_draws, strategy) for name, strategy in ORDERS.items()}
    # In which order the paper's queue was served is not verified; what Syncline does is known.
    possible = {"paper": [*draws["paper"], *draws["own"]], "own": draws["own"]}
    orders = {}
    for name, strategy in ORDERS.items():
        rows = [predict(row, strategy) for row in ROWS]
        add_intervals(rows, draws[name], possible[name])
        within = shares_of(draws[name])
        orders[name] = {"rows": rows, "all_within": within, "goals": goals_of(rows)}
    return {"orders": orders, "draws": num_draws, "sensitivity": sensitivity()}


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(title=title)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    return table


def tables_of(result: Mapping[str, Any]) -> list[Table]:
    found = []
    for name, order in result["orders"].items():
        found.append(_rows_table(f"speed-up against one node, {name} order", order["rows"]))
        found.append(_others_table(f"otherwise, {name} order", order["rows"]))
    names = [row["name"] for row in result["orders"]["paper"]["rows"]]
    changes = [
        (name, *("" if one is None else f"{one:+.1%}" for one in changed))
        for name, changed in result["sensitivity"].items()
    ]
    return [
        *found,
        _table("with one thing changed, paper order", ("", *names), changes),
        _shares_table(result),
        _goals_table(result["orders"]),
    ]


def _rows_table(title: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    columns = ("", "published", "predicted", "", "groups", "nine in ten", "at values", "least time")
    cells = [
        (
            *(one["name"], f"{one['published']:g}", f"{one['predicted']:.1f}"),
            *(f"{one['predicted_error']:+.0%}", f"{one['groups']}"),
            f"{one['low']:.1f} to {one['high']:.1f}",
            f"{one['at_values']:.1f} ({one['at_values_error']:+.0%})",
            f"{one['least_time']:.1f} ({one['least_time_groups']} groups)",
        )
        for one in rows
    ]
    return _table(title, columns, cells)


def _others_table(title: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    cells = [
        (
            *(one["name"], f"{one['data_parallel']:.1f}", f"{one['data_parallel_share']:.0%}"),
            f"{one['model_parallel']:.1f}",
            *(f"{one[key]:.1f} ({one[f'{key}_error']:+.0%})" for key in ("linear", "free")),
        )
        for one in rows
    ]
    return _table(title, ("", "data", "of published", "model", "linear", "free"), cells)


def _shares_table(result: Mapping[str, Any]) -> Table:
    shares = [order["all_within"] for order in result["orders"].values()]
    cells = [(limit, *(f"{one[limit]:.1%}" for one in shares)) for limit in shares[0]]
    return _table(f"{result['draws']} draws", ("all five within", *result["orders"]), cells)


def _goals_table(orders: Mapping[str, Any]) -> Table:
    cells = []
    for name in orders["paper"]["goals"]:
        both = [order["goals"][name] for order in orders.values()]
        said = [f"{one['reached']:.3g} {'met' if one['is_met'] else 'MISSED'}" for one in both]
        cells.append((name, f"{both[0]['at_most']:g}", *said))
    return _table("goals", ("", "at most", *orders), cells)


def read_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.das",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--draws", type=int, default=200, metavar="N", help="200; at least 1")
    job = parser.parse_args(arguments)
    if job.draws < 1:
        parser.error(f"--draws: got {job.draws}, but intervals need draws. Use 1 or more.")
    return job


def main(arguments: Sequence[str] | None = None) -> int:
    """Predict and print; return the exit status."""
    job = read_arguments(arguments)
    result = run_all(job.draws)
    if job.json:
        print(json.dumps(result, indent=2))
    else:
        console = Console(width=None if sys.stdout.isatty() else 150)
        for table in tables_of(result):
            console.print(table)
    return 0 if all(goal["is_met"] for goal in result["orders"]["paper"]["goals"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
