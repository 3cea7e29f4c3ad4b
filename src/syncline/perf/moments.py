"""Moments: when something in a run began or ended, each after at most two earlier ones.

A moment comes at the latest of the moments before it, plus a cost. Waiting is no cost: it is what
the maximum gives. So a run with other costs is one pass over the moments, and costs alone are
edited. With `m` moments, in this order, and `a`, `b` those before moment i:

    time[i] = max(time[a[i]], time[b[i]]) + cost[i]

Moment 0 is the beginning.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

CLASSES = (
    "between",
    "forward",
    "backward",
    "input",
    "pause",
    "evaluate",
    "checkpoint",
    "whole",
    "report",
    "submit",
    "update",
    "wire",
    "latency",
    "messages",
    "inside",
    "sum",
    "copy",
    "work",
)
"""What a cost is spent on. "between" is time whose cause is not in the trace; "inside" an exchange
inside a machine, in its memory; "messages" the processor's time to handle messages; "work" code of
the strategy and of the engine. The others are named as in a trace."""

NUMBER = {name: number for number, name in enumerate(CLASSES)}


@dataclass(frozen=True)
class Moments:
    """Moments in an order in which each comes after those that it depends on."""

    first: list[int]
    second: list[int]
    """The two before each; twice the same if there is one."""
    cost_s: Floats
    classes: Ints
    """By moment: the number of its cost's class."""
    tasks: Ints
    """By moment: the place of its task in the trace; -1 if it belongs to none."""

    @cached_property
    def costs(self) -> list[float]:
        """The costs as a list, which Python reads faster than an array."""
        found: list[float] = self.cost_s.tolist()
        return found

    def times_s(self, cost_s: Floats | None = None) -> Floats:
        """Return when each moment comes, with these costs instead of its own."""
        costs = self.costs if cost_s is None else cost_s.tolist()
        rows = zip(self.first, self.second, costs, strict=True)
        _, _, begin_s = next(rows)
        times = [begin_s]
        append = times.append
        for one, other, cost in rows:
            sooner, later = times[one], times[other]
            append((sooner if sooner > later else later) + cost)
        return np.array(times)

    def latest_s(self, times_s: Floats, end_s: float, cost_s: Floats | None = None) -> Floats:
        """Return how late each moment may come without the run ending after `end_s`."""
        costs = self.costs if cost_s is None else cost_s.tolist()
        latest = [end_s] * len(costs)
        for at in range(len(costs) - 1, 0, -1):
            before_s = latest[at] - costs[at]
            one, other = self.first[at], self.second[at]
            if before_s < latest[one]:
                latest[one] = before_s
            if before_s < latest[other]:
                latest[other] = before_s
        return np.maximum(np.array(latest), times_s)  # equal, up to rounding, on the longest path


class CycleError(ValueError):
    """Moments that wait for each other."""


class Builder:
    """Collects moments in any order, with any number before each."""

    def __init__(self, begin_s: float) -> None:
        """Moment 0 is at `begin_s`."""
        self.time_s = [begin_s]
        self.classes = [0]
        self.tasks = [-1]
        self.before: list[list[int]] = [[]]

    def add(self, time_s: float, kind: int = 0, task: int = -1, before: Iterable[int] = ()) -> int:
        """Add a moment that was recorded at a time; what is left of it is a cost of a class."""
        self.time_s.append(time_s)
        self.classes.append(kind)
        self.tasks.append(task)
        self.before.append(list(before))
        return len(self.time_s) - 1

    def build(self) -> tuple[Moments, list[int]]:
        """Return the moments in order, and by number of a moment here its place there."""
        places = [-1] * len(self.time_s)
        flat = _Flat()
        for number in self._in_order():
            places[number] = self._put(flat, number, places)
        moments = Moments(
            flat.first,
            flat.second,
            np.array(flat.costs),
            np.array(flat.classes, dtype=np.int64),
            np.array(flat.tasks, dtype=np.int64),
        )
        return moments, places

    def _put(self, flat: _Flat, number: int, places: list[int]) -> int:
        """Add one moment, and maxima for all but two of those before it; return its place."""
        time_s, known = self.time_s, self.before[number]
        if number == 0:
            return flat.add(0, 0, time_s[0], 0, -1)
        before = list(dict.fromkeys(places[one] for one in known)) or [0]
        cost = time_s[number] - max([time_s[one] for one in known], default=time_s[0])
        while len(before) > 2:
            both = flat.add(before[0], before[1], 0.0, 0, self.tasks[number])
            before = [both, *before[2:]]
        if cost == 0.0 and len(before) == 1:
            return before[0]
        # Less than nothing: clocks differ by as much. That is no cost of its class.
        kind = self.classes[number] if cost > 0.0 else 0
        return flat.add(before[0], before[-1], cost, kind, self.tasks[number])

    def _in_order(self) -> Iterable[int]:
        """Yield all moments, each after those before it."""
        later: list[list[int]] = [[] for _ in self.before]
        missing = [len(known) for known in self.before]
        for number, known in enumerate(self.before):
            for one in known:
                later[one].append(number)
        ready = deque(number for number, count in enumerate(missing) if not count)
        num_done = 0
        while ready:
            number = ready.popleft()
            num_done += 1
            yield number
            for one in later[number]:
                missing[one] -= 1
                if not missing[one]:
                    ready.append(one)
        if num_done < len(missing):
            raise CycleError(f"{len(missing) - num_done} moments wait for each other")


class _Flat:
    """The lists of `Moments`, while they grow."""

    def __init__(self) -> None:
        self.first: list[int] = []
        self.second: list[int] = []
        self.costs: list[float] = []
        self.classes: list[int] = []
        self.tasks: list[int] = []

    def add(self, one: int, other: int, cost: float, kind: int, task: int) -> int:
        self.first.append(one)
        self.second.append(other)
        self.costs.append(cost)
        self.classes.append(kind)
        self.tasks.append(task)
        return len(self.first) - 1
