"""The comm lane: one thread that runs strategies' hooks in the order they were submitted.

Submit and forget: the compute lane goes on and waits only where it needs a result. Hooks start in
the program's order, the same on every rank. While one waits for its peers the next ones start, as
many as there are channels, so that the wire stays full; on one channel each waits for the one
before. Work that nothing could hide anyway runs inline instead, in the caller's thread: same
order, no hand-over.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import greenlet
import torch

from syncline.comm.hub import Hub

T = TypeVar("T")

ALONE = -1
"""The channel of work that starts when all before it is done, and is done before more starts."""


class Work(NamedTuple):
    """Something to do, and the channel that it may use."""

    channel: int
    function: Callable[..., Any]
    args: tuple[Any, ...]


class Lane:
    """A queue of work, run by a thread of its own once `start_thread` was called."""

    def __init__(self, hub: Hub | None = None) -> None:
        self.failure: BaseException | None = None
        self.hub = hub or Hub()
        self._queue: deque[Work] = deque()
        self._flying: dict[int, greenlet.greenlet] = {}
        self._is_asleep = False
        self._is_closing = False
        self._thread: threading.Thread | None = None
        self._waiting: list[Callable[[], None]] = []

    @property
    def has_thread(self) -> bool:
        return self._thread is not None

    def start_thread(self) -> None:
        if self._thread is None:
            self.run_inline()
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

    def submit(self, function: Callable[..., Any], *args: Any, channel: int = ALONE) -> None:
        self._queue.append(Work(channel, function, args))
        if self._is_asleep:
            self._is_asleep = False
            self.hub.wake()

    def until(self, is_done: Callable[[], bool]) -> None:
        """Wait, inside a hook, for what another hook does."""
        while not is_done():
            self.check()
            self.hub.sleep()

    def run_inline(self) -> None:
        """Run what was submitted, here and now, unless there is a thread for it."""
        while self._queue and self._thread is None:
            self.check()
            channel, function, args = self._queue.popleft()
            self.hub.channel = max(channel, 0)
            try:
                function(*args)
            except BaseException as error:
                self.fail(error)
                raise
            finally:
                self.hub.channel = 0

    def drain(self) -> None:
        """Return when everything submitted so far is done."""
        self.run_inline()
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
            self._thread.join(timeout=5.0)

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
        while self._queue and self._may_start(self._queue[0].channel):
            work = self._queue.popleft()
            hook = greenlet.greenlet(work.function)
            self._flying[work.channel] = hook
            self._switch(work.channel, hook, *work.args)
        # In this order: a submitter that misses the flag has been seen by the second look.
        self._is_asleep = True
        if not (self._queue and self._may_start(self._queue[0].channel)):
            self.hub.poll(1.0)
        self._is_asleep = False
        for channel, hook in list(self._flying.items()):
            self._switch(channel, hook)

    def _may_start(self, channel: int) -> bool:
        if channel == ALONE or ALONE in self._flying:
            return not self._flying
        return channel not in self._flying

    def _switch(self, channel: int, hook: greenlet.greenlet, *args: Any) -> None:
        self.hub.channel = max(channel, 0)
        try:
            hook.switch(*args)
        finally:
            self.hub.channel = 0
        if hook.dead:
            del self._flying[channel]
