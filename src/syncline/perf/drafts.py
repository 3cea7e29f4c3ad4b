"""A trace's tasks as moments: when each task and each of its parts begins and ends.

`lanes.py` adds what ties a rank's tasks together, `exchanges.py` what ties ranks together.
"""

from __future__ import annotations

import tomllib
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property

from syncline.perf.moments import NUMBER, Builder
from syncline.perf.trace import Part, Task, TaskId, Trace

HOOKS = frozenset(("reduce", "step", "gather", "clip", "check"))
"""Tasks that the comm lane runs in the order in which the compute lane hands them over."""

_MOST_RANKS = 1 << 20
_BETWEEN, _WORK = NUMBER["between"], NUMBER["work"]
_CLASS_OF_KIND = NUMBER | {"split": NUMBER["backward"], "wait": _BETWEEN, "lane": _BETWEEN}
"""By kind of a task of the compute lane or of a part; what is not here is work. Waits cost nothing:
what they lasted beyond what they waited for has no known cause."""


def class_of_task(task: Task) -> int:
    """Return the class of the time that a task of the compute lane takes."""
    return _CLASS_OF_KIND.get(task.kind, _WORK)


@dataclass(slots=True)
class Asked:
    """What the caller of a call has recorded of its wait for the answer."""

    start: int
    """The moment at which it began to wait."""
    start_s: float
    parts: list[Part]
    end: int = -1


@dataclass(slots=True)
class Call:
    """A call to another rank, as far as the trace has it."""

    sent: int = -1
    asked: Asked | None = None
    served: int = -1
    """The place of its task `serve`."""


@dataclass(slots=True)
class Exchange:
    """A collective: the moment at which each rank came, and moments that had to wait for all."""

    came: dict[int, int] = field(default_factory=dict)
    waits: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    """Each with the ranks that it waited for; none for all of them."""


@dataclass(slots=True)
class Turn:
    """A time in which a rank's comm lane did one thing: served a call, or updated."""

    start_s: float
    end_s: float
    start: int
    end: int


class Draft:
    """The moments of a trace, while they are put together."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.tasks = trace.tasks
        begin_s = min((task.start_s for task in trace.tasks), default=0.0)
        self.builder = Builder(begin_s)
        self.place = {(task.rank, task.number): at for at, task in enumerate(trace.tasks)}
        self.starts: list[int] = []
        self.ends: list[int] = []
        """By task: the moments when it begins and ends."""
        self.exchanges: defaultdict[str, Exchange] = defaultdict(Exchange)
        self.calls: defaultdict[str, Call] = defaultdict(Call)
        self.turns: defaultdict[int, list[Turn]] = defaultdict(list)
        """By rank."""
        self.until_served: list[tuple[int, str]] = []
        """Moments at which a wait ended because a call had been served, and the call's id."""
        self.has_calls_without_id = False
        self._near: dict[str, bool] = {}
        for at, task in enumerate(trace.tasks):
            self._add(at, task)

    @cached_property
    def machine_of(self) -> dict[int, int]:
        machines = self.trace.header.machines
        return {rank: number for number, ranks in enumerate(machines) for rank in ranks}

    @cached_property
    def ahead(self) -> int:
        """How many loaders read batches ahead of use, on each rank; 0 if they are read in line."""
        try:
            data = tomllib.loads(self.trace.header.job).get("data", {})
            return max(1, int(data.get("workers", 0))) if int(data.get("prefetch", 0)) else 0
        except (ValueError, TypeError, AttributeError):
            return 0  # a trace without a job, or with prefetch = "auto"

    def is_near(self, one: int, other: int) -> bool:
        """Say whether two ranks are on one machine."""
        machine_of = self.machine_of
        return one in machine_of and machine_of[one] == machine_of.get(other)

    def end_of(self, task: TaskId) -> int:
        """Return the moment when a task ends."""
        return self.ends[self.place[task]]

    def _add(self, at: int, task: Task) -> None:
        start = self.builder.add(task.start_s, _BETWEEN, at)
        self.starts.append(start)
        if task.parts:
            self.ends.append(self._add_parts(at, task, start))
            return
        kind = class_of_task(task) if task.lane == "compute" else _WORK
        self.ends.append(self.builder.add(task.end_s, kind, at, [start]))

    def _add_parts(self, at: int, task: Task, start: int) -> int:
        """Add the moments at which a task's parts end; return the last."""
        here, asked, asked_for = start, None, ""
        for part, start_s in task.spans():
            name = part.exchange
            if asked is not None and name != asked_for:
                here, asked = self._end_asked(at, asked), None
            if not name:
                here = self._add_plain(at, task, part, start_s, here)
            elif ">" not in name:
                here = self._add_collective(at, task, part, here)
            elif part.kind == "send":
                here = self.builder.add(part.end_s, _WORK, at, [here])
                self.calls[name].sent = here
            elif part.kind == "answer":
                here = self.builder.add(part.end_s, _WORK, at, [here])
                self.calls[name].served = at
                self.turns[task.rank].append(Turn(task.start_s, task.end_s, self.starts[at], here))
            elif part.peers:
                if asked is None:
                    asked, asked_for = Asked(here, start_s, []), name
                    self.calls[name].asked = asked
                asked.parts.append(part)
            else:
                here = self.builder.add(part.end_s, _BETWEEN, at, [here])
                self.until_served.append((here, name))
        return here if asked is None else self._end_asked(at, asked)

    def _end_asked(self, at: int, asked: Asked) -> int:
        asked.end = self.builder.add(asked.parts[-1].end_s, _BETWEEN, at)
        return asked.end

    def _add_plain(self, at: int, task: Task, part: Part, start_s: float, here: int) -> int:
        """Add the end of a part that belongs to no exchange."""
        end = self.builder.add(part.end_s, _CLASS_OF_KIND.get(part.kind, _WORK), at, [here])
        self.has_calls_without_id |= part.kind == "wire"
        if part.kind == "update" and task.kind != "serve" and part.end_s > start_s:
            self.turns[task.rank].append(Turn(start_s, part.end_s, end, end))
        return end

    def _add_collective(self, at: int, task: Task, part: Part, here: int) -> int:
        """Add the end of a part of a collective."""
        exchange, is_first = self.exchanges[part.exchange], False
        if task.rank not in exchange.came:
            exchange.came[task.rank], is_first = here, True
        kind = _CLASS_OF_KIND.get(part.kind, _WORK)
        if part.kind in ("wire", "latency") and self._is_inside(part.exchange):
            kind = NUMBER["inside"]
        end = self.builder.add(part.end_s, kind, at, [here])
        if is_first and part.kind != "send":
            exchange.waits.append((end, part.peers))
        return end

    def _is_inside(self, exchange: str) -> bool:
        """Say whether all ranks of a collective are on one machine."""
        group = exchange.rpartition(".")[0]
        if group not in self._near:
            machines = {self.machine_of.get(rank, -1) for rank in ranks_of(group)}
            self._near[group] = len(machines) == 1 and machines != {-1}
        return self._near[group]


def ranks_of(group: str) -> list[int]:
    """Return the ranks that a group's name lists; none, if it is no such name.

    >>> ranks_of("0-2,5#2")
    [0, 1, 2, 5]
    """
    found: list[int] = []
    for piece in group.partition("#")[0].split(","):
        low, _, high = piece.partition("-")
        if not (low.isdecimal() and (high or low).isdecimal()):
            return []
        if int(high or low) - int(low) > _MOST_RANKS:
            return []
        found += range(int(low), int(high or low) + 1)
    return found
