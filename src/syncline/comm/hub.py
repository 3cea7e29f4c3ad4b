"""Where the comm lane sleeps: one epoll for doorbells, connections and new work.

Code that has to wait checks its condition, and calls `sleep` while that is false. On the lane's
thread hooks are greenlets: `sleep` lets the other hooks run and returns when something has
happened. On any other thread it just sleeps. So a hook is plain blocking code, and yet several
hooks are under way at once.

Hooks that are under way at once use different channels. A channel's messages and meetings keep
their order, which is the same on every rank; those of two channels may overtake each other.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable

import greenlet

PATIENT = 1 << 16
"""A message with this urgency number or a higher one is sent only when the link is nearly idle.

Larger than any number of buckets: those are the urgency numbers of other messages.
"""

FIRST = -1
"""The urgency number of messages that go before all others: compute waits for them."""

NUM_CHANNELS = 5
"""One for collectives of the whole step, the others for buckets in turn.

Four buckets fill the link: while one is waited for, others are on their way (decision 7). A rank's
counts for all channels fit into one cache line of shared memory.
"""

LONGEST_SLEEP_S = 1.0
"""Every event wakes a sleeper; if a wake-up is lost, the run loses a second and does not hang."""

ALONE = -1
"""The channel of work that starts after all work before it and ends before any work after it."""


class Hub:
    """Sleeps in epoll for one thread at a time, and calls the handlers of events."""

    def __init__(self) -> None:
        self.channel = 0
        """The channel of the hook that runs."""
        self.urgency = 0
        """The urgency of the hook that runs: its messages go before those with a higher number."""
        self.was_woken = False
        """Whether `wake` was called since this was last set to False."""
        self.pause_s = 0.001
        """How long to let data gather before reading, while much is coming (decision 7)."""
        self.num_bulky = 0
        """Exchanges under way that take many reads each."""
        self._again: list[Callable[[], None]] = []
        self._poll = select.epoll()
        self._handlers: dict[int, Callable[[int], None]] = {}
        self._waker = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll.register(self._waker, select.EPOLLIN | select.EPOLLET)

    def watch(self, file: int, events: int, handler: Callable[[int], None] | None = None) -> None:
        """Wake up on these events; call the handler, if there is one, with those that came."""
        if handler is not None:
            self._handlers[file] = handler
        self._poll.register(file, events)

    def change(self, file: int, events: int) -> None:
        self._poll.modify(file, events)

    def forget(self, file: int) -> None:
        self._handlers.pop(file, None)
        self._poll.unregister(file)

    def look_again(self, look: Callable[[], None]) -> None:
        """Call `look` at the next poll, for a condition that causes no event."""
        self._again.append(look)

    def wake(self) -> None:
        """End the sleep, from any thread."""
        if self._waker >= 0:
            os.eventfd_write(self._waker, 1)

    def sleep(self, is_over: Callable[[], bool] | None = None) -> None:
        """Return when anything has happened, or after a second; the caller checks what it was.

        With `is_over` a hook is woken only when that is true, or now and then to check deadlines.
        """
        current = greenlet.getcurrent()
        if current.parent is None:
            self.poll(LONGEST_SLEEP_S)
        else:
            current.parent.switch(is_over)

    def poll(self, timeout_s: float) -> None:
        """Wait for events and call their handlers."""
        again, self._again = self._again, []
        if self.num_bulky or again:
            # Let more data come: this saves four of five calls; the kernel buffers meanwhile.
            time.sleep(self.pause_s)
        for file, events in self._poll.poll(0.0 if again else timeout_s):
            if file == self._waker:
                self.was_woken = True
            handler = self._handlers.get(file)
            if handler is not None:
                handler(events)
        for look in again:
            look()

    def close(self) -> None:
        waker, self._waker = self._waker, -1
        self._poll.close()
        os.close(waker)
