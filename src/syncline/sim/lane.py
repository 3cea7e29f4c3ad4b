"""The comm lane in virtual time: the order of the real one, greenlets of the clock instead of a
thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from syncline.comm.hub import ALONE
from syncline.engine.lane import Work, next_work
from syncline.virtual.clock import Clock, Process, Signal


class VirtualLane:
    """A queue of work, started as soon as its turn has come."""

    def __init__(self, clock: Clock, name: str) -> None:
        self._clock = clock
        self._name = name
        self._queue: deque[Work] = deque()
        self._flying: dict[int, Process] = {}
        self._changed = Signal(clock)

    def submit(
        self, function: Callable[..., Any], *args: Any, channel: int = ALONE, urgency: int = 0
    ) -> None:
        self._queue.append(Work(channel, urgency, function, args))
        self._start()

    def until(self, is_done: Callable[[], bool], why: Callable[[], str]) -> None:
        """Wait, inside a process, for what a hook does."""
        while not is_done():
            self._changed.wait(why)

    def drain(self) -> None:
        """Return when everything submitted so far is done."""
        self.until(
            lambda: not self._queue and not self._flying, lambda: f"waits for the {self._name}"
        )

    def stop(self) -> None:
        """End everything where it stands: the rank is gone."""
        self._queue.clear()
        for process in self._flying.values():
            self._clock.kill(process)

    def _start(self) -> None:
        while (work := next_work(self._queue, self._flying)) is not None:
            self._queue.remove(work)
            self._flying[work.channel] = self._clock.spawn(self._name, self._run, work)

    def _run(self, work: Work) -> None:
        """Do work, and what may start when it is done: the first of it in the same process."""
        while True:
            work.function(*work.args)
            process = self._flying.pop(work.channel)
            if self._changed.is_waited_for:
                changed, self._changed = self._changed, Signal(self._clock)
                changed.set()
            following = next_work(self._queue, self._flying)
            if following is None:
                return
            work = following
            self._queue.remove(work)
            self._flying[work.channel] = process
            self._start()
