"""The folder of a comparison: what belongs into it, and the whole of it from start to end.

    study.toml      what is compared
    cells/ID.json   what each run found
    points.csv, summary.json

A folder takes more ranks, strategies, seeds, scenarios and grids of the same job: runs that it has
are not run again. Another job, cluster or number of samples is refused.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

import msgspec

from syncline.compare.cell import Found, read_cell, write_cell
from syncline.compare.grid import Cell, Plan
from syncline.compare.pool import run_cells
from syncline.compare.study import TUNING_SEED, Study, read_study, study_to_toml
from syncline.compare.tables import Results, Tried, points_csv, summary_of
from syncline.compare.tuning import best_of, trials_of
from syncline.config import printable
from syncline.config.words import shown
from syncline.errors import ConfigError
from syncline.files import explained, make_folder, remove_partials, write_atomically
from syncline.run_lock import locked

STUDY, POINTS, SUMMARY, CELLS = "study.toml", "points.csv", "summary.json", "cells"
_MAY_CHANGE = ("name", "target", "seeds", "grid", "scenario", "variant")
"""What a folder's study may change in [compare]: all else would make other runs of the old ones."""


class Progress(Protocol):
    """Is told how far a comparison is."""

    def begin(self, what: str, cells: int, there: int) -> None:
        """Runs begin: of so many cells some are there already."""

    def ended(self, cell: Cell, seconds: float) -> None:
        """A run has ended."""

    def tick(self) -> None:
        """Some time has passed."""


def check_folder(folder: Path, study: Study) -> None:
    """Refuse a folder that holds something else than runs of this study's job."""
    if not folder.exists():
        return
    if not folder.is_dir():
        rule, fix = "a comparison is a folder", "Name another folder."
        raise ConfigError("--out", f"{printable(folder)} is a file", rule, fix)
    if not (folder / STUDY).exists():
        if any(one.name != ".lock" for one in folder.iterdir()):
            found = f"{printable(folder)} holds other files and no {STUDY}"
            raise ConfigError(
                "--out", found, "a comparison has a folder of its own", "Name another."
            )
        return
    before = read_study(folder / STUDY)
    changed = _what_changed(before, study)
    if changed:
        raise ConfigError(
            "--out",
            f"{printable(folder)} holds another comparison: {changed}",
            "a folder takes more strategies, ranks, seeds and scenarios, but of the same job",
            "Name another folder.",
        )


def _what_changed(before: Study, now: Study) -> str:
    """Return what differs that may not, in words; "" if nothing does."""
    was, is_now = _flat(before), _flat(now)
    for key in sorted({*was, *is_now}):
        if was.get(key) != is_now.get(key):
            there, here = _word(was.get(key)), _word(is_now.get(key))
            return f"{printable(key)} is {there} there and {here} here"
    return ""


def _flat(study: Study) -> dict[str, Any]:
    """Return what has to stay, by dotted keys."""
    compare = study.compare
    kept = {key: getattr(compare, key) for key in compare.__struct_fields__}
    found = {f"compare.{key}": one for key, one in kept.items() if key not in _MAY_CHANGE}
    for name, table in study.tables.items():
        inside = table if isinstance(table, dict) else {"": table}
        found |= {f"{name}.{key}".rstrip("."): one for key, one in inside.items()}
    return found


def _word(value: Any) -> str:
    return "not set" if value in (None, ()) else shown(value)


