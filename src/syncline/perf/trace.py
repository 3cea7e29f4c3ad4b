"""A trace: what each rank did when, and what it had waited for. Real and virtual runs write it.

A task belongs to a rank, a lane, a kind, a bucket and a step. On the compute lane tasks follow one
another; on the comm lane several may be under way at once. `after` names the tasks whose end a
task waited for, so a trace is also a task graph with measured times (Shi et al. 2018, arXiv
1805.03812).

The file is JSON lines: a first line that names the format, then one list per task, sorted by rank
and number. Equal traces give equal bytes.
"""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from syncline.errors import ConfigError
from syncline.files import write_atomically

FORMAT = {"format": "syncline-trace", "version": 1}

TaskId = tuple[int, int]
"""A task of any rank: the rank, and the task's number there."""


class Task(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One piece of work on one lane. Times are seconds of one clock.

    `number` counts a rank's tasks from 0. `bucket` is -1 if the task belongs to no bucket.
    """

    rank: int
    number: int
    lane: str
    kind: str
    bucket: int
    step: int
    start_s: float
    end_s: float
    after: tuple[TaskId, ...] = ()

    def earlier_by(self, seconds: float) -> Task:
        """Return the same task on a clock that began `seconds` later."""
        start_s, end_s = self.start_s - seconds, self.end_s - seconds
        return msgspec.structs.replace(self, start_s=start_s, end_s=end_s)


class Recorder:
    """Collects the tasks of one rank.

    Counting and appending are atomic, so both lanes may write. The compute lane of a real run
    reports moments, not tasks: `begin_forward`, `reach` for each bucket, `begin_backward`, `leave`
    for each bucket. Each moment ends the current task, and each task comes after the previous one.
    """

    def __init__(self, rank: int, now: Callable[[], float] = time.perf_counter) -> None:
        self.rank = rank
        self.tasks: list[Task] = []
        self.last: dict[tuple[str, int], int] = {}
        """The number of the last task of a kind and bucket."""
        self._now = now
        self._numbers = itertools.count()
        self._is_forward = False
        self._bucket = -1
        self._step = 0
        self._since_s: float | None = None
        """When the compute lane's current task began; None if that is not known."""
        self._previous: tuple[TaskId, ...] = ()

    def add(
        self,
        lane: str,
        kind: str,
        bucket: int,
        step: int,
        start_s: float,
        after: tuple[TaskId, ...] = (),
    ) -> int:
        """Record a task that ends now; return its number."""
        end_s = self._now()
        number = next(self._numbers)
        self.tasks.append(Task(self.rank, number, lane, kind, bucket, step, start_s, end_s, after))
        self.last[kind, bucket] = number
        return number

    def after(self, *tasks: tuple[str, int]) -> tuple[TaskId, ...]:
        """Return this rank's last task of each kind and bucket that has one."""
        rank, last = self.rank, self.last
        return tuple([(rank, last[task]) for task in tasks if task in last])

    # Moments of the compute lane.

    def begin_forward(self) -> None:
        self._is_forward = True
        self._bucket = -1
        self._since_s = None

    def reach(self, bucket: int, step: int) -> None:
        """Note that forward uses a bucket. Using an earlier bucket again begins no new task."""
        if self._is_forward and (self._since_s is None or bucket > self._bucket):
            if bucket > self._bucket:
                self.pause()
                self._bucket, self._step = bucket, step
            self._since_s = self._now()

    def pause(self) -> None:
        """Note that the compute lane is about to wait, which does not count as forward."""
        if self._is_forward and self._since_s is not None:
            self.follow("forward", self._bucket, self._step, self._since_s)
            self._since_s = None

    def waited(self, bucket: int, step: int, start_s: float) -> None:
        """Record that the compute lane has waited until a bucket was gathered."""
        self.follow("wait", bucket, step, start_s, self.after(("gather", bucket)))
        # The time before this wait belongs to no bucket's backward: drop it.
        if self._since_s is not None:
            self._since_s = self._now()

    def begin_backward(self) -> None:
        """Note that forward is over and backward begins."""
        self.pause()
        self._is_forward = False
        self._since_s = self._now()

    def leave(self, bucket: int, step: int) -> None:
        """Note that backward has finished a bucket."""
        if not self._is_forward and self._since_s is not None:
            self.follow("backward", bucket, step, self._since_s)
            self._since_s = self._now()

    def drop_open_task(self) -> None:
        """Do not record the current task: it mixes work that cannot be told apart."""
        self._is_forward = False
        self._since_s = None

    def follow(
        self, kind: str, bucket: int, step: int, start_s: float, after: tuple[TaskId, ...] = ()
    ) -> None:
        """Record a task of the compute lane, after the lane's previous task."""
        number = self.add("compute", kind, bucket, step, start_s, (*self._previous, *after))
        self._previous = ((self.rank, number),)


class Trace(msgspec.Struct, frozen=True):
    """The tasks of all ranks."""

    tasks: tuple[Task, ...]

    def to_bytes(self) -> bytes:
        """Return the file's bytes, sorted by rank and number; floats as `repr`, without loss."""
        rows = [FORMAT, *(msgspec.structs.astuple(task) for task in self._sorted())]
        lines = (json.dumps(row, allow_nan=False, separators=(",", ":")) for row in rows)
        return "".join(f"{line}\n" for line in lines).encode()

    @classmethod
    def from_bytes(cls, data: bytes, source: str = "the trace") -> Trace:
        """Read what `to_bytes` returned. Errors name it `source`."""
        lines = data.split(b"\n")
        if _is_other(lines[0]):
            raise ConfigError(
                source, "this is no trace of ours", "its first line says what it is", _WAY_OUT
            )
        if lines.pop() != b"":
            raise _damaged(source, len(lines) + 1, "it is cut short")
        decoder = msgspec.json.Decoder(Task)
        tasks = []
        for number, line in enumerate(lines[1:], 2):
            try:
                tasks.append(decoder.decode(line))
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise _damaged(source, number, str(error)) from None
        _check(tasks, source)
        return cls(tuple(tasks))

    def write(self, path: str | Path) -> None:
        """Write a file, whole or not at all."""
        write_atomically(Path(path), self.to_bytes())

    @classmethod
    def read(cls, path: str | Path) -> Trace:
        """Read a file; raise ConfigError if it is damaged or not a trace."""
        try:
            data = Path(path).read_bytes()
        except OSError as error:
            reason = (error.strerror or type(error).__name__).lower()
            raise ConfigError(
                str(path), f"cannot be read ({reason})", "a trace is a file", _WAY_OUT
            ) from None
        return cls.from_bytes(data, str(path))

    def _sorted(self) -> list[Task]:
        return sorted(self.tasks, key=lambda task: (task.rank, task.number))


_WAY_OUT = "Give the path of a file that `syncline train --trace FILE` wrote."


def _is_other(line: bytes) -> bool:
    try:
        return bool(msgspec.json.decode(line) != FORMAT)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return True


def _check(tasks: Iterable[Task], source: str) -> None:
    """Refuse tasks that no run can have recorded."""
    tasks = list(tasks)
    known = {(task.rank, task.number) for task in tasks}
    before: TaskId = (-1, -1)
    for line, task in enumerate(tasks, 2):
        here = (task.rank, task.number)
        missing = [one for one in task.after if one not in known]
        if here <= before:
            raise _damaged(source, line, "tasks are not in order")
        if not -math.inf < task.start_s <= task.end_s < math.inf:
            raise _damaged(source, line, f"a task from {task.start_s} to {task.end_s} s")
        if missing:
            raise _damaged(source, line, f"it comes after {missing[0]}, which is not there")
        before = here


def _damaged(source: str, line: int, found: str) -> ConfigError:
    return ConfigError(
        f"{source}, line {line}",
        found,
        "a trace has one whole task in each line after the first",
        "It is damaged: write it once more.",
    )
