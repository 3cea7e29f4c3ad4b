"""Questions to the processes of an arm, and their answers.

A question goes to all of them, and each answers once. Every wait has an end: a process that fails,
ends or is silent raises `ArmFailed` with the reason.
"""

from __future__ import annotations

import json
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

MESSAGE_BYTES = 1 << 16  # the longest answer is a block's step times


class ArmFailed(Exception):
    """An arm cannot be measured; the message is the reason."""


class Channels:
    """One SEQPACKET socket for each rank, in rank order: one send is one recv."""

    def __init__(
        self, sockets: Sequence[socket.socket], how_it_ended: Callable[[int], str]
    ) -> None:
        """`how_it_ended` says in words what became of a rank whose socket was closed."""
        self._sockets = sockets
        self._how_it_ended = how_it_ended

    def ask(self, question: dict[str, Any], timeout_s: float) -> list[dict[str, Any]]:
        """Send a question to all ranks and return their answers in rank order."""
        message = json.dumps(question).encode()
        for rank, channel in enumerate(self._sockets):
            try:
                channel.send(message)
            except OSError as error:
                raise ArmFailed(self._how_it_ended(rank)) from error
        return self.collect(timeout_s)

    def collect(self, timeout_s: float) -> list[dict[str, Any]]:
        """Wait for one answer of each rank, in rank order; the first failure ends the wait."""
        deadline_s = time.monotonic() + timeout_s
        answers: dict[int, dict[str, Any]] = {}
        with selectors.DefaultSelector() as selector:
            for rank, channel in enumerate(self._sockets):
                selector.register(channel, selectors.EVENT_READ, rank)
            while len(answers) < len(self._sockets):
                ready = selector.select(deadline_s - time.monotonic())
                if not ready and time.monotonic() >= deadline_s:
                    silent = sorted(set(range(len(self._sockets))) - set(answers))
                    raise ArmFailed(f"no answer from ranks {silent} within {timeout_s:.0f} s")
                for key, _ in ready:
                    answers[key.data] = self._read(key.data)
                    selector.unregister(key.fileobj)
        return [answers[rank] for rank in range(len(self._sockets))]

    def close(self) -> None:
        for channel in self._sockets:
            channel.close()

    def _read(self, rank: int) -> dict[str, Any]:
        try:
            message = self._sockets[rank].recv(MESSAGE_BYTES)
        except OSError:
            message = b""
        if not message:
            raise ArmFailed(self._how_it_ended(rank))
        answer: dict[str, Any] = json.loads(message)
        if "error" in answer:
            raise ArmFailed(f"rank {rank}: {answer['error']}")
        return answer
