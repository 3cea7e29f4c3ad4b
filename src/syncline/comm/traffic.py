"""How many bytes a rank hands to its peers: counted once, for every communicator and window."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple


class Sent(NamedTuple):
    """One collective or window call of this rank."""

    channel: int
    what: str
    """The operation's name; of a window "get", or the name of the function that was called."""
    num_bytes: int


class Traffic:
    """What one rank has handed to its peers. The world's communicator shares it with subgroups.

    Bytes are payload, without headers, notes and tokens: over a network what the rank sends, in
    shared memory what peers read of its memory. A window's values are counted where the call is
    made, both ways, so the sum over ranks is right. What a rank does by itself is not counted.
    """

    def __init__(self) -> None:
        self.sent_bytes = 0
        self._apart_bytes = 0
        self._depth = 0
        self.log: list[Sent] | None = None
        """Set this to a list to have every collective and call of a step noted, in order."""

    @property
    def step_bytes(self) -> int:
        """What was sent in steps: all but what was sent inside `apart`."""
        return self.sent_bytes - self._apart_bytes

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Do not count as a step's what is sent inside: set-up, evaluation, saving."""
        before = self.sent_bytes
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                self._apart_bytes += self.sent_bytes - before

    def add(self, channel: int, what: str, num_bytes: int) -> None:
        self.sent_bytes += num_bytes
        if self.log is not None and not self._depth:
            self.log.append(Sent(channel, what, num_bytes))
