"""The numbers of a comparison: what points.csv and summary.json hold (docs/compare.md).

Made from the files of cells alone, in the order of the study: they do not depend on which run ended
first. No torch here.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from syncline.compare import winners
from syncline.compare.cell import Found, Point
from syncline.compare.curves import ends_at, spread, time_to
from syncline.compare.grid import Cell, Place, Plan, version
from syncline.compare.study import TUNING_SEED, study_to_toml
from syncline.compare.tuning import KEYS, Trial
from syncline.config import job_to_toml
from syncline.config.words import brief

COLUMNS = (
    *("grid", "scenario", "ranks", "servers", "variant", "strategy", "batch", "seed", "cell"),
    *("point", *Point.__struct_fields__),
)
_OPTIMIZER = ("lr", "momentum", "nesterov", "weight_decay")
FAIR = (
    "Every run computes on the same number of samples over all ranks, whoever computes them, and is"
    " evaluated at the same numbers of samples on all test samples. Evaluating takes no time. For"
    " each strategy, number of ranks and grid the same number of settings was tried."
)
TARGET = (
    "Time to target: when the accuracy on the test samples first reaches the target, on the"
    " straight line between two evaluations."
)


@dataclass
class Tried:
    """A search's trials at one place: their cells and what these found."""

    trials: list[Trial]
    cells: list[Cell]
    found: list[Found]
    chosen: int


@dataclass
class Results:
    """All that was found so far."""

    plan: Plan
    cells: dict[Place, dict[int, Cell]]
    """By place and seed."""
    found: dict[str, Found]
    """By a cell's ID."""
    searches: dict[tuple[str, str, int], Tried] = field(default_factory=dict)

    def of(self, place: Place) -> dict[int, Found]:
        """Return what runs at a place have found, by seed."""
        cells = self.cells.get(place, {})
        return {seed: self.found[one.id] for seed, one in cells.items() if one.id in self.found}


def points_csv(results: Results) -> str:
    """Return a row for each point of each run, as CSV."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for place in results.plan.places:
        for seed, found in results.of(place).items():
            cell = results.cells[place][seed]
            about = [place.grid.name, place.scenario.name, place.ranks, cell.servers]
            about += [place.variant.name, place.variant.strategy, cell.job.data.batch, seed]
            for number, point in enumerate(found.points):
                values = (getattr(point, name) for name in Point.__struct_fields__)
                row = ["" if one is None else one for one in values]
                writer.writerow([*about, cell.id, number, *row])
    return text.getvalue()


def summary_of(results: Results) -> dict[str, Any]:
    """Return summary.json's object."""
    plan, compare = results.plan, results.plan.compare
    places = plan.places
    wanted = len(places) * len(compare.all_seeds)
    done = [one for place in places for one in results.of(place).values()]
    first = next((one for by in results.cells.values() for one in by.values()), None)
    return {
        "format": "syncline-compare",
        "version": 1,
        "syncline": version(),
        "name": compare.name,
        "clock": plan.clock,
        "target": compare.target,
        "is_complete": len(done) == wanted,
        "cells": {
            "wanted": wanted,
            "done": len(done),
            "failed": sum(one.failed is not None for one in done),
            "missing": wanted - len(done),
        },
        "job": job_to_toml(first.job) if first else "",
        "study": study_to_toml(plan.study),
        "cluster": first.cluster.to_dict() if first else {},
        "samples": plan.samples,
        "evaluates_every": plan.evaluates_every,
        "seeds": list(compare.all_seeds),
        "tune": compare.tune,
        "rules": {"winner": winners.WORDS, "target": TARGET, "fair": FAIR},
        "tables": [_table(results, grid, name) for grid, name in _tables(places)],
        "failed": list(_failed(results, places)),
    }


def _tables(places: Sequence[Place]) -> list[tuple[str, str]]:
    return list(dict.fromkeys((one.grid.name, one.scenario.name) for one in places))


def _table(results: Results, grid: str, scenario: str) -> dict[str, Any]:
    places = [
        one for one in results.plan.places if (one.grid.name, one.scenario.name) == (grid, scenario)
    ]
    ranks = list(dict.fromkeys(one.ranks for one in places))
    return {
        "grid": grid,
        "scenario": scenario,
        "batch_rule": places[0].grid.batch_words,
        "scenario_words": places[0].scenario.words or ", ".join(places[0].scenario.set),
        "ranks": ranks,
        "variants": list(dict.fromkeys(one.variant.name for one in places)),
        "rows": [_row(results, place) for place in places],
        "winners": [
            _winner(results, [one for one in places if one.ranks == number]) for number in ranks
        ],
    }


