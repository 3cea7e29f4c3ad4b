"""The comm lane: one thread that runs strategies' hooks in the order they were submitted.

Submit and forget: the compute lane goes on and waits only where it needs a result. Hooks start in
the program's order on each channel, the same on every rank. While one waits for its peers those on
other channels start, so that the wire stays full. Work that nothing could hide anyway runs inline
instead, in the caller's thread, when it is submitted: same order, no hand-over.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import greenlet
import torch

from syncline.comm.hub import ALONE, LONGEST_SLEEP_S, Hub

T = TypeVar("T")

_LOOK_S = 0.1
"""Seconds between two checks, by a waiting hook, whether its peers still live."""
_END_S = 5.0
"""How long `close` waits for a hook that hangs; the thread dies with the process then."""


@dataclass(frozen=True, eq=False, slots=True)
class Work:
    """Something to do, the channel that it may use, and how urgent its messages are."""

    channel: int
    urgency: int
    function: Callable[..., Any]
    args: tuple[Any, ...]


@dataclass(eq=False, slots=True)
class _Hook:
    """Work that has begun, and what it waits for if it has said so."""

    work: Work
    body: greenlet.greenlet
    is_over: Callable[[], bool] | None = None


def next_work(queue: Iterable[Work], flying: Iterable[int]) -> Work | None:
    """Return the first work whose channel is free and has none before it in the queue."""
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
        self._flying: dict[int, _Hook] = {}
        self._is_asleep = False
        self._looked = 0.0
        self._is_closing = False
        self._thread: threading.Thread | None = None
        self._waiting: list[Callable[[], None]] = []

    @property
    def has_thread(self) -> bool:
        return self._thread is not None

    def start_thread(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="syncline-comm", daemon=True)
            self._thread.start()

    def wake_on_failure(self, wake: Callable[[], None]) -> None:
        """Call `wake` when the lane fails, so that whoever waits for a result looks up."""
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
        """Wait, inside a hook, for what another hook does."""
        while not is_done():
            self.check()
            self.hub.sleep(is_done)

    def drain(self) -> None:
        """Return when everything submitted so far is done."""
        if self._thread is not None:
            done = threading.Event()
            wake = done.set
            self._waiting.append(wake)
            self.submit(done.set)
            if self.failure is None:
                done.wait()
            self._waiting.remove(wake)
        self.check()

    def call(self, function: Callable[..., T], *args: Any) -> T:
        """Run a function on the lane, after all before it, and return what it returns."""
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
        # Parameters make others wait for this lane; the lane itself never waits for them.
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            while not self._is_closing:
                try:
                    self._go_on()
                except BaseException as error:
                    self._flying.clear()
                    self._queue.clear()
                    self.fail(error)

    def _go_on(self) -> None:
        """Start what may start; if there is nothing, sleep, then let those under way look again."""
        if self.failure is not None:
            self._queue.clear()
        self._start()
        # In this order: a submitter that misses the flag has been seen by the second look.
        self._is_asleep = True
        if self._next() is None:
            self.hub.poll(LONGEST_SLEEP_S)
        self._is_asleep = False
        now = time.monotonic()
        must_look = self.hub.was_woken or now - self._looked > _LOOK_S
        self.hub.was_woken = False
        if must_look:
            self._looked = now
        while self._look_again(must_look):
            self._start()

    def _look_again(self, must_look: bool) -> bool:
        """Let those under way look, the most urgent first, until one ends: others may wait for it.

        Those that have said what they wait for need not be woken to find that it has not come.
        """
        for hook in sorted(self._flying.values(), key=lambda hook: hook.work.urgency):
            if must_look or hook.is_over is None or hook.is_over():
                self._switch(hook)
                if hook.body.dead:
                    return True
        return False

    def _start(self) -> None:
        """Start all work that may start."""
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
        if hook.body.dead:
            del self._flying[hook.work.channel]
