"""Streams in virtual time: messages from one rank to another keep their order, as over TCP."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable

Start = Callable[[Callable[[], None]], None]
"""Puts a message on the links, which call what they are given when it has arrived."""


class Streams:
    """Streams by sender and receiver: each carries one message at a time, the oldest."""

    def __init__(self) -> None:
        self._waiting: dict[Hashable, deque[tuple[Start, Callable[[], None]]]] = {}
        """Messages that have not arrived; the first of a stream is on the links."""

    def send(self, stream: Hashable, start: Start, done: Callable[[], None]) -> None:
        """Carry a message after those before it; call `done` when it has arrived."""
        waiting = self._waiting.setdefault(stream, deque())
        waiting.append((start, done))
        if len(waiting) == 1:
            self._carry_first(waiting)

    def _carry_first(self, waiting: deque[tuple[Start, Callable[[], None]]]) -> None:
        start, done = waiting[0]

        def arrive() -> None:
            waiting.popleft()
            if waiting:
                self._carry_first(waiting)
            done()

        start(arrive)
