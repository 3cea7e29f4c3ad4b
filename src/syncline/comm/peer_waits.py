"""Waits for other ranks' answers, on a hub; a trace tells one call from another by its id."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from syncline.comm.context import Context
from syncline.errors import PeerGone, RankFailed


def id_of_call(window: str, caller: int, owner: int, number: int) -> str:
    """Return the id of a call, in a trace: the same on both ranks."""
    return f"{window}:{caller}>{owner}:{number}"


class PeerWaits:
    """Waits for peers on a hub, and raises when a peer cannot answer any more."""

    def __init__(self, context: Context) -> None:
        self._hub = context.hub
        self._control = context.control
        self._traffic = context.traffic
        self._rank = context.rank

    def note_sent(self, rank: int, name: str, number: int) -> None:
        """Record that a call was sent, if a trace is recorded."""
        recorder = self._traffic.recorder
        if recorder is not None:
            recorder.end_part("send", id_of_call(name, self._rank, rank, number), (rank,))

    def wait(self, rank: int, is_over: Callable[[], bool], name: str, number: int) -> None:
        """Return when `is_over`; raise PeerGone if the rank is gone by then.

        The window's name and the number of the call tell calls apart, in a trace.
        """
        recorder = self._traffic.recorder
        if recorder is None:
            self._wait(rank, is_over, "a call")
            return
        recorder.end_part("work")
        try:
            self._wait(rank, is_over, "a call")
        finally:
            recorder.end_part("call", id_of_call(name, self._rank, rank, number), (rank,))

    def _wait(self, rank: int, is_over: Callable[[], bool], what: str) -> None:
        started = time.monotonic()
        while not is_over():
            self._hub.sleep(is_over)
            if not is_over():
                self.check(rank)
                try:
                    self._control.check_waiting_for([rank], time.monotonic() - started, what)
                except RankFailed:
                    self.check(rank)  # PeerGone instead, if the others go on without it
                    raise

    def until(
        self,
        is_true: Callable[[], bool],
        why: Callable[[], str],
        late: Callable[[], Sequence[int]] | None,
    ) -> None:
        recorder = self._traffic.recorder
        before = "" if recorder is None else recorder.last_served
        if recorder is not None:
            recorder.end_part("work")
        started = time.monotonic()
        while not is_true():
            self._control.check()
            self._hub.sleep(is_true)
            waited_s = time.monotonic() - started
            if late is not None and waited_s > self._control.hung_s:
                for rank in late()[:1]:  # empty, if all have come or are gone by now
                    self._control.check_hung(rank, waited_s, why())
        if recorder is not None:
            recorder.end_wait_for_calls(before)

    def check(self, rank: int) -> None:
        if self.is_gone(rank):
            raise PeerGone(rank)

    def is_gone(self, rank: int) -> bool:
        return rank in self._control.gone or rank in self._control.left

    def gone(self, ranks: tuple[int, ...]) -> frozenset[int]:
        absent = self._control.gone.keys() | self._control.left
        return frozenset(at for at, rank in enumerate(ranks) if rank in absent)
