"""The comm lane: one thread that runs strategies' hooks in the order they were submitted.

`submit` returns at once; the compute lane waits only where it needs a result. Hooks of a channel
start in the order of submission, which is the same on every rank. While one waits for its peers,
hooks on other channels start, so that the network stays busy. Without a thread, work runs inline
in `submit`, in the same order: small models have no compute behind which to hide it (decision 3).
"""

from __future__ import annotations

import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import greenlet
import torch

from syncline.comm.hub import ALONE, FIRST, LONGEST_SLEEP_S, Hub

T = TypeVar("T")

_LOOK_S = 0.1
"""Seconds between two checks, by a waiting hook, whether its peers still live."""
_END_S = 5.0
"""How long `close` waits for a hook that hangs. After that the thread ends with the process."""


@dataclass(frozen=True, eq=False, slots=True)
class Work:
    """A function to run, the channel that it may use, and how urgent its messages are."""

    channel: int
    urgency: int
    function: Callable[..., Any]
    args: tuple[Any, ...]


@dataclass(eq=False, slots=True)
class _Hook:
    """Work that has begun, and the condition it waits for, if it gave one to `sleep`."""

    work: Work
    body: greenlet.greenlet
    is_over: Callable[[], bool] | None = None


def next_work(queue: Iterable[Work], flying: Iterable[int]) -> Work | None:
    """Return the first work in the queue whose channel is free; None if there is none.

    `flying` are the channels of hooks under way. Work of one channel keeps its order.
    """
    busy = set(flying)
    for work in queue:
        if ALONE in busy or (work.channel == ALONE and busy):
            return None
        if work.channel not in busy:
            return work
        busy.add(work.channel)
    return None


