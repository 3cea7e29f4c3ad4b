"""How many bytes a rank hands to its peers: counted once, for every communicator and window."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

from syncline.perf.recorder import Recorder


class Sent(NamedTuple):
    """One collective or window call of this rank."""

    channel: int
    what: str
    """The collective's name; for a window "get" or the name of the function that was called."""
    num_bytes: int


class Traffic:
    """Counts the bytes that one rank hands to its peers, in the world and all its subgroups.

    Bytes are payload, without headers, notes and tokens: over a network what the rank sends, in
    shared memory what peers read of its memory. Values of a window call are counted by the caller,
    both ways, so the sum over ranks is right. A rank's calls to itself are not counted.
    """

    def __init__(self) -> None:
        self.sent_bytes = 0
        self._apart_bytes = 0
        self._depth = 0
        self.log: list[Sent] | None = None
        """Set this to a list to record every collective and call of a step, in order."""
        self.recorder: Recorder | None = None
        """Set this to record what the comm lane's time is spent on."""

    @property
    def step_bytes(self) -> int:
        """Bytes sent in steps: all but those sent inside `apart`."""
        return self.sent_bytes - self._apart_bytes

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Leave what is sent inside out of `step_bytes`: set-up, evaluation, saving."""
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
        recorder = self.recorder  # another thread may stop recording
        if recorder is not None and not self._depth:
            recorder.add_bytes(num_bytes)

    def spent(self, kind: str) -> None:
        """Tell the recorder, if there is one, what the hook has done since its last part."""
        recorder = self.recorder
        if recorder is not None:
            recorder.end_part(kind)

    @contextlib.contextmanager
    def task(self, kind: str, after: str) -> Iterator[None]:
        """Record what is done inside as a task of the comm lane, after all of kind `after`."""
        recorder = self.recorder
        if recorder is None:
            yield
            return
        recorder.open()
        try:
            yield
        finally:
            recorder.close(kind, -1, recorder.step, recorder.after_all(after))
