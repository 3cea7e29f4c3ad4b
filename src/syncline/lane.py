"""The comm lane: one thread that runs strategies' hooks in the order they were submitted.

Submit and forget: the compute lane goes on and waits only where it needs a result. The order is
the program's order, the same on every rank, so collectives cannot deadlock. Work that nothing
could hide anyway runs inline instead, in the caller's thread: same order, no hand-over.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

Work = tuple[Callable[..., Any], tuple[Any, ...]]


class Lane:
    """A queue of work, run by a thread of its own once `start_thread` was called."""

    def __init__(self) -> None:
        self.failure: BaseException | None = None
        self._inline: deque[Work] = deque()
        self._queue: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
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

    def submit(self, function: Callable[..., Any], *args: Any) -> None:
        if self._thread is None:
            self._inline.append((function, args))
        else:
            self._queue.put((function, args))

    def run_inline(self) -> None:
        """Run what was submitted, here and now, unless there is a thread for it."""
        while self._inline:
            self.check()
            function, args = self._inline.popleft()
            try:
                function(*args)
            except BaseException as error:
                self.fail(error)
                raise

    def drain(self) -> None:
        """Return when everything submitted so far is done."""
        self.run_inline()
        if self._thread is not None:
            done = threading.Event()
            wake = done.set
            self._waiting.append(wake)
            self._queue.put((done.set, ()))
            if self.failure is None:
                done.wait()
            self._waiting.remove(wake)
        self.check()

    def close(self) -> None:
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(timeout=5.0)

    def _run(self) -> None:
        torch.set_num_threads(1)
        # Parameters make others wait for this lane; the lane itself never waits for them.
        with torch._C.DisableTorchFunctionSubclass():
            while (work := self._queue.get()) is not None:
                if self.failure is not None:
                    continue
                function, args = work
                try:
                    function(*args)
                except BaseException as error:
                    self.fail(error)
