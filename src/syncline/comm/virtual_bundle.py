"""Calls to the owners of many strips, as rows of arrays, for simulations of sizes.

With N ranks that call each other there are N^2 calls for each bucket and step, too many for Python
code for each. A rank's calls to all owners are a bundle. Each call of it takes its own way, as a
single call does (`virtual_window.py`): it leaves the caller when the messages before it have left,
takes its share of links (`fast_link.py`), is served after what came to its owner's comm lane
before, and its answer takes its share of links again. All calls that arrive before links change
their rates are looked at together. The caller waits for all of them anyway.

The functions are not run (`window.Counted`): an owner's first call tells how long each takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from syncline.comm.traffic import Traffic
from syncline.comm.virtual_trip import Trip
from syncline.comm.window import Call
from syncline.virtual.clock import Clock, Signal
from syncline.virtual.fast_link import FastLinks

if TYPE_CHECKING:
    from syncline.comm.virtual import VirtualWorld


Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


NOBODY: Ints = np.zeros(0, dtype=np.int64)


class Bundle:
    """A bundle under way."""

    trip: Trip
    first: int
    """The place of its first call."""

    def __init__(
        self,
        clock: Clock,
        why: Callable[[], str],
        traffic: Traffic,
        call_of: Callable[[int], Call],
    ) -> None:
        """`call_of` returns the call for a target, to see how long it takes."""
        self.done = Signal(clock)
        self._why = why
        self._traffic = traffic
        self.call_of = call_of
        self.copy_back: Callable[[], None] = lambda: None
        """Copies the answers of other machines to the caller's device, if it has one."""
        self.results: Sequence[int | None] = ()

    def wait(self) -> Sequence[int | None]:
        self.done.wait(self._why)
        self._traffic.spent("wire")
        self.copy_back()
        return self.results


