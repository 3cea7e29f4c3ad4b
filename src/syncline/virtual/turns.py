"""Turns: work of several processes that is done one at a time, first come, first served."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator

import greenlet

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
        self._take()
        try:
            self._clock.sleep(seconds)
        finally:
            self._give()

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
