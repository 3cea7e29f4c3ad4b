"""What the time of steps was spent on, from the compute lane's tasks and what its waits waited for.

A step of a rank lasts from the end of the step before to its own end, on the compute lane. Each of
the lane's tasks counts as what it is, and the time between two tasks as that. A wait is divided by
its cause: back from its end, through the moments that it came after, until it began. What
this rank's comm lane did meanwhile is exposed communication, by kind; what another rank did is
waiting for slower ranks. So each part is measured, and none is the rest of the others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from syncline.perf.graph import Timing, steps_of
from syncline.perf.moments import CLASSES

EXPOSED = ("wire", "latency", "messages", "inside", "sum", "copy", "work", "submit", "unknown")
"""Parts that are exposed communication; "unknown" is a wait whose cause is not in the trace."""
PARTS = (
    "forward",
    "backward",
    "input",
    "update",
    "waiting",
    *EXPOSED,
    "pause",
    "evaluate",
    "checkpoint",
    "whole",
    "report",
    "between",
)
"""All parts of a step. "waiting" is for slower ranks; "between" is between two tasks."""
GROUPS = {
    "computing": ("forward", "backward"),
    "input": ("input",),
    "update": ("update",),
    "exchange": EXPOSED,
    "waiting": ("waiting",),
    "other": ("pause", "evaluate", "checkpoint", "whole", "report", "between"),
}
"""Parts that a sentence puts together: each part is in one."""


@dataclass(frozen=True)
class StepParts:
    """One step of one rank."""

    rank: int
    step: int
    step_s: float
    """Measured from the end of the step before."""
    parts_s: dict[str, float]
    """By part; parts that took no time are left out."""

    @property
    def sum_s(self) -> float:
        return sum(self.parts_s.values())


@dataclass(frozen=True)
class ExchangeTimes:
    """What the comm lane did in a step, mean over ranks and steps."""

    busy_s: float
    """How long the comm lane worked on it: all but waiting for other ranks."""
    exposed_s: float
    """How much of that the compute lane waited for."""

    @property
    def hidden_s(self) -> float:
        return max(0.0, self.busy_s - self.exposed_s)


@dataclass(frozen=True)
class BucketTimes(ExchangeTimes):
    """The exchange of a bucket in a step, mean over ranks and steps."""

    bucket: int
    sent_bytes: float
    """What a rank handed to its peers."""
    kinds: dict[str, ExchangeTimes]
    """By kind of task: "reduce", "gather" and what else there was."""

    @property
    def rate_bytes_per_s(self) -> float:
        return self.sent_bytes / self.busy_s if self.busy_s else 0.0


@dataclass(frozen=True)
class Breakdown:
    """The steps of all ranks that compute."""

    steps: tuple[StepParts, ...]
    buckets: tuple[BucketTimes, ...]
    samples: int
    """Of all ranks in a step."""

    @property
    def counted(self) -> list[StepParts]:
        """The steps that means are over: all but the first, which includes set-up."""
        first = min((one.step for one in self.steps), default=0)
        return [one for one in self.steps if one.step > first] or list(self.steps)

    @property
    def step_s(self) -> float:
        """The mean time of a step."""
        return sum(one.step_s for one in self.counted) / max(1, len(self.counted))

    @property
    def parts_s(self) -> dict[str, float]:
        """The mean of each part, in the order of `PARTS`."""
        counted = self.counted
        return {
            name: sum(one.parts_s.get(name, 0.0) for one in counted) / max(1, len(counted))
            for name in PARTS
        }

    @property
    def shares(self) -> dict[str, float]:
        """The mean of each part, as a share of the step."""
        whole_s = self.step_s or 1.0
        return {name: seconds / whole_s for name, seconds in self.parts_s.items()}

    @property
    def groups_s(self) -> dict[str, float]:
        """The mean of each group of parts, in the order of `GROUPS`."""
        parts = self.parts_s
        return {group: sum(parts[name] for name in names) for group, names in GROUPS.items()}

    @property
    def exposed_s(self) -> float:
        """The mean of exposed communication, without waiting for slower ranks."""
        return self.groups_s["exchange"]

    @property
    def exchange_s(self) -> float:
        """How long the comm lane worked on buckets in a step, mean over ranks and steps."""
        return sum(one.busy_s for one in self.buckets)

    @property
    def hidden(self) -> float:
        """The share of that for which no compute lane waited; 1 if nothing was exchanged."""
        hidden_s = sum(one.hidden_s for one in self.buckets)
        return hidden_s / self.exchange_s if self.exchange_s else 1.0

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.step_s if self.step_s else 0.0


def break_down(timing: Timing) -> Breakdown:
    """Return what steps were spent on."""
    found = _Collected(timing)
    graph = timing.graph
    samples = graph.header.shards * graph.header.samples
    return Breakdown(tuple(found.steps), tuple(_buckets(found)), samples)


class _Collected:
    """Goes through all compute lanes, and keeps what it finds."""

    def __init__(self, timing: Timing) -> None:
        self.graph, self.times_s = timing.graph, timing.times_s.tolist()
        self._ranks = self.graph.ranks.tolist()
        self._classes = self.graph.moments.classes.tolist()
        self.exposed_s: defaultdict[int, float] = defaultdict(float)
        """By task of the comm lane: how long its own rank's compute lane waited for it."""
        self.steps = [step for places in self._lanes() for step in self._steps(places)]

    def _lanes(self) -> Iterator[list[int]]:
        """Yield the places of each compute lane's tasks, up to the end of the last step."""
        lanes: dict[int, list[int]] = defaultdict(list)
        for at, task in enumerate(self.graph.tasks):
            if task.lane == "compute":
                lanes[task.rank].append(at)
        for places in lanes.values():
            yield list(steps_of(self.graph.tasks, places))

    def _steps(self, places: list[int]) -> Iterator[StepParts]:
        graph, times_s = self.graph, self.times_s
        by_step: dict[int, list[int]] = defaultdict(list)
        for at in places:
            by_step[graph.tasks[at].step].append(at)
        before_s = None
        for step, mine in by_step.items():
            start_s = times_s[graph.starts[mine[0]]] if before_s is None else before_s
            parts = self._parts(mine, start_s)
            before_s = times_s[graph.ends[mine[-1]]]
            rank = graph.tasks[mine[0]].rank
            yield StepParts(rank, step, before_s - start_s, dict(parts))

    def _parts(self, places: list[int], here_s: float) -> defaultdict[str, float]:
        """Return what a step's tasks, and the time between them, were spent on."""
        parts: defaultdict[str, float] = defaultdict(float)
        for at in places:
            start_s = self.times_s[self.graph.starts[at]]
            end_s = self.times_s[self.graph.ends[at]]
            if start_s != here_s:
                parts["between"] += start_s - here_s
            kind = self.graph.tasks[at].kind
            if kind == "wait":
                self._divide(at, start_s, parts)
            elif end_s > start_s:
                parts[_part_of(kind)] += end_s - start_s
            here_s = end_s
        return parts

    def _divide(self, at: int, start_s: float, parts: defaultdict[str, float]) -> None:
        """Divide a wait by its cause, back from its end.

        What this rank's lanes did comes first. Where they waited for another rank, that lasts from
        the moment when they had come to it; moments to go on from are `spare` until then.
        """
        times_s, rank = self.times_s, self.graph.tasks[at].rank
        here, spare = self.graph.ends[at], list[int]()
        here_s = times_s[here]
        while here_s > start_s and here:
            before = self._before(here, rank, spare)
            is_own = self._ranks[here] == rank
            if not is_own:
                before = max([before, *spare], key=times_s.__getitem__)
            before_s = max(start_s, times_s[before])
            if here_s != before_s:
                self._count(here, here_s - before_s, parts, is_own=is_own)
            here, here_s = before, before_s
            spare = [one for one in spare if one != here and times_s[one] <= here_s]

    def _before(self, here: int, rank: int, spare: list[int]) -> int:
        """Return the later of the two moments before; the other may be one to go on from."""
        moments, times_s = self.graph.moments, self.times_s
        later, sooner = moments.first[here], moments.second[here]
        if (times_s[later], self._ranks[later] == rank) < (
            times_s[sooner],
            self._ranks[sooner] == rank,
        ):
            later, sooner = sooner, later
        if later != sooner and self._ranks[sooner] == rank:
            spare.append(sooner)
        return later

    def _count(
        self, here: int, seconds: float, parts: defaultdict[str, float], *, is_own: bool
    ) -> None:
        """Count a piece of a wait, which ends with a moment."""
        if not is_own:
            parts["waiting"] += seconds
            return
        name = CLASSES[self._classes[here]]
        parts["unknown" if name == "between" else name] += seconds
        self.exposed_s[int(self.graph.moments.tasks[here])] += seconds


