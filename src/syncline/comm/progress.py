"""What each rank of a machine is doing, in memory that its peers can read, also after its death."""

from __future__ import annotations

import mmap
import os
import struct

PHASES = ("start", "forward", "backward", "step", "reduce", "update", "gather", "evaluate", "save")
_NUMBER_OF = {phase: number for number, phase in enumerate(PHASES)}
LEFT = -1
"""The phase of a rank that ended in good order."""
_RECORD = struct.Struct("<qqqq")
_NUMBER = struct.Struct("<q")
_PID_AT = _RECORD.size
_BEATS_AT = _PID_AT + _NUMBER.size
_PLACE_BYTES = _BEATS_AT + _NUMBER.size

Record = tuple[int, int, int, int]
"""Step, bucket, phase, and how many phases were begun in all: the one furthest behind has least."""


class ProgressBoard:
    """The progress records of a machine's ranks, in memory that outlives any one of them."""

    def __init__(self, file: int, local_size: int, local_rank: int) -> None:
        self._map = mmap.mmap(file, local_size * _PLACE_BYTES)
        self._offset = local_rank * _PLACE_BYTES
        _NUMBER.pack_into(self._map, self._offset + _PID_AT, os.getpid())
        self.step = 0
        self._num_beats = 0
        self._num_phases = 0
        self.write("start")

    @staticmethod
    def create(local_size: int) -> int:
        file = os.memfd_create("syncline-progress", os.MFD_CLOEXEC)
        os.ftruncate(file, local_size * _PLACE_BYTES)
        return file

    def write(self, phase: str, bucket: int = -1) -> None:
        self._num_phases += 1
        number = _NUMBER_OF[phase]
        _RECORD.pack_into(self._map, self._offset, self.step, bucket, number, self._num_phases)

    def write_left(self) -> None:
        """Say that this rank ends in good order, for those who only see its process end."""
        _RECORD.pack_into(self._map, self._offset, self.step, -1, LEFT, self._num_phases)

    def read(self, local_rank: int) -> Record:
        return _RECORD.unpack_from(self._map, local_rank * _PLACE_BYTES)

    def pid(self, local_rank: int) -> int:
        """Return a rank's process; 0 as long as it has not come."""
        return self._number(local_rank, _PID_AT)

    def beat(self) -> None:
        """Say that this rank's control thread runs."""
        self._num_beats += 1
        _NUMBER.pack_into(self._map, self._offset + _BEATS_AT, self._num_beats)

    def num_beats(self, local_rank: int) -> int:
        return self._number(local_rank, _BEATS_AT)

    def _number(self, local_rank: int, at: int) -> int:
        (number,) = _NUMBER.unpack_from(self._map, local_rank * _PLACE_BYTES + at)
        return int(number)


def describe(record: Record) -> str:
    """Put a progress record into words. Step -1: nothing was heard yet.

    >>> describe((17, 2, 4, 311))
    'at step 17 (reduce, bucket 2)'
    """
    step, bucket, phase, _ = record
    name = PHASES[phase] if 0 <= phase < len(PHASES) else "?"
    return f"at step {step} ({name}{f', bucket {bucket}' if bucket >= 0 else ''})"
