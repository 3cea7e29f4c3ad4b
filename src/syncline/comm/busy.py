"""When something was under way, counted once however many of its kind overlap."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

_KEPT = 4096
"""Of the latest intervals: more than the exchanges of a few steps."""


class BusyTime:
    """The union of intervals that begin and end in any order, on one thread.

    >>> now = iter([0.0, 4.0])
    >>> busy = BusyTime(lambda: next(now))
    >>> busy.begin(), busy.begin(), busy.end(), busy.end()
    (None, None, None, None)
    >>> busy.total_s, busy.between_s(2.0, 9.0)
    (4.0, 2.0)
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.total_s = 0.0
        """Of the intervals that are over."""
        self._now = now
        self._num_open = 0
        self._opened_s = 0.0
        self._latest: deque[tuple[float, float]] = deque(maxlen=_KEPT)

    def begin(self) -> None:
        if not self._num_open:
            self._opened_s = self._now()
        self._num_open += 1

    def end(self) -> None:
        self._num_open -= 1
        if not self._num_open:
            ended_s = self._now()
            self.total_s += ended_s - self._opened_s
            self._latest.append((self._opened_s, ended_s))

    def between_s(self, start_s: float, end_s: float) -> float:
        """Return how long it was under way between two moments of a short time ago.

        Another thread may call it. An interval that is still open counts until `end_s`.
        """
        found = max(0.0, end_s - max(start_s, self._opened_s)) if self._num_open else 0.0
        for began_s, ended_s in reversed(tuple(self._latest)):
            if ended_s <= start_s:
                break
            found += max(0.0, min(end_s, ended_s) - max(start_s, began_s))
        return found
