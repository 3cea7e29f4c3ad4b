"""Fast links: the rule of `link.py`, with rates computed again once for many changes.

Flows share ports max-min fairly. Exact links compute the rates again whenever a flow begins or
ends. Here they are computed again when a part of all open flows, the `slack`, has begun or ended
since: with few flows, or without slack, at each change, as there. In between,

- a flow ends when its rate says so, not when rates are computed next;
- a flow that begins waits. When rates are computed, it gets what it would have had since it began;
- all other flows then get their new rate from the mean time on at which flows have begun and ended
  at their ports.

All flows are rows of arrays. Those of one *block* are begun together (`send`), at different times,
and are told together when they end (`on_ends`): there is no Python code for each of them.

Flows of one stream begin one after the other (`order.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from syncline.virtual.clock import Clock
from syncline.virtual.fill import fill, mean_ages
from syncline.virtual.link import PER_S, Port, checked
from syncline.virtual.order import Order

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

AMPLE = 1e30
"""The rate of the port that flows without bytes go through."""


class FastLinks:
    """Ports with rates in bytes a second, and the flows through them."""

    def __init__(
        self, clock: Clock, rates: Mapping[Port, float], slack: float = 0.0, num_streams: int = 0
    ) -> None:
        """`slack` is the part of all open flows that may change before rates are computed again."""
        self._clock = clock
        self._slack = slack
        self._index = {port: at for at, port in enumerate(rates)}
        limits = [checked(port, rate) for port, rate in rates.items()]
        self._rate = np.array([*limits, AMPLE])
        self.ample = len(limits)
        """The number of a port that is never full."""
        self._carried = np.zeros(len(self._rate))
        # Places for flows that are open: under way, or known to begin later.
        self.num_places = 0
        self._num_open = 0
        self._free: dict[int, list[int]] = {}
        self.start_s = np.zeros(0)
        """When a flow begins, or began."""
        self._pending = np.zeros(0, dtype=np.int64)
        """The places of flows that were sent and have not begun."""
        self._new_pending: list[Ints] = []
        self._bytes = np.zeros(0)
        self._ports = np.zeros((2, 0), dtype=np.int64)
        self._order = Order(num_streams)
        self.no_stream = self._order.none
        self._done: dict[int, Callable[[], None]] = {}
        self._wide: dict[int, Ints] = {}
        """By place: the ports of flows that go through more than two."""
        # Flows under way, side by side.
        self._flows = np.zeros(0, dtype=np.int64)
        """Their places; -1 if a flow has ended since the rates were computed."""
        self._left = np.zeros(0)
        self._speed = np.zeros(0)
        self._end_s = np.zeros(0)
        self._through = np.zeros((2, 0), dtype=np.int64)
        self._since_s = 0.0
        """When rates were computed."""
        self._refill_s = math.inf
        """When to compute them again."""
        self._num_ended = 0
        """How many flows have ended since."""
        self._num_unplanned = 0
        """How many flows were sent since `_plan` has foreseen that."""
        self._due = np.zeros(0, dtype=np.int64)
        """Which flows under way end before that, in this order."""
        self._due_s = np.zeros(0)
        """When they end."""
        self._next_update_s = math.inf
        self._wanted_s: float | None = None
        """When something must be done next; None if it has to be found out."""
        self.on_ends: Callable[[Ints, Floats], None] | None = None
        """Called with the places of flows of blocks that have ended, and when they did."""
        self.first_wanted: Callable[[Ints, Floats], float] | None = None
        """Called with those that will end, and when; returns when `on_ends` must be called."""
        self.used_slack = 0.0
        """`slack`, or 0 if rates were computed at every change so far."""

    def start(
        self,
        ports: Sequence[Port],
        num_bytes: float,
        done: Callable[[], None],
        stream: int | None = None,
    ) -> None:
        """Send bytes through all ports at once; the clock calls `done` when all have passed.

        Each port carries all of `num_bytes`.
        """
        assert num_bytes >= 0, num_bytes
        now_s = self._clock.now_s
        if stream is None:
            stream = self.no_stream
        if num_bytes == 0 and not self._order.is_open(stream):
            self._clock.at(now_s, done)
            return
        place = self.take(1)
        numbers = [self._index[port] for port in dict.fromkeys(ports)]
        assert numbers, "a flow goes through one port at least"
        if num_bytes == 0:
            numbers = []
        if len(numbers) > 2:
            self._wide[place] = np.array(numbers)
            numbers = []
        pair = [*numbers, self.ample, self.ample][:2]
        self._done[place] = done
        self.send(np.array([place]), np.array([pair]).T, num_bytes, now_s, np.array([stream]))

    def take(self, number: int) -> int:
        """Open places for flows; return the first."""
        self._num_open += number
        if self._free.get(number):
            return self._free[number].pop()
        first, self.num_places = self.num_places, self.num_places + number
        if self.num_places > len(self.start_s):
            more = max(number, len(self.start_s), 64)
            self.start_s = np.concatenate([self.start_s, np.full(more, math.inf)])
            self._bytes = np.concatenate([self._bytes, np.zeros(more)])
            self._ports = np.hstack([self._ports, np.zeros((2, more), dtype=np.int64)])
            self._order.grow(more)
        return first

    def give(self, first: int, number: int) -> None:
        """Close places that `take` has opened: their flows have ended."""
        self._num_open -= number
        self._free.setdefault(number, []).append(first)

    def send(
        self,
        places: Ints,
        ports: Ints,
        num_bytes: Floats | float,
        start_s: Floats | float,
        streams: Ints | int,
    ) -> None:
        """Let flows begin, now or later: one in each place, through two ports (by number)."""
        self._order.send(places, streams)
        self._bytes[places] = num_bytes
        self._ports[:, places] = ports
        self.start_s[places] = start_s
        self._new_pending.append(places)
        self._num_unplanned += len(places)
        if self._must_plan():
            self._update_by(self._clock.now_s)

    def look_again(self) -> None:
        """Ask `first_wanted` again: its answer has changed."""
        self._wanted_s = None
        self._update_by(self._clock.now_s)

    def number(self, port: Port) -> int:
        return self._index[port]

    def set_rate(self, port: Port, rate: float) -> None:
        """Change what a port can carry, from now on; flows under way speed up or slow down."""
        self._refill()
        self._rate[self._index[port]] = checked(port, rate)
        self._refill_s, self._num_unplanned, self._wanted_s = self._clock.now_s, 0, None
        self._update_by(self._clock.now_s)

    def load(self, port: Port) -> float:
        """Return how many bytes a second the port carries now."""
        at = self._index[port]
        found = (self._through == at).any(axis=0)
        for flow, ports in self._wide_flows():
            found[flow] = at in ports
        return float(self._speed[found & (self._flows >= 0)].sum())

    @property
    def carried(self) -> dict[Port, float]:
        """How many bytes each port has carried so far, of flows under way and ended."""
        found = self._carried.copy()
        gone_s = self._clock.now_s - self._since_s
        left = np.maximum(0.0, self._left - self._speed * gone_s)
        sent = np.where(self._flows >= 0, self._bytes[self._flows] - left, 0.0)
        self._add_carried(found, np.arange(len(sent)), sent)
        return {port: float(found[at]) for port, at in self._index.items()}

    def _add_carried(self, carried: Floats, flows: Ints, num_bytes: Floats) -> None:
        for ports in self._through:
            if len(flows) == 1:
                carried[ports[flows]] += num_bytes
            else:
                carried += np.bincount(ports[flows], num_bytes, len(carried))
        sent = dict(zip(flows.tolist(), num_bytes.tolist(), strict=True)) if self._wide else {}
        for flow, ports in self._wide_flows():
            carried[ports] += sent.get(flow, 0.0)

    def _wide_flows(self) -> list[tuple[int, Ints]]:
        if not self._wide:
            return []
        found = {place: at for at, place in enumerate(self._flows.tolist())}
        return [(found[place], ports) for place, ports in self._wide.items() if place in found]

    def _update_by(self, time_s: float) -> None:
        """Schedule `_update` at this time, unless it is scheduled earlier."""
        if time_s < self._next_update_s:
            self._next_update_s = time_s
            self._clock.at(time_s, self._update)

    def _update(self) -> None:
        """End the flows that have ended; if there are none, compute rates, if it is time."""
        now_s = self._clock.now_s
        if now_s >= self._next_update_s:
            self._next_update_s = math.inf
        if self._end_flows():
            # The end of a flow often begins another at once: compute rates only after that.
            self._clock.at(now_s, self._update)
            self._next_update_s = now_s
            return
        if self._num_unplanned and self._must_plan():
            self._plan()
        if now_s >= self._refill_s:
            self._refill()
            self._plan()
        if self._wanted_s is None:
            self._wanted_s = self._find_wanted()
        if self._wanted_s < math.inf:
            self._update_by(max(self._wanted_s, now_s))

    def _must_plan(self) -> bool:
        return 2 * self._num_unplanned >= self._most_changes() or self._refill_s == math.inf

    def _most_changes(self) -> int:
        return max(1, int(self._slack * self._num_open))

    def _end_flows(self) -> bool:
        """Tell about the flows that have ended by now; say whether there were any."""
        now_s, due = self._clock.now_s, self._due
        num = int(self._due_s.searchsorted(now_s, side="right"))
        if not num:
            return False
        ended, self._due, self._due_s = due[:num], due[num:], self._due_s[num:]
        self._wanted_s = None
        places = self._flows[ended]
        self._add_carried(self._carried, ended, self._bytes[places])
        self._flows[ended] = -1
        self._num_ended += num
        after, begin_s = self._order.end(places, self._end_s[ended])
        if len(after):
            self.start_s[after] = begin_s
            self._new_pending.append(after)
            self._num_unplanned += len(after)
        if self.on_ends is not None:
            is_block = self._are_blocks(places)
            if is_block.any():
                self.on_ends(places[is_block], self._end_s[ended[is_block]])
        for place in places.tolist() if self._done else ():
            done = self._done.pop(place, None)
            if done is not None:
                self._wide.pop(place, None)
                self.give(place, 1)
                done()
        return True

    def _refill(self) -> None:
        """Compute the rates, and when flows end."""
        now_s = self._clock.now_s
        kept, ended = np.flatnonzero(self._flows >= 0), np.flatnonzero(self._flows < 0)
        pending = self._all_pending()
        starts_s = self.start_s[pending]
        asks = starts_s <= now_s
        self._pending = pending[~asks]
        new = self._order.take(pending[asks], starts_s[asks])
        begun_s = now_s - self.start_s[new]
        old_speed, num = self._speed[kept], len(kept)
        through, changed = self._through[:, kept], self._through[:, ended]
        self._flows = np.concatenate([self._flows[kept], new])
        self._through = np.hstack([through, self._ports[:, new]])
        is_exact = self._most_changes() == 1
        self._speed = fill(self._rate, self._through, self._wide_flows(), exactly=is_exact)
        self.used_slack = max(self.used_slack, 0.0 if is_exact else self._slack)
        left = self._left[kept] - old_speed * (now_s - self._since_s)
        if not is_exact:
            changed = np.hstack([changed, self._ports[:, new]])
            changed_s = np.concatenate([now_s - self._end_s[ended], begun_s])
            ages_s = mean_ages(len(self._rate), changed, changed_s, through)
            left -= (self._speed[:num] - old_speed) * ages_s
        self._left = np.concatenate([left, self._bytes[new] - self._speed[num:] * begun_s])
        if is_exact:
            np.maximum(self._left, 0.0, out=self._left)
        # If less than nothing is left, the flow has ended before now, but after it has begun.
        self._end_s = now_s + self._left / self._speed
        if is_exact:
            self._end_s = np.maximum(now_s, np.rint(self._end_s * PER_S) / PER_S)
        self._since_s = now_s
        self._num_ended, self._due, self._due_s = 0, self._due[:0], self._due_s[:0]

    def _all_pending(self) -> Ints:
        if self._new_pending:
            self._pending = np.concatenate([self._pending, *self._new_pending])
            self._new_pending = []
        return self._pending

    def _plan(self) -> None:
        """Foresee when enough will have begun and ended, and what ends until then."""
        self._num_unplanned, self._wanted_s = 0, None
        now_s = self._clock.now_s
        starts = self.start_s[self._all_pending()]
        ends = self._end_s[self._flows >= 0]
        times = np.concatenate([ends, starts])
        if not len(times):
            self._refill_s, self._due, self._due_s = math.inf, self._due[:0], self._due_s[:0]
            return
        most = self._most_changes() - self._num_ended - 1
        every = 1 + len(times) // 4096  # a sample of many
        at = min(max(0, most // every), (len(times) - 1) // every)
        refill_s = float(np.partition(times[::every], at)[at]) if most >= 0 else now_s
        self._refill_s = max(now_s, refill_s)
        due = np.flatnonzero((self._end_s <= self._refill_s) & (self._flows >= 0))
        self._due = due[self._end_s[due].argsort(kind="stable")]
        self._due_s = self._end_s[self._due]

    def _find_wanted(self) -> float:
        """Return when something must be done next."""
        next_s = self._refill_s
        # Without slack rates are computed when the first flow ends.
        if len(self._due) and next_s > self._clock.now_s and self._most_changes() > 1:
            places, ends = self._flows[self._due], self._due_s
            is_block = self._are_blocks(places)
            if not is_block.all():
                next_s = min(next_s, float(ends[~is_block][0]))
            if self.first_wanted is not None and is_block.any():
                next_s = min(next_s, self.first_wanted(places[is_block], ends[is_block]))
        return next_s

    def _are_blocks(self, places: Ints) -> npt.NDArray[np.bool_]:
        """Say which flows are of blocks."""
        if not self._done or len(self._done) == self._num_open:
            return np.full(len(places), not self._done)
        return np.array([place not in self._done for place in places.tolist()])