def _winner(results: Results, places: Sequence[Place]) -> dict[str, Any]:
    target = results.plan.compare.target
    times, accuracies = {}, {}
    for place in places:
        by_seed = results.of(place)
        if by_seed and target is not None:
            times[place.variant.name] = {
                seed: time_to(one.points, target, "time_s") for seed, one in by_seed.items()
            }
        if by_seed:
            accuracies[place.variant.name] = {
                seed: ends_at(one, "accuracy") for seed, one in by_seed.items()
            }
    return {
        "ranks": places[0].ranks,
        "by_time": None if target is None else winners.by_time(times),
        "by_accuracy": winners.by_accuracy(accuracies),
    }


def _row(results: Results, place: Place) -> dict[str, Any]:
    cells, by_seed = results.cells.get(place, {}), results.of(place)
    some = next(iter(cells.values()), None)

    def over(get: Callable[[Found], float | None]) -> dict[str, Any]:
        return spread({seed: get(one) for seed, one in by_seed.items()})

    def end(name: str) -> dict[str, Any]:
        return over(lambda one: ends_at(one, name))

    def figure(name: str) -> dict[str, Any]:
        return over(lambda one: one.figures.get(name))

    at_end = ("accuracy", "loss", "test_loss", "time_s", "samples", "sent_bytes")
    computed = [n for one in by_seed.values() for n in one.rank_samples if n]
    known = ("step_s", "samples_per_s", "exposed_communication", "exposed_input")
    own = dict.fromkeys(name for one in by_seed.values() for name in one.figures)
    return {
        "ranks": place.ranks,
        "variant": place.variant.name,
        "strategy": place.variant.strategy,
        "servers": some.servers if some else None,
        "batch": some.job.data.batch if some else None,
        "cells": [one.id for one in cells.values()],
        "settings": _settings(some) if some else {},
        "tuning": _tuning(results, place),
        "final": {name: end(name) for name in at_end} | {"steps": end("step")},
        "to_target": _to_target(results.plan.compare.target, by_seed),
        "samples_by_rank": {
            "least": min(computed, default=None),
            "most": max(computed, default=None),
        },
        "samples_per_s": figure("samples_per_s"),
        "step_s": figure("step_s"),
        "exposed_communication": figure("exposed_communication"),
        "figures": {name: figure(name) for name in own if name not in known},
        "failed": sum(one.failed is not None for one in by_seed.values()),
    }


def _to_target(target: float | None, by_seed: Mapping[int, Found]) -> dict[str, Any] | None:
    if target is None:
        return None
    found: dict[str, Any] = {}
    for key, name in (
        *(("time_s", "time_s"), ("samples", "samples")),
        *(("steps", "step"), ("sent_bytes", "sent_bytes")),
    ):
        values = {seed: time_to(one.points, target, name) for seed, one in by_seed.items()}
        found[key] = spread(values)
    reached = sum(one is not None for one in found["samples"]["seeds"].values())
    return found | {"reached": reached, "of": len(by_seed)}


def _settings(cell: Cell) -> dict[str, Any]:
    """Return the settings of the optimizer and the strategy that a run had."""
    name, own = cell.job.strategy.name, cell.job.strategy.own
    found = {
        "optimizer.lr": cell.job.optimizer.lr,
        "optimizer.momentum": cell.job.optimizer.momentum,
    }
    found |= {f"strategy.{name}.{key}": getattr(own, key) for key in own.__struct_fields__}
    return {key: one for key, one in found.items() if one is not None}


def _tuning(results: Results, place: Place) -> dict[str, Any] | None:
    search = results.searches.get(place.tuned_at)
    if search is None:
        return None
    target = results.plan.compare.target
    tried = [
        {
            "settings": {"optimizer.lr": cell.job.optimizer.lr},
            "words": trial.words,
            "time_to_target_s": None if target is None else time_to(found.points, target, "time_s"),
            "accuracy": ends_at(found, "accuracy"),
            "cell": cell.id,
            "is_chosen": number == search.chosen,
        }
        for number, (trial, cell, found) in enumerate(
            zip(search.trials, search.cells, search.found, strict=True)
        )
    ]
    scenario = search.cells[0].scenario
    return {"tried": tried, "scenario": scenario, "seed": TUNING_SEED, "tuned_keys": list(KEYS)}


def _failed(results: Results, places: Sequence[Place]) -> Iterator[dict[str, Any]]:
    for place in places:
        for seed, found in results.of(place).items():
            if found.failed is not None:
                yield {
                    "cell": results.cells[place][seed].id,
                    "variant": place.variant.name,
                    "ranks": place.ranks,
                    "grid": place.grid.name,
                    "scenario": place.scenario.name,
                    "seed": seed,
                    "why": brief(found.failed),
                }
