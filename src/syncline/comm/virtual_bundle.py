"""Calls to the owners of many strips as one message there and one back, for simulations of sizes.

With N ranks that call each other there are N^2 calls for each bucket and step. Here a rank's calls
to all owners are a bundle: it brings each port the bytes that its calls bring there, arrives when
every port has served it, is served by every owner after what came there before, and goes back when
the last owner has served it. The caller waits for all answers anyway. What is left out: a call that
arrives before the others of its bundle is served and answered earlier.

The functions are not run (`window.Counted`): an owner's first call tells how long each takes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from syncline.comm.many_calls import Targets
from syncline.comm.window import Call
from syncline.virtual.clock import Clock, Signal
from syncline.virtual.fast_link import FastLinks, Route
from syncline.virtual.link import Port

if TYPE_CHECKING:
    from syncline.comm.virtual_window import VirtualWindow


class Bundle:
    """A bundle under way."""

    def __init__(self, clock: Clock, why: Callable[[], str]) -> None:
        self.done = Signal(clock)
        self._why = why
        self.results: Sequence[int | None] = ()

    def wait(self) -> Sequence[int | None]:
        self.done.wait(self._why)
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
        self.ranks: npt.NDArray[np.int64] = np.array(
            [window.ranks[position] for position in targets.positions], dtype=np.int64
        )
        self.numbers: npt.NDArray[np.int64] = np.array(
            [strip.number for strip in targets.strips], dtype=np.int64
        )
        self.is_distinct = len(set(targets.positions)) == len(targets.positions)
        self._busy_s = world.busy_until_s
        self.others = np.flatnonzero(self.ranks != me)
        self.mine = np.flatnonzero(self.ranks == me)
        self.sizes = [(strip.stop - strip.start) * element_bytes for strip in targets.strips]
        self.num_bytes = sum(self.sizes[at] for at in self.others)
        there: dict[Port, tuple[float, int]] = {}
        back: dict[Port, tuple[float, int]] = {}
        self.latency_s = 0.0
        for at in self.others:
            ports, link = world.ports_between(me, int(self.ranks[at]))
            for port in ports:
                _add(there, port, self.sizes[at])
            for port in world.ports_between(int(self.ranks[at]), me)[0]:
                _add(back, port, self.sizes[at])
            self.latency_s = max(self.latency_s, link.latency_s)
        assert isinstance(world.links, FastLinks)
        self.there: Route = world.links.route(there)
        self.back: Route = world.links.route(back)

    def call(self, bundle: Bundle, at_first: Callable[[int], Call]) -> None:
        """Begin the calls; `at_first` returns the call for a target, to see how long it takes."""
        world, clock = self.window.world, self.window.world.clock
        assert isinstance(world.links, FastLinks)
        links = world.links
        results = np.zeros(len(self.ranks), dtype=np.int64)
        mine_s = self._serve(self.mine, results, at_first)
        lost: list[int] = []

        def arrive() -> None:
            others = self.others
            if world.gone:
                lost.extend(int(at) for at in others if int(self.ranks[at]) in world.gone)
                others = np.array([at for at in others if at not in lost], dtype=np.int64)
            leave_s = max(mine_s, self._serve(others, results, at_first))
            clock.at(leave_s + self.latency_s, links.send, self.back, end)

        def end() -> None:
            found: list[int | None] = list(results.tolist())
            for at in lost:
                found[at] = None
            bundle.results = found
            bundle.done.set()

        clock.after(self.latency_s, links.send, self.there, arrive)

    def _serve(
        self,
        targets: npt.NDArray[np.int64],
        results: npt.NDArray[np.int64],
        at_first: Callable[[int], Call],
    ) -> float:
        """Let the owners of some targets serve their calls; return when the last has done so."""
        now_s, busy_s, served = self.window.world.clock.now_s, self._busy_s, self.served
        last_s = now_s
        while len(targets):
            ranks, numbers = self.ranks[targets], self.numbers[targets]
            rest = targets[:0]
            if not self.is_distinct:  # an owner of several strips serves one after the other
                ranks, first = np.unique(ranks, return_index=True)
                targets, rest, numbers = targets[first], np.delete(targets, first), numbers[first]
            seconds = served.seconds[numbers]
            for at in np.flatnonzero(np.isnan(seconds)):
                target = int(targets[at])
                position = self.targets.positions[target]
                taken_s = self.window.measure(position, self.function, at_first(target))
                seconds[at] = served.seconds[numbers[at]] = taken_s
            served.num_calls[ranks] += 1
            results[targets] = served.num_calls[ranks]
            busy_s[ranks] = np.maximum(busy_s[ranks], now_s) + seconds
            last_s = max(last_s, float(busy_s[ranks].max()))
            targets = rest
        return last_s


def _add(loads: dict[Port, tuple[float, int]], port: Port, num_bytes: int) -> None:
    """Add a call's bytes to what a port has to serve."""
    before, count = loads.get(port, (0.0, 0))
    loads[port] = before + num_bytes, count + 1
