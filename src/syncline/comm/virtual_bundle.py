"""Calls to the owners of many strips as one message there and one back, for simulations of sizes.

With N ranks that call each other there are N^2 calls for each bucket and step. Here a rank's calls
to all owners on other machines are a bundle: it brings each port the bytes that its calls bring
there, and arrives when every port has served it. Every owner serves its call after what came to its
comm lane before. The answers go back as one message. The caller waits for all of them anyway.

A bundle of n calls pays what n calls pay: the caller's processor time for n messages, each owner's
time on its lane. As with single calls, that overlaps with the bytes on the links: these begin to
move with the first message, there and back, and a call is over at the earliest when its own message
has left, was served and has come back. Calls inside a machine bring no bytes to links.

What is left out: calls of a bundle arrive together, so one may be served before its turn to leave.

The functions are not run (`window.Counted`): an owner's first call tells how long each takes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from syncline.comm.many_calls import Targets
from syncline.comm.traffic import Traffic
from syncline.comm.window import Call
from syncline.virtual.clock import Clock, Signal
from syncline.virtual.fast_link import FastLinks, Route
from syncline.virtual.link import Port

if TYPE_CHECKING:
    from syncline.comm.virtual_window import VirtualWindow


Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class Bundle:
    """A bundle under way."""

    def __init__(self, clock: Clock, why: Callable[[], str], traffic: Traffic) -> None:
        self.done = Signal(clock)
        self._why = why
        self._traffic = traffic
        self.results: Sequence[int | None] = ()

    def wait(self) -> Sequence[int | None]:
        self.done.wait(self._why)
        self._traffic.spent("wire")
        return self.results


class Served:
    """How long a window's function takes for each strip, and how many calls a rank has served."""

    def __init__(self, num_ranks: int) -> None:
        self.seconds = np.full(num_ranks, np.nan)
        self.num_calls = np.zeros(num_ranks, dtype=np.int64)