class Comparison:
    """Runs what a study asks for and a folder does not have, and writes its tables."""

    def __init__(self, plan: Plan, folder: Path, run: Callable[[Cell], Found], jobs: int) -> None:
        """`run` runs a cell, in a fork; `jobs` run at the same time."""
        self.plan, self.folder, self._run, self._jobs = plan, folder, run, jobs
        self.results = Results(plan, {}, {})
        for place in plan.places:  # what can be refused is refused before anything runs
            cells = {seed: plan.cell(place, seed) for seed in plan.compare.all_seeds}
            self.results.cells[place] = cells
            for cell in cells.values():
                self._read(cell)

    def go(self, progress: Progress) -> dict[str, Any]:
        """Run all that is missing; return the summary. What was found is written in any case."""
        make_folder(self.folder)
        with locked(self.folder, "--out"):
            make_folder(self.folder / CELLS)
            remove_partials(self.folder / CELLS)
            with explained(self.folder / STUDY):
                text = study_to_toml(self.plan.study)
                write_atomically(self.folder / STUDY, text.encode())
            try:
                if self.plan.compare.tune > 1:
                    self._tune(progress)
                cells = [c for by in self.results.cells.values() for c in by.values()]
                self._run_all("comparing", cells, progress)
            finally:
                remove_partials(self.folder / CELLS)  # of runs that were ended
                summary = self._write()
            return summary

    def _tune(self, progress: Progress) -> None:
        """Try settings at each place, in its first scenario; set those that were best."""
        compare, searches = self.plan.compare, dict[tuple[str, str, int], Tried]()
        for place in self.plan.places:
            if place.tuned_at not in searches:
                job = self.results.cells[place][compare.all_seeds[0]].job
                trials = trials_of(job, place.ranks, compare.tune)
                cells = [self.plan.cell(place, TUNING_SEED, one.settings) for one in trials]
                searches[place.tuned_at] = Tried(trials, cells, [], 0)
        every = [cell for one in searches.values() for cell in one.cells]
        self._run_all("tuning", every, progress)
        for search in searches.values():
            search.found = [self.results.found[cell.id] for cell in search.cells]
            search.chosen = best_of(search.found, compare.target)
        self.results.searches = searches
        for place in self.plan.places:
            search = searches[place.tuned_at]
            settings = search.trials[search.chosen].settings
            for seed in compare.all_seeds:
                self.results.cells[place][seed] = self.plan.cell(place, seed, settings)

    def _run_all(self, what: str, cells: Iterable[Cell], progress: Progress) -> None:
        wanted = {cell.id: cell for cell in cells}
        for cell in wanted.values():
            self._read(cell)
        missing = [cell for cell in wanted.values() if cell.id not in self.results.found]
        progress.begin(what, len(wanted), len(wanted) - len(missing))
        work = functools.partial(_run_and_write, self.folder, self._run)
        for cell, seconds in run_cells(missing, work, self._jobs, progress.tick):
            self._read(cell)
            progress.ended(cell, seconds)

    def _read(self, cell: Cell) -> None:
        if (
            cell.id not in self.results.found
            and (found := read_cell(self.folder, cell)) is not None
        ):
            self.results.found[cell.id] = found

    def _write(self) -> dict[str, Any]:
        """Write points.csv and summary.json, of all runs that have ended."""
        for by_seed in self.results.cells.values():
            for cell in by_seed.values():
                self._read(cell)
        summary = summary_of(self.results)
        text = json.dumps(summary, indent=1, allow_nan=False) + "\n"
        for name, data in ((POINTS, points_csv(self.results)), (SUMMARY, text)):
            with explained(self.folder / name):
                write_atomically(self.folder / name, data.encode())
        return summary


def _run_and_write(folder: Path, run: Callable[[Cell], Found], cell: Cell) -> None:
    write_cell(folder, cell, run(cell))


def read_summary(folder: Path) -> dict[str, Any]:
    """Read summary.json of a folder."""
    path = folder / SUMMARY
    with contextlib.suppress(OSError, ValueError, RecursionError):
        found = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(found, dict) and found.get("format") == "syncline-compare":
            return found
    fix = "Run syncline compare with this folder as --out: it writes it again."
    rule = "this is the summary of a comparison"
    raise ConfigError(printable(path), "it is missing or damaged", rule, fix)


def with_job_name(study: Study, path: Path) -> Study:
    """Return the study with the name of its file, if it has none of its own."""
    if study.compare.name:
        return study
    compare = msgspec.structs.replace(study.compare, name=path.stem)
    return msgspec.structs.replace(study, compare=compare)
