"""Where the comm lane sleeps: one epoll for doorbells, connections and new work.

Code that has to wait looks whether what it waits for has come, and otherwise calls `sleep`. On the
lane's thread hooks are greenlets: `sleep` lets the others run and comes back when something has
happened. Anywhere else it just sleeps. So a hook is written as if it were alone, and several are
under way at once.

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
"""From this urgency on a message is sent only when little else is on the way.

Larger than any number of buckets, which order the urgent ones.
"""

NUM_CHANNELS = 5
"""One for what belongs to a step as a whole, the others for buckets in turn.

Four buckets fill the wire: while one is waited for, others are on their way (decision 7). A rank's
counts for all of them fit into one cache line of shared memory.
"""

LONGEST_SLEEP_S = 1.0
"""Everything wakes a sleeper; should a wake-up be lost, it costs a second and not the run."""

ALONE = -1
"""The channel of work that starts when all before it is done, and is done before more starts."""


class Hub:
    """Sleeps for one thread at a time, and calls back what has happened."""

    def __init__(self) -> None:
        self.channel = 0
        """Of the hook that runs."""
        self.urgency = 0
        """Of the hook that runs: what it sends goes before anything with a higher number."""
        self.was_woken = False
        """Whether `wake` was called since this was last set to False."""
        self.pause_s = 0.001
        """How long to let data gather before reading, while there is much (figures: decision 7)."""
        self.num_bulky = 0
        """Exchanges under way that take many reads each."""
        self._again: list[Callable[[], None]] = []
        self._poll = select.epoll()
        self._handlers: dict[int, Callable[[int], None]] = {}
        self._waker = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll.register(self._waker, select.EPOLLIN | select.EPOLLET)

    def watch(self, file: int, events: int, handler: Callable[[int], None] | None = None) -> None:
        """Wake up on these events; tell the handler, if there is one, which they were."""
        if handler is not None:
            self._handlers[file] = handler
        self._poll.register(file, events)

    def change(self, file: int, events: int) -> None:
        self._poll.modify(file, events)

    def forget(self, file: int) -> None:
        self._handlers.pop(file, None)
        self._poll.unregister(file)

    def look_again(self, look: Callable[[], None]) -> None:
        """Call back in a moment, for what no event announces."""
        self._again.append(look)

    def wake(self) -> None:
        """End the sleep, from any thread."""
        if self._waker >= 0:
            os.eventfd_write(self._waker, 1)

    def sleep(self, is_over: Callable[[], bool] | None = None) -> None:
        """Return when anything has happened, or after a second; the caller looks what it was.

        With `is_over` a hook is woken only when that is true, or to look at the clock now and then.
        """
        current = greenlet.getcurrent()
        if current.parent is None:
            self.poll(LONGEST_SLEEP_S)
        else:
            current.parent.switch(is_over)

    def poll(self, timeout_s: float) -> None:
        """Wait for events and hand them out."""
        again, self._again = self._again, []
        if self.num_bulky or again:
            # Let more of it come: a fifth of the calls, and the kernel's buffers bridge the pause.
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
