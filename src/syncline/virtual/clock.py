"""The virtual clock: a heap of (time, sequence number), and processes that sleep on it.

A process is a greenlet, plain blocking code: `sleep` and `Signal.wait` switch to the next process.
Events at the same time happen in the order in which they were scheduled, so the same program always
gives the same order.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any, TypeVar

import greenlet

from syncline.errors import DeadlockError

T = TypeVar("T")


class Process:
    """A process in virtual time. `waits_for` returns what it waits for, for error messages."""

    def __init__(self, name: str, body: greenlet.greenlet) -> None:
        self.name = name
        self.body = body
        self.waits_for: Callable[[], str] | None = None


class Clock:
    """Runs callbacks and processes in the order of virtual time."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._heap: list[tuple[float, int, Callable[..., Any], tuple[Any, ...]]] = []
        self._num_asked = 0
        self._processes: dict[greenlet.greenlet, Process] = {}
        self._main: greenlet.greenlet | None = None
        self._running: Process | None = None
        """The process that runs, or ran last."""
        self._measured_s: float | None = None
        """While `measure` runs: for how long the function has slept."""

    def at(self, time_s: float, call: Callable[..., Any], *args: Any) -> None:
        """Call `call` at a time, which must not lie in the past."""
        if time_s < self.now_s:
            raise ValueError(f"{time_s} s has passed: it is {self.now_s} s")
        self._num_asked += 1
        heapq.heappush(self._heap, (time_s, self._num_asked, call, args))

    def after(self, delay_s: float, call: Callable[..., Any], *args: Any) -> None:
        self.at(self.now_s + delay_s, call, *args)

    def spawn(self, name: str, function: Callable[..., Any], *args: Any) -> Process:
        """Begin a process now, after everything already scheduled for now."""
        body = greenlet.greenlet(function, parent=self._main)  # None: the caller of `run`
        process = self._processes[body] = Process(name, body)
        self.at(self.now_s, self._resume, process, *args)
        return process

    def kill(self, process: Process) -> None:
        """End a process: it never resumes."""
        self._processes.pop(process.body, None)

    def sleep(self, seconds: float) -> None:
        """Let virtual time pass, inside a process."""
        if self._measured_s is not None:
            self._measured_s += seconds
            return
        process = self._current()
        self.after(seconds, self._resume, process)
        self._switch_away()

    @property
    def is_measuring(self) -> bool:
        return self._measured_s is not None

    def measure(self, function: Callable[[], T]) -> tuple[T, float]:
        """Return a function's result, and how long it sleeps; no time passes meanwhile.

        The function may sleep, but not wait for a signal.
        """
        assert self._measured_s is None
        self._measured_s = 0.0
        try:
            result = function()
            return result, self._measured_s
        finally:
            self._measured_s = None

    def run(self) -> None:
        """Run all events; return when none is left.

        Raises DeadlockError if processes still wait then.
        """
        self._main = greenlet.getcurrent()
        heap = self._heap
        while heap:
            self.now_s, _, call, args = heapq.heappop(heap)
            call(*args)
        stuck = [process for process in self._processes.values() if process.waits_for is not None]
        if stuck:
            lines = [f"{process.name}: {process.waits_for()}" for process in stuck]  # type: ignore[misc]
            raise DeadlockError(self.now_s, lines)

    def _resume(self, process: Process, *args: Any) -> None:
        if process.body in self._processes:
            process.waits_for = None
            self._running = process
            process.body.switch(*args)
            if process.body.dead:
                self._processes.pop(process.body, None)

    def _current(self) -> Process:
        assert self._running is not None, "no process runs"
        return self._running

    def _switch_away(self) -> None:
        assert self._main is not None
        self._main.switch()


class Signal:
    """An event that processes can wait for."""

    __slots__ = ("_clock", "_is_set", "_waiting", "_whose")

    def __init__(self, clock: Clock, whose: str = "") -> None:
        """`whose` is put before the reason that `wait_for` gets."""
        self._clock = clock
        self._whose = whose
        self._waiting: list[Process] = []
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def clear(self) -> None:
        self._is_set = False

    @property
    def is_waited_for(self) -> bool:
        return bool(self._waiting)

    def set(self) -> None:
        self._is_set = True
        waiting, self._waiting = self._waiting, []
        clock = self._clock
        for process in waiting:
            clock.at(clock.now_s, clock._resume, process)

    def wait(self, why: Callable[[], str]) -> None:
        """Wait inside a process; if the signal never comes, the error message has `why()`."""
        if not self._is_set:
            process = self._clock._current()
            process.waits_for = why
            self._waiting.append(process)
            self._clock._switch_away()

    def wait_for(self, why: Callable[[], str]) -> None:
        """Wait inside a process; the reason in the error message begins with `whose`."""
        self.wait(lambda: self._whose + why())
