"""What rank 0 shows while it trains: a live bar on a terminal, plain lines elsewhere.

The training loop calls `step` after every step, which is cheap: a call too soon after the last
line or refresh returns after one look at the clock. Nothing here starts a thread.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any, Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as RichProgress
from rich.text import Text

from syncline.config import Job

_BAR_EVERY_S = 0.2
"""A moving bar looks smooth at five pictures a second; more would only take time."""
_LINE_EVERY_S = 5.0
"""In a file a line stays: twelve a minute show progress and keep the log short."""


class HasJson(Protocol):
    """A result that can be written as JSON."""

    def to_json_dict(self) -> dict[str, Any]: ...


class Progress(Protocol):
    """What a training loop reports. What is exposed is a share of time, 0 to 1."""

    def start(self, job: Job, plan_lines: list[str]) -> None: ...

    def step(
        self,
        step: int,
        total: int,
        loss: float,
        samples_per_s: float,
        exposed_communication: float,
        exposed_input: float = 0.0,
    ) -> None: ...

    def evaluated(self, step: int, loss: float, accuracy: float | None) -> None: ...

    def note(self, line: str) -> None: ...

    def finish(self, summary: HasJson) -> None: ...

    def close(self) -> None:
        """Restore the terminal. Call it also after an error; a second call does nothing."""


def progress_for(rank: int, stream: TextIO) -> Progress:
    """Return the progress display of this rank: only rank 0 shows anything."""
    if rank != 0:
        return SilentProgress()
    return BarProgress(stream) if stream.isatty() else LineProgress(stream)


class SilentProgress:
    """Shows nothing."""

    def start(self, job: Job, plan_lines: list[str]) -> None: ...

    def step(
        self,
        step: int,
        total: int,
        loss: float,
        samples_per_s: float,
        exposed_communication: float,
        exposed_input: float = 0.0,
    ) -> None: ...

    def evaluated(self, step: int, loss: float, accuracy: float | None) -> None: ...

    def note(self, line: str) -> None: ...

    def finish(self, summary: HasJson) -> None: ...

    def close(self) -> None: ...


class LineProgress:
    """Plain lines: for the first step, the last, and one every few seconds in between."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._pace = _Pace(clock)
        self._next_s = -float("inf")

    def start(self, job: Job, plan_lines: list[str]) -> None:
        for line in (headline(job), *plan_lines):
            self.note(line)

    def step(
        self,
        step: int,
        total: int,
        loss: float,
        samples_per_s: float,
        exposed_communication: float,
        exposed_input: float = 0.0,
    ) -> None:
        self._pace.first_step(step)
        now_s = self._clock()
        if now_s < self._next_s and step != total:
            return
        self._next_s = now_s + _LINE_EVERY_S
        exposed = f"{exposed_communication:.0%} exposed communication"
        figures = _figures(loss, samples_per_s, exposed, exposed_input)
        left = self._pace.time_left(step, total)
        self.note(f"step {step}/{total}  {figures}" + (f"  {left} left" if left else ""))

    def evaluated(self, step: int, loss: float, accuracy: float | None) -> None:
        self.note(evaluation_line(step, loss, accuracy))

    def note(self, line: str) -> None:
        # The log may be on a disk that is full, or its reader gone: the run goes on without it.
        with contextlib.suppress(OSError):
            print(line, file=self._stream, flush=True)

    def finish(self, summary: HasJson) -> None: ...

    def close(self) -> None: ...


class BarProgress:
    """A live bar at the bottom of the terminal; notes and evaluations scroll above it."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = Console(file=stream, highlight=False)
        self._clock = clock
        self._pace = _Pace(clock)
        self._next_s = -float("inf")
        self._bar = RichProgress(
            BarColumn(bar_width=24),
            TextColumn("step {task.completed}/{task.total}"),
            TextColumn("{task.fields[figures]}"),
            TextColumn("{task.fields[left]}", style="cyan"),
            console=self._console,
            auto_refresh=False,
        )
        self._is_open = False

    def start(self, job: Job, plan_lines: list[str]) -> None:
        self._console.print(Text(headline(job), style="bold"))
        for line in plan_lines:
            self.note(line)

    def step(
        self,
        step: int,
        total: int,
        loss: float,
        samples_per_s: float,
        exposed_communication: float,
        exposed_input: float = 0.0,
    ) -> None:
        self._pace.first_step(step)
        now_s = self._clock()
        if now_s < self._next_s and step != total:
            return
        self._next_s = now_s + _BAR_EVERY_S
        if not self._is_open:
            self._open(total)
        left = self._pace.time_left(step, total)
        exposed = f"{exposed_communication:.0%} exposed"
        self._bar.update(
            self._task,
            completed=step,
            total=total,
            figures=_figures(loss, samples_per_s, exposed, exposed_input),
            left=f"{left} left" if left else "",
        )
        self._bar.refresh()

    def evaluated(self, step: int, loss: float, accuracy: float | None) -> None:
        self.note(evaluation_line(step, loss, accuracy))

    def note(self, line: str) -> None:
        self._console.print(Text(line))

    def finish(self, summary: HasJson) -> None:
        self.close()

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._bar.stop()

    def _open(self, total: int) -> None:
        self._task = self._bar.add_task("", total=total, figures="", left="")
        self._bar.start()
        # rich hides the cursor, and a killed rank could not show it again: show it now.
        self._console.show_cursor(True)
        self._is_open = True


class _Pace:
    """Estimates the time left from this process's steps only: a resumed run begins at step > 0."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._first: tuple[int, float] | None = None

    def first_step(self, step: int) -> None:
        if self._first is None:
            self._first = (step, self._clock())

    def time_left(self, step: int, total: int) -> str:
        assert self._first is not None, "first_step comes before time_left"
        first, began_s = self._first
        if step <= first or step >= total:
            return ""
        return duration((self._clock() - began_s) / (step - first) * (total - step))


def headline(job: Job) -> str:
    """Return one line that says what is trained, on which data and how."""
    ranks, shards = job.run.ranks, job.strategy.shards or job.run.ranks
    return (
        f"{job.model.name} on {job.data.name}: {job.strategy.name}, {_count(ranks, 'rank')},"
        f" {_count(shards, 'shard')}, batch {job.data.batch}"
    )


def evaluation_line(step: int, loss: float, accuracy: float | None) -> str:
    """Return the progress line of an evaluation."""
    right = "" if accuracy is None else f"  accuracy {accuracy:.2%}"
    return f"evaluated at step {step}:  loss {loss:.4f}{right}"


def duration(seconds: float) -> str:
    """Return a time span in short form: 41s, 3m 20s, 2h 05m."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    return f"{whole // 3600}h {whole % 3600 // 60:02d}m"


def _figures(loss: float, samples_per_s: float, exposed: str, exposed_input: float) -> str:
    """Return the figures of a step; waiting for input is shown where it takes a per cent."""
    rate = f"{samples_per_s:,.0f}" if samples_per_s >= 10 else f"{samples_per_s:.1f}"
    waiting = f"  {exposed_input:.0%} waiting for input" if exposed_input >= 0.005 else ""
    return f"loss {loss:.4f}  {rate} samples/s  {exposed}{waiting}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
