"""Watches the processes of a machine's ranks: ends, missing heartbeats, and killing if needed."""

from __future__ import annotations

import contextlib
import os
import signal
import time

from syncline.comm.progress import ProgressBoard
from syncline.comm.rendezvous import Place


class LocalProcesses:
    """The other ranks of this machine, as processes. Used by the control thread."""

    def __init__(self, place: Place, board: ProgressBoard) -> None:
        self._place = place
        self._board = board
        self.files: dict[int, int] = {}
        """File descriptors that become readable when the process ends -> rank."""
        self._beats: dict[int, tuple[int, float]] = {}
        """How many beats each watched rank had made, and since when."""
        self._ends: dict[int, float] = {}
        """When to kill each rank that counts as gone, if its process still runs."""

    def watch(self) -> list[int]:
        """Begin to watch all; return the ranks whose process has already ended."""
        ended = []
        for at, rank in enumerate(self._place.local_ranks):
            if rank != self._place.rank:
                try:
                    self.files[os.pidfd_open(self._board.pid(at))] = rank
                except ProcessLookupError:
                    ended.append(rank)
        return ended

    def watched(self) -> set[int]:
        return set(self.files.values())

    def look_for_beat(self, rank: int, now: float) -> None:
        """Note the time if a rank's control thread has beaten since the last call."""
        beats = self._board.num_beats(self._place.local_ranks.index(rank))
        if beats != self._beats.get(rank, (-1, 0.0))[0]:
            self._beats[rank] = beats, now

    def last_beats(self) -> dict[int, float]:
        """Return when each watched rank was last seen to beat."""
        return {rank: when for rank, (_, when) in self._beats.items()}

    def forget_beats(self) -> None:
        """Forget when ranks last beat, after this rank itself was frozen for a while."""
        self._beats = {}

    def end_after(self, rank: int, seconds: float) -> None:
        """Kill a rank that counts as gone, if its process still runs after `seconds`."""
        self._ends[rank] = time.monotonic() + seconds

    def end_those_due(self) -> None:
        """Kill ranks that count as gone and are due: a frozen rank must not come back."""
        due = {rank for rank, when in list(self._ends.items()) if when <= time.monotonic()}
        for file, rank in list(self.files.items()):
            if rank in due:
                del self._ends[rank]
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(file, signal.SIGKILL)

    def close(self) -> None:
        for file in self.files:
            os.close(file)