def _part_of(kind: str) -> str:
    if kind == "split":
        return "backward"
    return kind if kind in PARTS else "work"


def _buckets(found: _Collected) -> Iterator[BucketTimes]:
    """Yield the exchange of each bucket."""
    kinds: defaultdict[int, defaultdict[str, list[float]]] = defaultdict(
        lambda: defaultdict(lambda: [0.0, 0.0])
    )
    sent: defaultdict[int, int] = defaultdict(int)
    for at, task in enumerate(found.graph.tasks):
        if task.lane != "compute" and task.bucket >= 0:
            times = kinds[task.bucket][task.kind]
            times[0] += sum(
                part.end_s - start_s
                for part, start_s in task.spans()
                if part.kind not in ("wait", "lane")
            )
            times[1] += found.exposed_s[at]
            sent[task.bucket] += sum(part.num_bytes for part in task.parts)
    num_steps = max(1, len(found.steps))
    for bucket, of_kinds in sorted(kinds.items()):
        busy_s, exposed_s = (sum(one[at] for one in of_kinds.values()) for at in (0, 1))
        each = {
            kind: ExchangeTimes(times[0] / num_steps, times[1] / num_steps)
            for kind, times in sorted(of_kinds.items())
        }
        yield BucketTimes(
            busy_s / num_steps, exposed_s / num_steps, bucket, sent[bucket] / num_steps, each
        )
