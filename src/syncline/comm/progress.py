"""Progress records: what each rank of a machine is doing. Peers can read them after its death."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import socket
import struct
import time
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from syncline.errors import CommError

if TYPE_CHECKING:
    from syncline.comm.rendezvous import Place

PHASES = (
    *("start", "forward", "backward", "step", "reduce", "update", "gather", "evaluate", "save"),
    "input",
)
_NUMBER_OF = {phase: number for number, phase in enumerate(PHASES)}
LEFT = -1
"""The phase of a rank that ended in good order."""
_RECORD = struct.Struct("<qqqq")
_NUMBER = struct.Struct("<q")
_PID_AT = _RECORD.size
_BEATS_AT = _PID_AT + _NUMBER.size
_PLACE_BYTES = _BEATS_AT + _NUMBER.size

Record = tuple[int, int, int, int]
"""Step, bucket, phase, number of phases begun. The rank furthest behind has begun the fewest."""


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

    def write(self, phase: str, bucket: int = -1, step: int = -1) -> None:
        """Record this rank's phase. `step` is ignored: a record has `self.step`, steps taken."""
        self._num_phases += 1
        number = _NUMBER_OF[phase]
        _RECORD.pack_into(self._map, self._offset, self.step, bucket, number, self._num_phases)

    def write_left(self) -> None:
        """Record that this rank ends in good order, for ranks that only see its process end."""
        _RECORD.pack_into(self._map, self._offset, self.step, -1, LEFT, self._num_phases)

    def read(self, local_rank: int) -> Record:
        return _RECORD.unpack_from(self._map, local_rank * _PLACE_BYTES)

    def pid(self, local_rank: int) -> int:
        """Return the pid of a rank; 0 as long as it has not started."""
        return self._number(local_rank, _PID_AT)

    def beat(self) -> None:
        """Record that this rank's control thread runs."""
        self._num_beats += 1
        _NUMBER.pack_into(self._map, self._offset + _BEATS_AT, self._num_beats)

    def num_beats(self, local_rank: int) -> int:
        return self._number(local_rank, _BEATS_AT)

    def _number(self, local_rank: int, at: int) -> int:
        (number,) = _NUMBER.unpack_from(self._map, local_rank * _PLACE_BYTES + at)
        return int(number)


def share_board(place: Place, memory_links: Mapping[int, socket.socket]) -> ProgressBoard:
    """Return the board of this rank's machine. Its leader makes it and passes it to the others."""
    local_size = len(place.local_ranks)
    if place.local_rank == 0:
        file = ProgressBoard.create(local_size)
        for sock in memory_links.values():
            # A member that has died since the meeting is noticed on its control connection.
            with contextlib.suppress(OSError):
                socket.send_fds(sock, [b"p"], [file])
    else:
        ((leader, sock),) = memory_links.items()
        try:
            _, files, flags, _ = socket.recv_fds(sock, 1, 1)
        except OSError:
            files, flags = [], 0
        if flags & socket.MSG_CTRUNC:  # the kernel drops descriptors above the limit
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        if not files:
            raise CommError(
                f"rank {place.rank} has met rank {leader}, which then did not meet all others of "
                f"its machine. Look at the log of rank {leader} first."
            )
        (file,) = files
    try:
        return ProgressBoard(file, local_size, place.local_rank)
    finally:
        os.close(file)


class Reports:
    """The latest progress record of every rank that this rank knows."""

    def __init__(self, place: Place, board: ProgressBoard) -> None:
        self._place = place
        self._board = board
        self.heard: dict[int, Record] = {}
        """Records from heartbeats: of other machines, and older ones of this machine."""
        self._begun: dict[int, int] = {}
        self._moved_at = time.monotonic()
        """When any other rank was last seen to begin a phase."""

    def local(self) -> dict[int, Record]:
        return {rank: self._board.read(at) for at, rank in enumerate(self._place.local_ranks)}

    def everybody(self) -> dict[int, Record]:
        return self.heard | self.local()

    def describe(self, rank: int) -> str:
        """Say where a rank was last seen."""
        if rank in self._place.local_ranks:
            return describe(self._board.read(self._place.local_ranks.index(rank)))
        record = self.heard.get(rank)
        return "before its first heartbeat" if record is None else describe(record)

    def has_left(self, rank: int) -> bool:
        """Say whether a rank of this machine wrote that it ends in good order."""
        return self._board.read(self._place.local_ranks.index(rank))[2] == LEFT

    def num_begun(self, absent: Collection[int]) -> dict[int, int]:
        """Return how many phases each other rank has begun, without the absent ones."""
        known = self.everybody()
        return {
            rank: record[3]
            for rank, record in known.items()
            if rank != self._place.rank and rank not in absent
        }

    def stuck_s(self, absent: Collection[int]) -> float:
        """Return for how many seconds no other rank has begun a phase."""
        begun, now = self.num_begun(absent), time.monotonic()
        if begun != self._begun:
            self._begun, self._moved_at = begun, now
        return now - self._moved_at


def describe(record: Record) -> str:
    """Return a progress record in words.

    >>> describe((17, 2, 4, 311))
    'at step 17 (reduce, bucket 2)'
    """
    step, bucket, phase, _ = record
    name = PHASES[phase] if 0 <= phase < len(PHASES) else "?"
    return f"at step {step} ({name}{f', bucket {bucket}' if bucket >= 0 else ''})"