class Calls:
    """All bundled calls of a world that are under way, and the lanes on which they are served.

    Rows are numbered as the places of `links`. A rank's own work waits for the call that is being
    served, not for those behind it, which wait for the work: as in `Turns`.
    """

    def __init__(self, world: VirtualWorld, links: FastLinks, num_ranks: int) -> None:
        self._world = world
        self._clock = world.clock
        self._links = links
        links.on_ends, links.first_wanted = self._end, self._first_over
        machines = range(world.cluster.machines)
        out, into = world.ways
        self.outs: Ints = np.array([links.number((out, machine)) for machine in machines])
        self.ins: Ints = np.array([links.number((into, machine)) for machine in machines])
        self.until_s = np.zeros(num_ranks)
        """By rank: when the lane has done all that has come to it."""
        self._booked: list[list[Ints]] = [[] for _ in range(num_ranks)]
        """By rank: calls that have come since its lane was idle."""
        self._counts = np.zeros(0, dtype=np.int64)
        """How many calls were served: by window, function and rank."""
        self._bundles: list[Bundle | None] = []
        self._num_left = np.zeros(0, dtype=np.int64)
        """By bundle."""
        self._free: list[int] = []
        # By call.
        self._bundle = np.zeros(0, dtype=np.int64)
        self._owner = np.zeros(0, dtype=np.int64)
        self._counter = np.zeros(0, dtype=np.int64)
        self._seconds = np.zeros(0)
        self._latency_s = np.zeros(0)
        self._begin_s = np.zeros(0)
        """When the owner begins to serve it."""
        self._back = np.zeros((2, 0), dtype=np.int64)
        self._stream_back = np.zeros(0, dtype=np.int64)
        self._num_bytes = np.zeros(0)
        self._result = np.zeros(0, dtype=np.int64)
        """0 until it has been served, -1 if the owner has died."""

    def counters(self) -> int:
        """Return the first of new counters, one for each rank."""
        first = len(self._counts)
        self._counts = np.concatenate([self._counts, np.zeros(len(self.until_s), dtype=np.int64)])
        return first

    def begin(self, trip: Trip, bundle: Bundle) -> None:
        """Begin the calls of a bundle."""
        world, now_s, num = self._world, self._clock.now_s, len(trip.owners)
        first = self._links.take(num)
        bundle.trip, bundle.first = trip, first
        self._grow()
        mine = slice(first, first + num)
        self._bundle[mine] = number = self._number(bundle, num)
        self._owner[mine] = trip.owners
        self._counter[mine] = trip.served.first_counter + trip.owners
        self._seconds[mine] = trip.seconds(bundle.call_of)
        self._latency_s[mine] = trip.latency_s
        self._begin_s[mine] = -math.inf
        self._back[:, mine] = trip.back
        self._stream_back[mine] = trip.streams_back
        self._num_bytes[mine] = trip.flow_bytes
        self._result[mine] = 0
        start_s = now_s + trip.latency_s
        num_sent = len(trip.across)
        if num_sent:
            last_s = world.send_messages(trip.window.rank, num_sent)
            early = world.cluster.message_s * np.arange(num_sent - 1, -1, -1)
            start_s[trip.across] = last_s - early + trip.latency_s[trip.across]
        places = np.arange(first, first + num)
        self._links.send(places, trip.there, trip.flow_bytes, start_s, trip.streams_there)
        if not num:
            self._finish(number)

    def spend(self, rank: int, seconds: float) -> None:
        """Let time pass inside a process for a rank's own work, in its turn."""
        now_s, wait_s = self._clock.now_s, 0.0
        if self.until_s[rank] > now_s:
            calls = np.concatenate([NOBODY, *self._booked[rank]])
            calls = calls[self._begin_s[calls] + self._seconds[calls] > now_s]
            self._booked[rank] = [calls]
            begin_s = self._begin_s[calls]
            end_s = begin_s + self._seconds[calls]
            is_served = begin_s <= now_s
            if is_served.any():
                wait_s = float(end_s[is_served].max()) - now_s
            later = calls[begin_s > now_s]
            self._begin_s[later] += seconds
            self._links.start_s[later] += seconds
        self.until_s[rank] = max(self.until_s[rank], now_s) + seconds
        self._clock.sleep(wait_s + seconds)

    def die(self, rank: int) -> None:
        """End the calls to a rank that has died: they have no result."""
        num = min(self._links.num_places, len(self._owner))
        is_open = np.isin(self._bundle[:num], [at for at, one in enumerate(self._bundles) if one])
        self._over(
            np.flatnonzero(is_open & (self._owner[:num] == rank) & (self._result[:num] >= 0)), -1
        )
        self._links.look_again()

    def _number(self, bundle: Bundle, num_calls: int) -> int:
        """Number a bundle."""
        if not self._free:
            self._free.append(len(self._bundles))
            self._bundles.append(None)
            self._num_left = np.concatenate([self._num_left, [0]])
        number = self._free.pop()
        self._bundles[number], self._num_left[number] = bundle, num_calls
        return number

    def _grow(self) -> None:
        more = len(self._links.start_s) - len(self._owner)
        if more > 0:
            for name in ("bundle", "owner", "counter", "stream_back", "result"):
                _extend(self, f"_{name}", np.zeros(more, dtype=np.int64))
            for name in ("seconds", "latency_s", "begin_s", "num_bytes"):
                _extend(self, f"_{name}", np.zeros(more))
            self._back = np.hstack([self._back, np.zeros((2, more), dtype=np.int64)])

    def _end(self, calls: Ints, times_s: Floats) -> None:
        """Go on with calls whose values, or whose answers, have arrived."""
        is_answer = self._result[calls] != 0
        there, back = calls[~is_answer], calls[is_answer]
        if len(there):
            self._serve(there, times_s[~is_answer])
        if len(back):
            back = back[self._result[back] > 0]
            self._owner[back] = -1  # its death would change nothing
            self._over(back, 0)

    def _over(self, calls: Ints, result: int) -> None:
        """End calls; bundles without any others are over."""
        if result:
            self._result[calls] = result
        numbers, num_over = np.unique(self._bundle[calls], return_counts=True)
        self._num_left[numbers] -= num_over
        for number in numbers[self._num_left[numbers] == 0].tolist():
            self._finish(number)

    def _finish(self, number: int) -> None:
        bundle = self._bundles[number]
        assert bundle is not None
        num = len(bundle.trip.owners)
        results = self._result[bundle.first : bundle.first + num].tolist()
        bundle.results = [None if result < 0 else result for result in results]
        self._bundles[number] = None
        self._free.append(number)
        self._bundle[bundle.first : bundle.first + num] = -1
        if None not in bundle.results:  # else some are still on their way to or from the dead
            self._links.give(bundle.first, num)
        bundle.done.set()

    def _first_over(self, calls: Ints, ends_s: Floats) -> float:
        """Return when the first bundle is over, of calls that end at these times, in order."""
        is_answer = self._result[calls] > 0
        numbers = self._bundle[calls[is_answer]]
        found, num_over = np.unique(numbers, return_counts=True)
        is_over = num_over == self._num_left[found]
        if not is_over.any():
            return math.inf
        last_s = np.zeros(len(self._num_left))
        last_s[numbers] = ends_s[is_answer]  # the last one counts
        return float(last_s[found[is_over]].min())

    def _serve(self, calls: Ints, come_s: Floats) -> None:
        """Let owners serve calls in the order in which they have come, and answer."""
        if self._world.gone:
            is_gone = np.isin(self._owner[calls], list(self._world.gone))
            if is_gone.any():
                self._over(calls[is_gone], -1)
                calls, come_s = calls[~is_gone], come_s[~is_gone]
        if not len(calls):
            return
        order = np.lexsort((come_s, self._owner[calls]))
        calls, come_s = calls[order], come_s[order]
        owners, seconds = self._owner[calls], self._seconds[calls]
        # A call begins when it has come and those before it have ended. Without the time that
        # those before it take, that is the latest of such moments until then.
        is_first = np.r_[True, owners[1:] != owners[:-1]]
        lane = np.cumsum(is_first) - 1
        before_s = np.cumsum(seconds) - seconds
        before_s -= before_s[is_first][lane]
        ready_s = come_s - before_s
        first = np.flatnonzero(is_first)
        ready_s[first] = np.maximum(ready_s[first], self.until_s[owners[first]])
        low_s = float(ready_s.min())
        apart_s = float(ready_s.max()) - low_s + 1.0  # keeps lanes apart
        ready_s = np.maximum.accumulate(ready_s - low_s + lane * apart_s) - lane * apart_s + low_s
        begin_s = ready_s + before_s
        end_s = begin_s + seconds
        ends = np.append(first[1:], len(calls))
        last = ends - 1
        is_idle = self.until_s[owners[first]] <= come_s[first]
        for owner, low, high, begins in zip(
            owners[first].tolist(), first.tolist(), ends.tolist(), is_idle.tolist(), strict=True
        ):
            if begins:
                self._booked[owner] = []
            self._booked[owner].append(calls[low:high])
        self.until_s[owners[last]] = end_s[last]
        self._begin_s[calls] = begin_s
        self._count(calls)
        self._links.send(
            calls,
            self._back[:, calls],
            self._num_bytes[calls],
            end_s + self._latency_s[calls],
            self._stream_back[calls],
        )

    def _count(self, calls: Ints) -> None:
        """Give each call its number among those of its window, function and owner."""
        counters = self._counter[calls]
        order = np.argsort(counters, kind="stable")
        counters = counters[order]
        is_first = np.r_[True, counters[1:] != counters[:-1]]
        at = np.arange(len(calls))
        rank = at - at[is_first][np.cumsum(is_first) - 1]
        self._result[calls[order]] = self._counts[counters] + rank + 1
        np.add.at(self._counts, counters, 1)


def _extend(calls: Calls, name: str, more: npt.NDArray[np.generic]) -> None:
    setattr(calls, name, np.concatenate([getattr(calls, name), more]))
