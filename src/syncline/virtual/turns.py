"""Turns: work of several processes that is done one at a time, first come, first served."""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Iterator

import greenlet
import numpy as np

from syncline.virtual.clock import Clock, Signal


class Turns:
    """One process at a time has the turn, and may take it again while it has it."""

    def __init__(self, clock: Clock, whose: str) -> None:
        self._clock = clock
        self._whose = whose
        self._holder: greenlet.greenlet | None = None
        self._depth = 0
        self._waiting: deque[tuple[greenlet.greenlet, Signal]] = deque()
        self._has_ended = False

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Wait inside a process until it is its turn, which ends with the block."""
        self._take()
        try:
            yield
        finally:
            self._give()

    def spend(self, seconds: float) -> None:
        """Let time pass inside a process, in its turn."""
        with self.turn():
            self._clock.sleep(seconds)

    def end(self) -> None:
        """Let everybody through: the rank has died, and no turn would ever end."""
        self._has_ended = True
        while self._waiting:
            self._waiting.popleft()[1].set()

    def _take(self) -> None:
        me = greenlet.getcurrent()
        if self._has_ended or self._holder is None:
            self._holder, self._depth = me, 1
        elif self._holder is me:
            self._depth += 1
        else:
            signal = Signal(self._clock)
            self._waiting.append((me, signal))
            signal.wait(lambda: f"waits for {self._whose}")

    def _give(self) -> None:
        self._depth -= 1
        if self._has_ended or self._depth:
            return
        self._holder = None
        if self._waiting:
            self._holder, signal = self._waiting.popleft()
            self._depth = 1
            signal.set()


class Bookings:
    """The lanes of many ranks whose calls are booked: by rank, in seconds."""

    def __init__(self, num_ranks: int) -> None:
        self.until_s = np.zeros(num_ranks)
        """When the lane has done all that has come to it."""
        self.call_s = np.zeros(num_ranks)
        """How long the last call takes that has come to it."""


class Booked:
    """Turns of calls whose lengths are known when they come, without a process for them.

    As with `Turns`, calls are served in the order in which they come, and a rank's own work waits
    for the call that is being served, not for those behind it. Calls that had come by then are not
    served later for it, but those that come afterwards are.
    """

    def __init__(self, clock: Clock, lanes: Bookings, rank: int) -> None:
        self._clock = clock
        self._lanes = lanes
        self._rank = rank

    def book(self, seconds: float) -> float:
        """Take the next turn for a call; return when it ends."""
        self._lanes.call_s[self._rank] = seconds
        return self._add(seconds)

    def spend(self, seconds: float) -> None:
        """Let time pass inside a process, in its turn, or in the turn that is being measured."""
        if self._clock.is_measuring:
            self._clock.sleep(seconds)
            return
        left_s = max(0.0, float(self._lanes.until_s[self._rank]) - self._clock.now_s)
        call_s = float(self._lanes.call_s[self._rank])
        self._add(seconds)
        if call_s:
            # What is left of the call that is served, if those that wait are as long. One that has
            # just begun, since this rank's last work has ended now, is waited for, too.
            left_s -= call_s * math.floor(left_s / call_s * (1 - 1e-9))
        self._clock.sleep(left_s + seconds)

    def end(self) -> None:
        """Do nothing: every turn ends by itself."""

    def _add(self, seconds: float) -> float:
        until_s = self._lanes.until_s
        end_s = max(float(until_s[self._rank]), self._clock.now_s) + seconds
        until_s[self._rank] = end_s
        return end_s