class Lane:
    """Runs work at once, or on a thread of its own once `start_thread` was called."""

    def __init__(self, hub: Hub | None = None) -> None:
        self.failure: BaseException | None = None
        self.hub = hub or Hub()
        self._queue: deque[Work] = deque()
        self._aside: deque[Work] = deque()
        """Work that runs beside that of the queue."""
        self._beside: _Hook | None = None
        """Such work that has begun."""
        self._flying: dict[int, _Hook] = {}
        self._is_asleep = False
        self._looked = 0.0
        self._is_closing = False
        self._thread: threading.Thread | None = None
        self._waiting: list[Callable[[], None]] = []

    @property
    def has_thread(self) -> bool:
        return self._thread is not None

    @property
    def is_current(self) -> bool:
        """Whether the caller is the lane's own thread."""
        return self._thread is threading.current_thread()

    def start_thread(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="syncline-comm", daemon=True)
            self._thread.start()

    def wake_on_failure(self, wake: Callable[[], None]) -> None:
        """Call `wake` when the lane fails, so that threads that wait for a result see it."""
        self._waiting.append(wake)

    def fail(self, failure: BaseException) -> None:
        if self.failure is None:
            self.failure = failure
        for wake in self._waiting:
            wake()

    def check(self) -> None:
        if self.failure is not None:
            raise self.failure

    def submit(
        self, function: Callable[..., Any], *args: Any, channel: int = ALONE, urgency: int = 0
    ) -> None:
        if self._thread is None:
            self._run_now(function, args, channel)
            return
        self._queue.append(Work(channel, urgency, function, args))
        if self._is_asleep:
            self._is_asleep = False
            self.hub.wake()

    def begin_aside(self, function: Callable[..., None], *args: Any) -> Callable[[], None]:
        """Run work beside all other, in the order of these calls; return a function that waits.

        For communicators that no other work uses. Its messages go before all others.
        """
        if self._thread is None:
            self._run_now(function, args, 0)
            return lambda: None
        done = threading.Event()

        def run() -> None:
            function(*args)
            done.set()

        self._aside.append(Work(0, FIRST, run, ()))
        if self._is_asleep:
            self._is_asleep = False
            self.hub.wake()

        return functools.partial(self._wait_for, done)

    def _run_now(self, function: Callable[..., Any], args: tuple[Any, ...], channel: int) -> None:
        if self.failure is not None:
            raise self.failure
        hub = self.hub
        before, hub.channel = hub.channel, channel if channel > 0 else 0
        try:
            function(*args)
        except BaseException as error:
            self.fail(error)
            raise
        finally:
            hub.channel = before

    def until(self, is_done: Callable[[], bool]) -> None:
        """Wait, inside a hook, until another hook makes `is_done` true."""
        while not is_done():
            self.check()
            self.hub.sleep(is_done)

    def drain(self) -> None:
        """Return when everything submitted so far is done, but for work aside."""
        if self._thread is not None:
            done = threading.Event()
            self.submit(done.set)
            self._wait_for(done)
        self.check()

    def _wait_for(self, done: threading.Event) -> None:
        """Wait for an event that work on the lane sets; raise if the lane fails."""
        self._waiting.append(done.set)
        if self.failure is None:
            done.wait()
        self._waiting.remove(done.set)
        self.check()

    def call(self, function: Callable[..., T], *args: Any) -> T:
        """Run a function on the lane, after all earlier work, and return its result."""
        results: list[T] = []
        self.submit(lambda: results.append(function(*args)))
        self.drain()
        return results[0]

    def close(self) -> None:
        if self._thread is not None:
            self._is_closing = True
            self.hub.wake()
            self._thread.join(timeout=_END_S)

    def _run(self) -> None:
        torch.set_num_threads(1)
        # Uses of a parameter wait for this lane; on the lane itself they must not wait.
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            while not self._is_closing:
                try:
                    self._run_round()
                except BaseException as error:
                    self._flying.clear()
                    self._queue.clear()
                    self._aside.clear()
                    self._beside = None
                    self.fail(error)

    def _run_round(self) -> None:
        """Start work; when no more can start, sleep, then resume hooks under way."""
        if self.failure is not None:
            self._queue.clear()
            self._aside.clear()
        self._start()
        # In this order: if `submit` missed the flag, its work is already in the queue for _next.
        self._is_asleep = True
        if self._next() is None and (self._beside is not None or not self._aside):
            self.hub.poll(LONGEST_SLEEP_S)
        self._is_asleep = False
        now = time.monotonic()
        must_look = self.hub.was_woken or now - self._looked > _LOOK_S
        self.hub.was_woken = False
        if must_look:
            self._looked = now
        while self._resume_hooks(must_look):
            self._start()

    def _resume_hooks(self, must_look: bool) -> bool:
        """Resume hooks, the most urgent first, until one ends; say whether one has ended.

        A hook whose `is_over` is still false is not resumed, unless `must_look`.
        """
        beside = self._beside
        if beside is not None and (must_look or beside.is_over is None or beside.is_over()):
            self._switch(beside)
            if beside.body.dead:
                self._beside = None
                return True
        for hook in sorted(self._flying.values(), key=lambda hook: hook.work.urgency):
            if must_look or hook.is_over is None or hook.is_over():
                self._switch(hook)
                if hook.body.dead:
                    return True
        return False

    def _start(self) -> None:
        """Start all work that may start."""
        while self._aside and self._beside is None:
            first = self._aside.popleft()
            self._beside = _Hook(first, greenlet.greenlet(first.function))
            self._switch(self._beside)
            if self._beside.body.dead:
                self._beside = None
        while (work := self._next()) is not None:
            self._queue.remove(work)
            hook = self._flying[work.channel] = _Hook(work, greenlet.greenlet(work.function))
            self._switch(hook, *work.args)

    def _next(self) -> Work | None:
        return next_work(list(self._queue), self._flying)

    def _switch(self, hook: _Hook, *args: Any) -> None:
        self.hub.channel, self.hub.urgency = max(hook.work.channel, 0), hook.work.urgency
        try:
            hook.is_over = hook.body.switch(*args)
        finally:
            self.hub.channel = self.hub.urgency = 0
        if hook.body.dead and hook is not self._beside:
            del self._flying[hook.work.channel]
