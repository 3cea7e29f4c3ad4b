"""Arrows of a Perfetto trace: from what one lane did to what another could do because of it.

There are three kinds. From one lane of a rank to its other lane, where a task waited for a task of
the other. From the rank that came last to a collective, to each rank that waited for it there. From
a call to its service by another rank, and from that to where the answer is used. An arrow joins two
slices, and the first begins before the second.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from syncline.perf.exchanges import ends_of
from syncline.perf.trace import Part, Task, TaskId

Place = tuple[int, int]
"""A slice: the place of a task in the trace, and the number of a part of it; -1 for the task."""

WHOLE = -1


@dataclass(slots=True)
class Moment:
    """A part that belongs to an exchange, as a rank has recorded it."""

    place: Place
    part: Part
    start_ns: int
    end_ns: int


@dataclass(slots=True)
class Exchange:
    """What is known of an exchange, by rank and in the order of the trace."""

    moments: defaultdict[int, list[Moment]] = field(default_factory=lambda: defaultdict(list))


class Slices:
    """When tasks and parts of a trace begin and end: whole nanoseconds from the first start on.

    What a lane does one after the other never overlaps, whatever the clock's error.
    """

    def __init__(self, tasks: Sequence[Task]) -> None:
        self.tasks = tasks
        self._begin_s = min((task.start_s for task in tasks), default=0.0)
        self.starts = [self.ns(task.start_s) for task in tasks]
        self.ends = [self.ns(task.end_s) for task in tasks]
        last: dict[int, int] = {}
        for at, task in enumerate(tasks):
            if task.lane == "compute":
                self.starts[at] = max(self.starts[at], last.get(task.rank, 0))
                self.ends[at] = last[task.rank] = max(self.starts[at], self.ends[at])

    def ns(self, at_s: float) -> int:
        """Return a time of the trace in nanoseconds from its beginning."""
        return round((at_s - self._begin_s) * 1e9)

    def parts(self, at: int) -> Iterator[tuple[int, Part, int, int]]:
        """Yield each part of a task: its number, the part, its start and its end."""
        start, end = self.starts[at], self.ends[at]
        for number, part in enumerate(self.tasks[at].parts):
            part_end = min(max(start, self.ns(part.end_s)), end)
            yield number, part, start, part_end
            start = part_end


class Flows:
    """The arrows of a trace, by number: `of` has those that begin or end at a slice."""

    def __init__(self, slices: Slices) -> None:
        self.of: defaultdict[Place, list[int]] = defaultdict(list)
        self.count = 0
        self._slices, self._tasks = slices, slices.tasks
        self._places: dict[TaskId, int] = {
            (task.rank, task.number): at for at, task in enumerate(slices.tasks)
        }
        self._between_lanes()
        for name, exchange in self._exchanges().items():
            if ">" in name:
                self._of_call(name, exchange)
            else:
                self._of_collective(exchange)

    def _join(self, causes: Iterable[Place], effect: Place, effect_ns: int) -> None:
        """Draw an arrow from the first of `causes` that begins before its effect, if any does."""
        for at, part in causes:
            if self._slices.starts[at] < effect_ns:
                self.count += 1
                self.of[at, part].append(self.count)
                self.of[effect].append(self.count)
                return

    def _between_lanes(self) -> None:
        for at, task in enumerate(self._tasks):
            known = [self._places[one] for one in task.after]
            others = [one for one in known if self._tasks[one].lane != task.lane]
            if others:
                last = max(others, key=lambda one: self._slices.ends[one])
                self._join([(last, WHOLE)], (at, WHOLE), self._slices.starts[at])

    def _exchanges(self) -> dict[str, Exchange]:
        found: defaultdict[str, Exchange] = defaultdict(Exchange)
        for at, task in enumerate(self._tasks):
            for number, part, start, end in self._slices.parts(at):
                if part.exchange:
                    moment = Moment((at, number), part, start, end)
                    found[part.exchange].moments[task.rank].append(moment)
        return found

    def _of_collective(self, exchange: Exchange) -> None:
        """Join each rank's exchange to the last one to come of those that it received from."""
        first = {
            rank: min(moments, key=lambda one: one.start_ns)
            for rank, moments in exchange.moments.items()
        }
        for rank, moments in exchange.moments.items():
            peers = moments[-1].part.peers or first
            others = [first[peer] for peer in peers if peer != rank and peer in first]
            effect = next((one for one in moments if _is_shown(one) and _moves(one)), None)
            if others and effect is not None:
                last = max(others, key=lambda one: one.start_ns)
                self._join(self._causes(last.place[0]), effect.place, effect.start_ns)

    def _of_call(self, name: str, exchange: Exchange) -> None:
        """Join a call to its service, and that to the first slice that waits for the answer."""
        caller, owner = ends_of(name)
        served = exchange.moments.get(owner)
        if served is None or caller == owner:
            return
        service = served[-1].place[0]
        service_ns = self._slices.starts[service]
        asked = exchange.moments.get(caller, [])
        sends = [one.place[0] for one in asked if one.part.kind == "send"]
        self._join(((at, WHOLE) for at in sends), (service, WHOLE), service_ns)
        for one in asked:
            at = one.place[0]
            if one.part.kind == "send":
                continue
            if self._slices.starts[at] > service_ns:
                return self._join([(service, WHOLE)], (at, WHOLE), self._slices.starts[at])
            if _is_shown(one) and one.start_ns > service_ns:
                return self._join([(service, WHOLE)], one.place, one.start_ns)

    def _causes(self, at: int) -> Iterator[Place]:
        """Yield a task, and those that it waited for last, back to the first of the rank."""
        while True:
            yield at, WHOLE
            known = [self._places[one] for one in self._tasks[at].after]
            if not known:
                return
            at = max(known, key=lambda one: self._slices.ends[one])


def _is_shown(moment: Moment) -> bool:
    return moment.end_ns > moment.start_ns


def _moves(moment: Moment) -> bool:
    return moment.part.kind != "wait"
