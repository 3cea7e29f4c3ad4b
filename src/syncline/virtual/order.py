"""Streams of fast links: flows of one stream begin one after the other, in their order.

Flows are rows of arrays, numbered by their places in `FastLinks`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

NO_FLOWS: Ints = np.zeros(0, dtype=np.int64)
NO_TIMES: Floats = np.zeros(0)


class Order:
    """Which flow of each stream is under way, and which wait for it."""

    def __init__(self, num_streams: int) -> None:
        self.none = num_streams
        """The number of a stream in which flows do not wait for each other."""
        self._num_sent = 0
        # By place.
        self._stream = np.zeros(0, dtype=np.int64)
        self._number = np.zeros(0, dtype=np.int64)
        """Flows that begin at the same time keep the order in which they were sent."""
        self._next = np.zeros(0, dtype=np.int64)
        """The place of the flow that waits for this one; -1 for none."""
        self._may_begin = np.zeros(0, dtype=bool)
        """Whether the flow before it has ended."""
        self._asked_s = np.zeros(0)
        """When a flow that waits was to begin."""
        # By stream.
        self._last = np.full(num_streams + 1, -1)
        """The last flow that is under way or waits; -1 for none."""
        self._num_open = np.zeros(num_streams + 1, dtype=np.int64)
        """How many flows were sent and have not ended."""

    def grow(self, more: int) -> None:
        """Make places for more flows."""
        self._stream = np.concatenate([self._stream, np.zeros(more, dtype=np.int64)])
        self._number = np.concatenate([self._number, np.zeros(more, dtype=np.int64)])
        self._next = np.concatenate([self._next, np.full(more, -1)])
        self._may_begin = np.concatenate([self._may_begin, np.zeros(more, dtype=bool)])
        self._asked_s = np.concatenate([self._asked_s, np.zeros(more)])

    def is_open(self, stream: int) -> bool:
        """Say whether flows of a stream were sent that have not ended."""
        return stream != self.none and bool(self._num_open[stream])

    def send(self, places: Ints, streams: Ints | int) -> None:
        """Note which streams flows belong to."""
        self._num_sent += 1
        self._number[places] = self._num_sent
        self._stream[places] = streams
        self._may_begin[places] = False
        if len(places) == 1:
            self._num_open[self._stream[places]] += 1
        else:
            np.add.at(self._num_open, self._stream[places], 1)

    def take(self, asking: Ints, asked_s: Floats) -> Ints:
        """Return which flows begin, of those that were to begin by now; the others wait."""
        begins = self._may_begin[asking] | (self._stream[asking] == self.none)
        found, asking, asked_s = asking[begins], asking[~begins], asked_s[~begins]
        if not len(asking):
            return found
        order = np.lexsort((self._number[asking], asked_s, self._stream[asking]))
        asking, asked_s = asking[order], asked_s[order]
        streams = self._stream[asking]
        differs = streams[1:] != streams[:-1]
        is_first, is_last = np.append(True, differs), np.append(differs, True)
        before = np.where(is_first, self._last[streams], np.append(-1, asking[:-1]))
        self._last[streams[is_last]] = asking[is_last]
        waits = before >= 0
        waiting = asking[waits]
        self._next[before[waits]] = waiting
        self._asked_s[waiting] = asked_s[waits]
        return np.concatenate([found, asking[~waits]])

    def end(self, places: Ints, ends_s: Floats) -> tuple[Ints, Floats]:
        """Note that flows have ended; return those that waited for them, and when they begin."""
        if len(places) == 1:
            return self._end_one(int(places[0]), float(ends_s[0]))
        streams = self._stream[places]
        np.subtract.at(self._num_open, streams, 1)
        after = self._next[places]
        has_next = after >= 0
        self._last[streams[~has_next]] = -1
        self._next[places] = -1
        after = after[has_next]
        self._may_begin[after] = True
        return after, np.maximum(self._asked_s[after], ends_s[has_next])

    def _end_one(self, place: int, end_s: float) -> tuple[Ints, Floats]:
        """Do the same for one flow: the most frequent case, in a fraction of the time."""
        stream, after = self._stream[place], int(self._next[place])
        self._num_open[stream] -= 1
        if after < 0:
            self._last[stream] = -1
            return NO_FLOWS, NO_TIMES
        self._next[place] = -1
        self._may_begin[after] = True
        return np.array([after]), np.array([max(float(self._asked_s[after]), end_s)])
