"""Fast links: each port serves its messages at equal rates, by a virtual clock of its own.

A port with n messages gives each of them 1/n of its rate (generalised processor sharing; Parekh and
Gallager 1993). Its clock counts the bytes that each of them has got so far; a message of S bytes is
served when the clock has risen by S since the message came. So a message that comes or ends changes
how fast a clock runs, and nothing has to be computed again for the messages under way. A message
ends when all its ports have served it.

`link.py` is the exact model, in which a message has one rate at all its ports: it is fair across
ports, not only at each port, and costs much more. Messages that are held up elsewhere make the
difference: here they still take their share of a port. Both models serve the same bytes in the same
time at a port that is never idle.

All ports are columns of arrays. At one port messages of the same size are served in the order in
which they came, so they wait in a queue: a port has one for each size, and only the heads are
compared. A message that has all but `TOLERANCE` of its bytes counts as served if another one is
served at this moment: this limits how many different moments there are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from syncline.virtual.clock import Clock
from syncline.virtual.link import Port, checked

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

TOLERANCE = 1e-3
"""The part of a message that may be missing when it ends."""


class Route:
    """What a message brings to which ports; kept from one message to the next."""

    __slots__ = ("counts", "ports", "queues")

    def __init__(self, ports: Ints, queues: Ints, counts: Ints) -> None:
        self.ports = ports
        self.queues = queues
        """At each port the queue of its size."""
        self.counts = counts
        """At each port, as how many messages of that size it counts."""


class _Message:
    """A message under way. `serials[k]` is its place in the queue of its k-th port."""

    __slots__ = ("done", "number", "route", "serials", "tags")

    serials: Ints
    tags: Floats

    def __init__(self, number: int, route: Route, done: Callable[[], None]) -> None:
        self.number = number
        self.route = route
        self.done = done


class FastLinks:
    """Ports with rates in bytes a second, and the messages that they serve."""

    def __init__(self, clock: Clock, rates: Mapping[Port, float]) -> None:
        self._clock = clock
        self._index = {port: at for at, port in enumerate(rates)}
        self._rate = np.array([checked(port, rate) for port, rate in rates.items()])
        num_ports = len(rates)
        self._served = np.zeros(num_ports)
        """Each port's clock: bytes that each of its messages has got."""
        self._since_s = np.zeros(num_ports)
        """When the port's clock had this value."""
        self._num_here = np.zeros(num_ports, dtype=np.int64)
        self._end_s = np.full(num_ports, math.inf)
        """When the port has next served a message, if no other comes."""
        self._soon_s = np.full(num_ports, math.inf)
        """From when on that message may count as served."""
        self._carried = np.zeros(num_ports)
        self._num_watched = np.zeros(num_ports, dtype=np.int64)
        """How many messages wait for the port, of all their ports."""
        self._watched: dict[tuple[int, int], list[_Message]] = {}
        """By queue and place: the messages that end, or look again, when it is served."""
        # Queues, numbered so that port p has queues p, p + num_ports, p + 2 num_ports, ...
        self._num_queues = 0
        self._queue_of: list[dict[float, int]] = [{} for _ in range(num_ports)]
        self._size = np.zeros(0)
        self._first = np.zeros(0, dtype=np.int64)
        self._last = np.zeros(0, dtype=np.int64)
        """Places in a queue count from 0 and are never used again."""
        self._head = np.zeros((0, num_ports))
        """By turn and port: what the clock shows when the queue's first message is served."""
        self._tags = np.zeros((4, 0))
        self._counts = np.zeros((4, 0), dtype=np.int32)
        """Rings: by place and queue. Messages of one size that come together share a place."""
        self._routes: dict[tuple[tuple[Port, ...], float], Route] = {}
        self._new: list[_Message] = []
        self._num_started = 0
        self._next_update_s = math.inf

    def start(self, ports: Sequence[Port], num_bytes: float, done: Callable[[], None]) -> None:
        """Send bytes through all ports at once; the clock calls `done` when all have passed.

        Each port carries all of `num_bytes`.
        """
        assert num_bytes >= 0, num_bytes
        key = (tuple(ports), num_bytes)
        route = self._routes.get(key)
        if route is None:
            route = self._routes[key] = self.route(dict.fromkeys(ports, (num_bytes, 1)))
        self.send(route, done)

    def route(self, loads: Mapping[Port, tuple[float, int]]) -> Route:
        """Prepare a message that brings each port its own number of bytes.

        `loads` has the bytes, and how many messages they count as: a port shares its rate among
        those.
        """
        wanted = [(self._index[port], *load) for port, load in loads.items() if load[0]]
        queues = [self._queue(port, num_bytes / count) for port, num_bytes, count in wanted]
        return Route(
            np.array([port for port, _, _ in wanted], dtype=np.int64),
            np.array(queues, dtype=np.int64),
            np.array([count for _, _, count in wanted], dtype=np.int64),
        )

    def send(self, route: Route, done: Callable[[], None]) -> None:
        """Send what was prepared; the clock calls `done` when every port has served it."""
        now_s = self._clock.now_s
        if not len(route.ports):
            self._clock.at(now_s, done)
            return
        self._num_started += 1
        self._new.append(_Message(self._num_started, route, done))
        self._update_by(now_s)

    def set_rate(self, port: Port, rate: float) -> None:
        """Change what a port can carry, from now on."""
        at = np.array([self._index[port]])
        self._advance(at)
        self._rate[at] = checked(port, rate)
        self._time(at)
        self._update_by(self._clock.now_s)

    def load(self, port: Port) -> float:
        """Return how many bytes a second the port carries now."""
        at = self._index[port]
        return float(self._rate[at]) if self._num_here[at] else 0.0

    @property
    def carried(self) -> dict[Port, float]:
        """How many bytes of messages each port has served so far."""
        return {port: float(self._carried[at]) for port, at in self._index.items()}

    def _queue(self, port: int, size: float) -> int:
        """Return the number of a port's queue for messages of this size."""
        found = self._queue_of[port].get(size)
        if found is None:
            num_ports = len(self._rate)
            found = self._queue_of[port][size] = port + num_ports * len(self._queue_of[port])
            if found >= self._num_queues:
                self._num_queues += num_ports
                self._size = np.concatenate([self._size, np.ones(num_ports)])
                more = np.zeros(num_ports, dtype=np.int64)
                self._first = np.concatenate([self._first, more])
                self._last = np.concatenate([self._last, more])
                self._head = np.vstack([self._head, np.full(num_ports, math.inf)])
                ring = (len(self._tags), num_ports)
                self._tags = np.hstack([self._tags, np.zeros(ring)])
                self._counts = np.hstack([self._counts, np.zeros(ring, dtype=np.int32)])
            self._size[found] = size
        return found

    def _update_by(self, time_s: float) -> None:
        """Schedule `_update` at this time, unless it is scheduled earlier."""
        if time_s < self._next_update_s:
            self._next_update_s = time_s
            self._clock.at(time_s, self._update)

    def _update(self) -> None:
        """Let ports serve what is due, end messages, and begin those that have come."""
        now_s = self._clock.now_s
        if now_s >= self._next_update_s:
            self._next_update_s = math.inf
        due = np.flatnonzero(self._soon_s <= now_s)
        # An update for a moment that has changed since finds nothing that is due by itself.
        if len(due) and self._end_s[due].min() <= now_s:
            ended = self._serve(due)
            # The end of a message often begins another: begin all of one moment together.
            self._next_update_s = now_s
            for message in sorted(ended, key=lambda message: message.number):
                message.done()
            self._clock.at(now_s, self._update)
            return
        if self._new:
            self._begin()
        next_s = float(self._end_s.min())
        if next_s < math.inf:
            self._update_by(max(next_s, now_s))

    def _advance(self, ports: Ints) -> None:
        """Set the ports' clocks to what they show now."""
        now_s, here = self._clock.now_s, self._num_here[ports]
        gone_s = now_s - self._since_s[ports]
        self._served[ports] += np.where(
            here > 0, gone_s * self._rate[ports] / np.maximum(here, 1), 0.0
        )
        self._since_s[ports] = now_s

    def _time(self, ports: Ints) -> None:
        """Compute when ports, whose clocks are set, will have served their next message."""
        heads = self._head[:, ports]
        turn = heads.argmin(axis=0)
        tags = heads[turn, np.arange(len(ports))]
        left = np.maximum(tags - self._served[ports], 0.0)  # infinite without messages
        spare = TOLERANCE * self._size[turn * len(self._rate) + ports]
        here, rate = np.maximum(self._num_here[ports], 1), self._rate[ports]
        now_s = self._clock.now_s
        self._end_s[ports] = now_s + left * here / rate
        self._soon_s[ports] = now_s + (left - spare) * here / rate

    def _begin(self) -> None:
        """Put the new messages into the queues of their ports."""
        new, self._new = self._new, []
        routes = [message.route for message in new]
        queues = np.concatenate([route.queues for route in routes])
        counts = np.concatenate([route.counts for route in routes])
        place: Ints | None = None
        num_each = [len(route.queues) for route in routes]
        if len(new) > 1:
            queues, place = np.unique(queues, return_inverse=True)
            counts = np.bincount(place, weights=counts).astype(np.int64)
        num_ports = len(self._rate)
        ports = queues % num_ports
        touched = np.unique(ports) if len(new) > 1 else ports
        idle = touched[self._num_here[touched] == 0]
        self._served[idle] = 0.0  # keeps the clocks small, so that sums of bytes stay exact
        self._advance(touched)
        tags = self._served[ports] + self._size[queues]
        serials = self._last[queues]
        if (serials - self._first[queues]).max() >= len(self._tags):
            self._grow()
        ring = len(self._tags)
        self._tags[serials % ring, queues] = tags
        self._counts[serials % ring, queues] = counts
        self._last[queues] += 1
        is_first = self._first[queues] == serials
        self._head[queues[is_first] // num_ports, ports[is_first]] = tags[is_first]
        np.add.at(self._num_here, ports, counts)
        self._time(touched)
        end = 0
        for message, num in zip(new, num_each, strict=True):
            mine = slice(end, end + num)
            end += num
            at = mine if place is None else place[mine]
            message.tags, message.serials = tags[at], serials[at]
            self._watch(message)

    def _grow(self) -> None:
        """Double the rings; what waits keeps its place."""
        old, ring = len(self._tags), 2 * len(self._tags)
        tags, counts = (
            np.zeros((ring, self._num_queues)),
            np.zeros((ring, self._num_queues), np.int32),
        )
        for back in range(old):
            serials = self._last - 1 - back
            queues = np.flatnonzero(serials >= self._first)
            serials = serials[queues]
            tags[serials % ring, queues] = self._tags[serials % old, queues]
            counts[serials % ring, queues] = self._counts[serials % old, queues]
        self._tags, self._counts = tags, counts

    def _serve(self, ports: Ints) -> list[_Message]:
        """Take from the queues what is due at these ports; return the messages that end."""
        self._advance(ports)
        touched, num_ports, ring = ports, len(self._rate), len(self._tags)
        looking: list[_Message] = []
        while len(ports):
            heads = self._head[:, ports]
            turn = heads.argmin(axis=0)
            left = heads[turn, np.arange(len(ports))] - self._served[ports]
            queues = turn * num_ports + ports
            is_due = left <= TOLERANCE * self._size[queues] + 1e-12 * self._served[ports]
            ports, turn, queues = ports[is_due], turn[is_due], queues[is_due]
            if not len(ports):
                break
            serials = self._first[queues]
            counts = self._counts[serials % ring, queues]
            self._num_here[ports] -= counts
            self._carried[ports] += counts * self._size[queues]
            self._first[queues] = serials + 1
            more = self._tags[(serials + 1) % ring, queues]
            self._head[turn, ports] = np.where(serials + 1 < self._last[queues], more, math.inf)
            for at in np.flatnonzero(self._num_watched[ports]):
                found = self._watched.pop((int(queues[at]), int(serials[at])), None)
                if found is not None:
                    self._num_watched[ports[at]] -= len(found)
                    looking += found
        self._time(touched)
        return [message for message in looking if not self._watch(message)]

    def _watch(self, message: _Message) -> bool:
        """Let a message wait for the port that will serve it last, as far as is known now.

        Return False if all have served it.
        """
        route = message.route
        left = np.flatnonzero(self._first[route.queues] <= message.serials)
        if not len(left):
            return False
        at = left[0]
        if len(left) > 1:
            ports = route.ports[left]
            pace = self._num_here[ports] / self._rate[ports]
            gone = (self._clock.now_s - self._since_s[ports]) / pace
            at = left[((message.tags[left] - self._served[ports] - gone) * pace).argmax()]
        key = (int(route.queues[at]), int(message.serials[at]))
        self._watched.setdefault(key, []).append(message)
        self._num_watched[route.ports[at]] += 1
        return True
