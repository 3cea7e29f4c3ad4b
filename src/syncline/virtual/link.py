"""Links: messages are flows, and flows share the ports they go through max-min fairly.

Max-min fair means: a flow can get more only by taking from a flow that has no more than it. The
rates are found by progressive filling (Bertsekas and Gallager, "Data Networks", section 6.5.2):
all rates rise together until a port is full; its flows stay at that rate, the others rise on.

Rates are computed again when a flow begins or ends or a port changes, once for all changes at the
same time, and only for flows that share ports, directly or through others. Between changes every
flow has a constant rate, so only the ends of flows are events on the clock.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence

from syncline.virtual.clock import Clock

Port = tuple[str, int]
"""What a flow goes through, such as ("out", 3): the way out of machine 3."""


PER_S = 1e12
"""Ends of flows are multiples of a picosecond."""


class _Port:
    __slots__ = ("key", "left", "num_rising", "rate", "routes")

    def __init__(self, key: Port, rate: float) -> None:
        self.key = key
        self.rate = rate
        self.routes: dict[_Route, None] = {}
        # While rates are computed: the rate left for flows that still rise, and their number.
        self.left = 0.0
        self.num_rising = 0


class _Route:
    """A set of ports that flows go through together, kept from one flow to the next."""

    __slots__ = ("carried_bytes", "flows", "known_at", "ports", "rate", "slowest")

    def __init__(self, ports: list[_Port]) -> None:
        self.ports = ports
        self.flows: dict[_Flow, None] = {}
        self.carried_bytes = 0.0
        self.rate = 0.0
        self.slowest = 0.0
        self.known_at = -1


class _Flow:
    __slots__ = ("done", "end_s", "left_bytes", "num_bytes", "number", "rate", "route", "since_s")

    def __init__(
        self, number: int, route: _Route, num_bytes: float, done: Callable[[], None], now_s: float
    ) -> None:
        self.number = number
        self.route = route
        self.num_bytes = self.left_bytes = num_bytes
        self.done = done
        self.rate = 0.0
        self.since_s = now_s
        self.end_s = math.inf

    def left_at(self, now_s: float) -> float:
        return max(0.0, self.left_bytes - self.rate * (now_s - self.since_s))


class Links:
    """Ports with rates in bytes a second, and the flows through them."""

    def __init__(self, clock: Clock, rates: Mapping[Port, float]) -> None:
        self._clock = clock
        self._ports = {key: _Port(key, checked(key, rate)) for key, rate in rates.items()}
        self._routes: dict[tuple[Port, ...], _Route] = {}
        self._num_started = 0
        self._num_alive = 0
        self._num_rate_changes = 0
        self._ends: list[tuple[float, int, _Flow]] = []
        self._touched: dict[_Route, None] = {}
        self._next_update_s = math.inf
        self.on_change: Callable[[], None] | None = None
        """Called whenever rates have been computed."""

    def start(self, ports: Sequence[Port], num_bytes: float, done: Callable[[], None]) -> None:
        """Send bytes through all ports at once; the clock calls `done` when all have passed.

        Each port carries all of `num_bytes`.
        """
        assert num_bytes >= 0, num_bytes
        now_s = self._clock.now_s
        if num_bytes == 0:
            self._clock.at(now_s, done)
            return
        route = self._route(tuple(ports))
        if not route.flows:
            for port in route.ports:
                port.routes[route] = None
        self._num_started += 1
        self._num_alive += 1
        route.flows[_Flow(self._num_started, route, num_bytes, done, now_s)] = None
        self._touched[route] = None
        self._update_by(now_s)

    def set_rate(self, port: Port, rate: float) -> None:
        """Change what a port can carry, from now on; flows under way speed up or slow down."""
        self._ports[port].rate = checked(port, rate)
        self._num_rate_changes += 1
        self._touched.update(self._ports[port].routes)
        self._update_by(self._clock.now_s)

    def load(self, port: Port) -> float:
        """Return how many bytes a second the port carries now."""
        return sum(flow.rate for route in self._ports[port].routes for flow in route.flows)

    @property
    def carried(self) -> dict[Port, float]:
        """How many bytes each port has carried so far."""
        found = dict.fromkeys(self._ports, 0.0)
        now_s = self._clock.now_s
        for route in self._routes.values():
            num_bytes = route.carried_bytes
            num_bytes += sum(flow.num_bytes - flow.left_at(now_s) for flow in route.flows)
            for port in route.ports:
                found[port.key] += num_bytes
        return found

    def _route(self, keys: tuple[Port, ...]) -> _Route:
        route = self._routes.get(keys)
        if route is None:
            assert keys, "a flow goes through one port at least"
            route = _Route([self._ports[key] for key in dict.fromkeys(keys)])
            self._routes[keys] = route
        return route

    def _update_by(self, time_s: float) -> None:
        """Schedule `_update` at this time, unless it is scheduled earlier."""
        if time_s < self._next_update_s:
            self._next_update_s = time_s
            self._clock.at(time_s, self._update)

    def _update(self) -> None:
        """End the flows that end now; if there are none, compute the rates that changed."""
        now_s = self._clock.now_s
        if now_s >= self._next_update_s:
            self._next_update_s = math.inf
        ended = self._take_ended()
        if ended:
            # The end of a flow often begins another at once: compute rates only after that.
            self._next_update_s = now_s
            for flow in ended:
                flow.done()
            self._clock.at(now_s, self._update)
            return
        if self._touched:
            self._refill()
            if self.on_change is not None:
                self.on_change()
        if len(self._ends) > 2 * self._num_alive + 64:  # mostly stale entries: drop those
            self._ends = [entry for entry in self._ends if entry[0] == entry[2].end_s]
            heapq.heapify(self._ends)
        while self._ends and self._ends[0][0] != self._ends[0][2].end_s:
            heapq.heappop(self._ends)
        if self._ends:
            self._update_by(self._ends[0][0])

    def _take_ended(self) -> list[_Flow]:
        ended = []
        while self._ends and self._ends[0][0] <= self._clock.now_s:
            end_s, _, flow = heapq.heappop(self._ends)
            if end_s != flow.end_s:
                continue
            ended.append(flow)
            flow.end_s = math.nan  # equal to nothing in the heap
            self._num_alive -= 1
            route = flow.route
            route.carried_bytes += flow.num_bytes
            del route.flows[flow]
            self._touched[route] = None
            if not route.flows:
                for port in route.ports:
                    del port.routes[route]
                    if port.routes:
                        self._touched.update(port.routes)
        return ended

    def _refill(self) -> None:
        now_s = self._clock.now_s
        while self._touched:
            first, _ = self._touched.popitem()
            if not first.flows:
                continue
            joined = _joined(first)
            if len(joined) == 1:
                first.rate = self._slowest(first) / len(first.flows)
            else:
                _fill(joined)
            for route in joined:
                self._touched.pop(route, None)
                rate = route.rate
                for flow in route.flows:
                    if flow.rate != rate:
                        flow.left_bytes = flow.left_at(now_s)
                        flow.since_s = now_s
                        flow.rate = rate
                        flow.end_s = max(now_s, rounded(now_s + flow.left_bytes / rate))
                        heapq.heappush(self._ends, (flow.end_s, flow.number, flow))

    def _slowest(self, route: _Route) -> float:
        if route.known_at != self._num_rate_changes:
            route.known_at = self._num_rate_changes
            route.slowest = min(port.rate for port in route.ports)
        return route.slowest


def rounded(time_s: float) -> float:
    """Return a time to the picosecond: ends that differ by rounding alone happen together."""
    return round(time_s * PER_S) / PER_S


def checked(port: Port, rate: float) -> float:
    """Return the rate, which must be positive and finite."""
    assert 0 < rate < math.inf, (port, rate)
    return rate


def _joined(first: _Route) -> list[_Route]:
    """Return the routes in use that share ports with this one, directly or through others."""
    joined = [first]
    seen: set[_Route | _Port] = {first}
    for route in joined:
        for port in route.ports:
            if len(port.routes) > 1 and port not in seen:
                seen.add(port)
                more = [other for other in port.routes if other not in seen]
                joined += more
                seen.update(more)
    return joined


def _fill(routes: list[_Route]) -> None:
    """Set the rate of each route's flows, by progressive filling.

    A port's share for each flow that still rises only grows while other ports fill up. So an old
    share in the heap is never too high, and the smallest one that is current is the next port full.
    """
    ports: dict[_Port, None] = {}
    for route in routes:
        route.rate = 0.0
        ports.update(dict.fromkeys(route.ports))
    for port in ports:
        port.left = port.rate
        port.num_rising = sum([len(route.flows) for route in port.routes])
    numbered = list(ports)
    shares = [(port.left / port.num_rising, at) for at, port in enumerate(numbered)]
    heapq.heapify(shares)
    num_rising = len(routes)
    while num_rising:
        _, at = heapq.heappop(shares)
        full = numbered[at]
        if full.num_rising == 0:
            continue
        share = full.left / full.num_rising
        if shares and share > shares[0][0]:
            heapq.heappush(shares, (share, at))
            continue
        for route in full.routes:
            if route.rate == 0.0:
                route.rate = share
                num_rising -= 1
                num_flows = len(route.flows)
                for port in route.ports:
                    port.left -= share * num_flows
                    port.num_rising -= num_flows