class Trip:
    """What is always the same when a rank calls the same owners: kept from call to call."""

    def __init__(
        self, window: VirtualWindow, function: str, targets: Targets, element_bytes: int
    ) -> None:
        world, me = window.world, window.rank
        self.window = window
        self.function = function
        self.targets = targets
        self.served = window.served(function)
        ranks = [window.ranks[position] for position in targets.positions]
        self.ranks: Ints = np.array(ranks, dtype=np.int64)
        self.numbers: Ints = np.array([strip.number for strip in targets.strips], dtype=np.int64)
        self.is_distinct = len(set(targets.positions)) == len(targets.positions)
        self._lanes = world.bookings
        is_inside = np.array([world.is_inside(me, rank) for rank in ranks], dtype=bool)
        self.others = np.flatnonzero(self.ranks != me)
        self.mine = np.flatnonzero(self.ranks == me)
        self.inside = np.flatnonzero(is_inside & (self.ranks != me))
        self.across = np.flatnonzero(~is_inside)
        self.sizes = [(strip.stop - strip.start) * element_bytes for strip in targets.strips]
        self.num_bytes = sum(self.sizes[at] for at in self.others)
        self.serving_s: Floats = np.array(
            [
                world.serving_s(me, rank, 2 * size)
                for rank, size in zip(ranks, self.sizes, strict=True)
            ]
        )
        there: dict[Port, tuple[float, int]] = {}
        back: dict[Port, tuple[float, int]] = {}
        for at in self.across:
            for port in world.ports_between(me, ranks[at])[0]:
                _add(there, port, self.sizes[at])
            for port in world.ports_between(ranks[at], me)[0]:
                _add(back, port, self.sizes[at])
        assert isinstance(world.links, FastLinks)
        self.there: Route = world.links.route(there)
        self.back: Route = world.links.route(back)

    def call(self, bundle: Bundle, at_first: Callable[[int], Call]) -> None:
        """Begin the calls; `at_first` returns the call for a target, to see how long it takes."""
        world, clock = self.window.world, self.window.world.clock
        results: list[int | None] = [None] * len(self.ranks)
        num_left = 1

        def end() -> None:
            nonlocal num_left
            num_left -= 1
            if not num_left:
                bundle.results = results
                bundle.done.set()

        def serve(targets: Ints, come_s: Floats | float) -> tuple[float, float]:
            return self._serve(targets, come_s, results, at_first)

        def arrive_inside() -> None:
            _, last_s = serve(self._alive(self.inside), clock.now_s)
            clock.at(last_s + world.cluster.inside.latency_s, end)

        if len(self.inside):
            num_left += 1
            clock.after(world.cluster.inside.latency_s, arrive_inside)
        if len(self.across):
            num_left += 1
            self._call_across(serve, end)
        _, last_s = serve(self.mine, clock.now_s)
        clock.at(last_s, end)

    def _call_across(
        self, serve: Callable[[Ints, Floats | float], tuple[float, float]], end: Callable[[], None]
    ) -> None:
        """Send the calls to other machines, and the answers back; then call `end`."""
        world, clock = self.window.world, self.window.world.clock
        assert isinstance(world.links, FastLinks)
        links, message_s = world.links, world.cluster.message_s
        latency_s = world.cluster.network.latency_s
        num, me = len(self.across), self.window.rank
        last_sent_s = world.send_messages(self.window.rank, num)
        first_sent_s = last_sent_s - (num - 1) * message_s
        come_s = np.zeros(len(self.ranks))
        come_s[self.across] = first_sent_s + latency_s + message_s * np.arange(num)

        def arrive() -> None:
            alive = self._alive(self.across)
            first_s, last_s = serve(alive, come_s[alive])
            start = functools.partial(links.send, self.back)
            end_s = first_s + latency_s
            clock.at(end_s, world.streams.send, ("back", me), start, lambda: come_back(last_s))

        def come_back(last_s: float) -> None:
            clock.at(max(clock.now_s, last_s + latency_s), end)

        start = functools.partial(links.send, self.there)
        clock.at(first_sent_s + latency_s, world.streams.send, ("there", me), start, arrive)

    def _alive(self, targets: Ints) -> Ints:
        """Return the targets whose owners have not died."""
        gone = self.window.world.gone
        if not gone:
            return targets
        return np.array([at for at in targets if int(self.ranks[at]) not in gone], dtype=np.int64)

    def _serve(
        self,
        targets: Ints,
        come_s: Floats | float,
        results: list[int | None],
        at_first: Callable[[int], Call],
    ) -> tuple[float, float]:
        """Let the owners of some targets serve their calls, which come at `come_s` or now.

        Return when the first and the last have done so.
        """
        now_s, lanes, served = self.window.world.clock.now_s, self._lanes, self.served
        if not len(targets):
            return now_s, now_s
        come_s = np.broadcast_to(come_s, targets.shape)
        first_s, last_s = np.inf, now_s
        while len(targets):
            ranks, numbers = self.ranks[targets], self.numbers[targets]
            rest, rest_come_s = targets[:0], come_s[:0]
            if not self.is_distinct:  # an owner of several strips serves one after the other
                ranks, first = np.unique(ranks, return_index=True)
                rest, rest_come_s = np.delete(targets, first), np.delete(come_s, first)
                targets, come_s, numbers = targets[first], come_s[first], numbers[first]
            seconds = served.seconds[numbers]
            for at in np.flatnonzero(np.isnan(seconds)):
                target = int(targets[at])
                position = self.targets.positions[target]
                taken_s = self.window.measure(position, self.function, at_first(target))
                seconds[at] = served.seconds[numbers[at]] = taken_s
            served.num_calls[ranks] += 1
            for target, result in zip(targets, served.num_calls[ranks].tolist(), strict=True):
                results[target] = result
            seconds = seconds + self.serving_s[targets]
            until_s = np.maximum(lanes.until_s[ranks], now_s) + seconds
            lanes.until_s[ranks], lanes.call_s[ranks] = until_s, seconds
            ends_s = np.maximum(until_s, come_s + seconds)
            first_s, last_s = min(first_s, float(ends_s.min())), max(last_s, float(ends_s.max()))
            targets, come_s = rest, rest_come_s
        return first_s, last_s


def _add(loads: dict[Port, tuple[float, int]], port: Port, num_bytes: int) -> None:
    """Add a call's bytes to what a port has to serve."""
    before, count = loads.get(port, (0.0, 0))
    loads[port] = before + num_bytes, count + 1
