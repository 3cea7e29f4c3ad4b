"""Streams in virtual time: messages from one rank to another keep their order, as over TCP."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from syncline.virtual.fast_link import FastLinks
from syncline.virtual.link import Links, Port


class Message(NamedTuple):
    """A message, the ports that it passes, and what happens when it has arrived."""

    ports: list[Port]
    num_bytes: float
    done: Callable[[], None]


class Streams:
    """A stream from each rank to each other: it carries one message at a time, the oldest."""

    def __init__(self, links: Links | FastLinks) -> None:
        self._links = links
        self._waiting: dict[tuple[int, int], deque[Message]] = {}
        """By sender and receiver: messages that have not arrived; the first is on the links."""

    def send(self, sender: int, receiver: int, message: Message) -> None:
        waiting = self._waiting.setdefault((sender, receiver), deque())
        waiting.append(message)
        if len(waiting) == 1:
            self._carry_first(waiting)

    def _carry_first(self, waiting: deque[Message]) -> None:
        ports, num_bytes, done = waiting[0]

        def arrive() -> None:
            waiting.popleft()
            if waiting:
                self._carry_first(waiting)
            done()

        self._links.start(ports, num_bytes, arrive)
