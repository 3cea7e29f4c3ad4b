"""The comm lane in virtual time: a process of the clock instead of a thread, in the same order.

It runs one hook at a time, in the order in which they were submitted. A real lane has hooks of
several channels under way, whose messages go out by urgency; the effect is nearly the same as one
hook after the other in that order (decision 9).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from syncline.comm.virtual_endpoint import Endpoint
from syncline.virtual.clock import Clock, Process, Signal


class VirtualLane:
    """A queue of work; each begins when all work before it is done."""

    def __init__(self, clock: Clock, endpoint: Endpoint) -> None:
        self._clock = clock
        self._endpoint = endpoint
        self._name = f"comm lane of rank {endpoint.rank}"
        self._queue: deque[tuple[int, Callable[..., Any], tuple[Any, ...]]] = deque()
        self._process: Process | None = None
        self._aside: deque[tuple[Callable[..., Any], tuple[Any, ...], Signal]] = deque()
        self._beside: Process | None = None
        """The process that runs work beside that of the queue."""
        self._changed = Signal(clock)

    def submit(
        self, function: Callable[..., Any], *args: Any, channel: int = 0, urgency: int = 0
    ) -> None:
        self._queue.append((max(channel, 0), function, args))
        if self._process is None:
            self._process = self._clock.spawn(self._name, self._run)

    @property
    def now_s(self) -> float:
        return self._clock.now_s

    def begin_aside(self, function: Callable[..., None], *args: Any) -> Callable[[], None]:
        """Run work beside all other, in the order of these calls; return a function that waits."""
        done = Signal(self._clock, f"rank {self._endpoint.rank}, ")
        self._aside.append((function, args, done))
        if self._beside is None:
            self._beside = self._clock.spawn(f"{self._name}, aside", self._run_aside)

        def wait() -> None:
            if not done.is_set():
                done.wait(lambda: f"rank {self._endpoint.rank} waits for activations")

        return wait

    def _run_aside(self) -> None:
        while self._aside:
            function, args, done = self._aside.popleft()
            function(*args)
            done.set()
        self._beside = None

    def until(self, is_done: Callable[[], bool]) -> None:
        """Wait, inside a process, until a hook makes `is_done` true."""
        while not is_done():
            self._changed.wait(lambda: f"waits for the {self._name}")

    def drain(self) -> None:
        """Return when everything submitted so far is done."""
        self.until(lambda: self._process is None)

    def check(self) -> None:
        """Do nothing: in virtual time a failure ends the run at once."""

    def stop(self) -> None:
        """Drop all work and end the running hook: the rank has died."""
        self._queue.clear()
        self._aside.clear()
        for process in (self._process, self._beside):
            if process is not None:
                self._clock.kill(process)

    def _run(self) -> None:
        while self._queue:
            self._endpoint.channel, function, args = self._queue.popleft()
            function(*args)
        self._process = None
        if self._changed.is_waited_for:
            changed, self._changed = self._changed, Signal(self._clock)
            changed.set()
