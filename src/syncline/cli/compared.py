"""What `syncline compare` shows: how far it is, and its tables at the end."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from syncline.cli.output import say

if TYPE_CHECKING:
    from syncline.compare.grid import Cell

_EVERY_S = 30.0
"""How often a line says how far it is, where there is no terminal."""


class Shown:
    """Shows how many runs have ended, and the time left. Starts no thread: runs are forks."""

    def __init__(self, *, is_shown: bool) -> None:
        self._is_bar = is_shown and sys.stderr.isatty()
        self._says = is_shown
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        self._bar = Progress(
            *columns,
            TextColumn("{task.fields[left]}"),
            console=Console(stderr=True),
            auto_refresh=False,
            transient=True,
            disable=not self._is_bar,
        )
        self._said_s = time.monotonic()

    def begin(self, what: str, cells: int, there: int) -> None:
        self._what, self._cells, self._done, self._there = what, cells, there, there
        self._began_s, self._seconds = time.monotonic(), list[float]()
        if self._says and not self._is_bar and cells > there:
            known = f", {there} of them are there" if there else ""
            say(f"{what}: {cells} runs{known}")
        if self._is_bar:
            self._bar.start()
            self._task = self._bar.add_task(what, total=cells, completed=there, left="")

    def ended(self, cell: Cell, seconds: float) -> None:
        self._done += 1
        self._seconds.append(seconds)
        self.tick()

    def tick(self) -> None:
        if self._is_bar:
            self._bar.update(self._task, completed=self._done, left=self._left())
            self._bar.refresh()
        elif self._says and time.monotonic() - self._said_s > _EVERY_S:
            self._said_s = time.monotonic()
            say(f"{self._what}: {self._done} of {self._cells} runs{self._left()}")

    def _left(self) -> str:
        """Return the time left in words, by the pace since the first run began."""
        ended = self._done - self._there
        if not ended:
            return ""
        left_s = (time.monotonic() - self._began_s) / ended * (self._cells - self._done)
        return (
            f", about {left_s / 60:.0f} min left"
            if left_s >= 90
            else f", about {left_s:.0f} s left"
        )

    def end(self) -> None:
        if self._is_bar:
            self._bar.stop()


def print_summary(summary: dict[str, Any], folder: Path, console: Console) -> None:
    """Print who is first by number of ranks, and what each strategy reached."""
    for table in summary["tables"]:
        console.print(f"[bold]{table['grid']}, {table['scenario']}[/bold]")
        _print_rows(summary, table, console)
        for one in table["winners"]:
            by_time = one["by_time"]
            if by_time is not None:
                console.print(f"  {one['ranks']} ranks, by time to target: {by_time['words']}")
            words = one["by_accuracy"]["words"]
            console.print(f"  {one['ranks']} ranks, by accuracy at the end: {words}")
        console.print()
    files = ("summary.json", "points.csv", "report.html")
    there = [name for name in files if os.path.exists(folder / name)]
    console.print(f"{folder}: {', '.join(there)}")


def _print_rows(summary: dict[str, Any], table: dict[str, Any], console: Console) -> None:
    target = summary["target"]
    to_target = [] if target is None else [f"s to {target:g}", "reached"]
    shown = Table("ranks", "strategy", "lr", *to_target, "accuracy", "seconds", "samples/s")
    for row in table["rows"]:
        final, reached = row["final"], row["to_target"]
        times = []
        if reached is not None:
            times = [_spread(reached["time_s"]), f"{reached['reached']} of {reached['of']}"]
        ranks = f"{row['ranks']}" + (f" + {row['servers']}" if row["servers"] else "")
        lr = row["settings"].get("optimizer.lr")
        shown.add_row(
            ranks,
            row["variant"],
            f"{lr:g}" if lr is not None else "",
            *times,
            _spread(final["accuracy"]),
            _mean(final["time_s"]),
            _mean(row["samples_per_s"]),
        )
    console.print(shown)


def _spread(one: dict[str, Any]) -> str:
    """Return a mean, and below it the least and the most."""
    if one["mean"] is None or one["least"] == one["most"]:
        return _mean(one)
    return f"{_mean(one)}\n{one['least']:.4g} to {one['most']:.4g}"


def _mean(one: dict[str, Any]) -> str:
    return "-" if one["mean"] is None else f"{one['mean']:.4g}"
