"""Windows among the ranks of one machine: only what is published is copied.

A get reads the peer's memory in place. A rank has two buffers and publishes into the one that is
not current. A reader first marks the buffer that it reads, and the owner does not write a marked
buffer. So no rank reads half of one version and half of another, or waits for a frozen peer.

A call is a cell in shared memory and a write to the owner's eventfd. The cell says where the values
lie and where the answer goes; its number is written last. The owner reads and writes the caller's
memory directly. Stores must become visible in order, as in `shared_memory.py`: x86-64.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from syncline.comm.base import Memory
from syncline.comm.peer_waits import PeerWaits
from syncline.comm.window import Call, Functions, Lost, Pending, ServedWindow
from syncline.errors import CommError, PeerGone

if TYPE_CHECKING:
    from syncline.comm.shared_memory import SharedMemory

_CELL_BYTES = 1024
"""Twelve words and a note, which is large enough for a push (`strategies/terms.py`)."""
_RING = 32
"""Calls that a rank may have under way to one owner: reasoned, two for each of sixteen buckets."""

# Words of a cell. The caller writes _ASKED last, the owner writes _ANSWERED last.
_ASKED, _WINDOW, _FUNCTION, _ANSWERED = 0, 1, 2, 3
_RESULT, _NOTE_BYTES = 4, 5
_VALUES, _OUT = slice(6, 9), slice(9, 12)
_NOTE_AT = 96
_NOTHING = (-1, 0, 0)
_READ_S = 0.1
"""How long a reader may hold a buffer: reasoned, ten times what copying 50 MB takes."""


class SharedCalls:
    """Cells and doorbells between all ranks of a communicator, for all its windows."""

    def __init__(self, comm: SharedMemory) -> None:
        self._comm = comm
        self.name = "calls " + comm.context.names.take(comm.ranks)
        self._position, self._size = comm.position, comm.size
        self._waits = PeerWaits(comm.context)
        num_cells = self._size * self._size * _RING
        segment = memoryview(comm.star.segment(num_cells * _CELL_BYTES))
        self._bytes = segment
        self.words = segment.cast("q")
        self._bells = comm.star.share_eventfds(self._size)
        self._asked = [0] * self._size
        self._in_cell: dict[int, _Posted] = {}
        self._served = [0] * self._size
        self.windows: list[SharedWindow] = []
        self.fence = threading.Lock()
        comm.hub.watch(self._bells[self._position], select.EPOLLIN | select.EPOLLET, self._serve)

    def close(self) -> None:
        self._comm.hub.forget(self._bells[self._position])
        for bell in self._bells:
            os.close(bell)

    def _cell(self, caller: int, owner: int, number: int) -> int:
        """Return the first word of a cell. Numbers count from 1."""
        at = (caller * self._size + owner) * _RING + number % _RING
        return at * (_CELL_BYTES // 8)

    def post(
        self,
        window: int,
        owner: int,
        function: int,
        values: Memory | None,
        out: Memory | None,
        note: bytes,
    ) -> Pending:
        number = self._asked[owner] = self._asked[owner] + 1
        cell, words = self._cell(self._position, owner, number), self.words
        before = self._in_cell.get(cell)
        if before is not None:
            try:
                before.wait()  # the earlier call must read its answer before the cell is reused
            except PeerGone as gone:
                return Lost(gone.rank)
        words[cell + _WINDOW] = window
        words[cell + _FUNCTION] = function
        words[cell + _NOTE_BYTES] = len(note)
        for place, memory in ((_VALUES, values), (_OUT, out)):
            for word, value in zip(range(12)[place], self._where(memory), strict=True):
                words[cell + word] = value
        start = cell * 8 + _NOTE_AT
        self._bytes[start : start + len(note)] = note
        words[cell + _ASKED] = number
        self._ring(owner)
        self._waits.note_sent(self._comm.ranks[owner], self.name, number)
        posted = self._in_cell[cell] = _Posted(self, owner, cell, number)
        return posted

    def _where(self, memory: Memory | None) -> tuple[int, int, int]:
        """Return allocation, start and stop, by which the owner finds memory of this rank."""
        if memory is None:
            return _NOTHING
        if memory.origin is None or memory.owner is not self._comm:
            raise CommError("a call's values must lie in memory of the window's communicator")
        number, start = memory.origin
        return number, start, start + memory.mine.numel()

    def _ring(self, position: int) -> None:
        with self.fence:  # taking a lock is a full memory barrier
            pass
        os.eventfd_write(self._bells[position], 1)

    def wait(self, owner: int, is_over: Callable[[], bool], number: int) -> None:
        self._waits.wait(self._comm.ranks[owner], is_over, self.name, number)

    def _serve(self, events: int) -> None:
        words = self.words
        for caller in range(self._size):
            while True:
                number = self._served[caller] + 1
                cell = self._cell(caller, self._position, number)
                if words[cell + _ASKED] != number:
                    break
                self._served[caller] = number
                start = cell * 8 + _NOTE_AT
                call = Call(
                    self._comm.ranks[caller],
                    self._find(caller, cell, _VALUES),
                    self._find(caller, cell, _OUT),
                    bytes(self._bytes[start : start + words[cell + _NOTE_BYTES]]),
                )
                window = self.windows[words[cell + _WINDOW]]
                words[cell + _RESULT] = window.serve(
                    words[cell + _FUNCTION], call, self.name, number
                )
                words[cell + _ANSWERED] = number
                self._ring(caller)

    def _find(self, caller: int, cell: int, place: slice) -> torch.Tensor | None:
        allocation, start, stop = self.words[cell + place.start : cell + place.stop]
        if allocation < 0:
            return None
        return self._comm.allocations[allocation][caller][start:stop]


class _Posted:
    """A call that has been put into a cell."""

    def __init__(self, calls: SharedCalls, owner: int, cell: int, number: int) -> None:
        self._calls = calls
        self._owner = owner
        self._cell = cell
        self._number = number
        self._result: int | None = None

    def is_over(self) -> bool:
        words = self._calls.words
        if self._result is None and words[self._cell + _ANSWERED] == self._number:
            self._result = words[self._cell + _RESULT]
        return self._result is not None

    def wait(self) -> int:
        self._calls.wait(self._owner, self.is_over, self._number)
        assert self._result is not None
        return self._result

    @property
    def values(self) -> torch.Tensor:
        raise NotImplementedError("the answer lies in `out`")

    def release(self) -> None:
        pass


class SharedWindow(ServedWindow):
    """One rank's end of a window in shared memory."""

    def __init__(
        self, comm: SharedMemory, num_elements: int, dtype: torch.dtype, functions: Functions
    ) -> None:
        super().__init__(comm.ranks, comm.context, functions)
        self._calls = comm.calls
        self._size = comm.size
        nothing = torch.empty(0, dtype=dtype)
        empty = Memory(nothing, (nothing,) * self._size)
        self._published = [
            comm.allocate(num_elements, dtype) if num_elements else empty for _ in range(2)
        ]
        # A row for each rank: the version it published last, which lies in buffer version % 2;
        # then, for each reader, 1 + the buffer that it is reading, or 0.
        self._row = 1 + self._size
        self._board = memoryview(comm.star.segment(8 * self._size * self._row)).cast("q")
        self._is_blocked = False
        self._number = len(self._calls.windows)
        self._calls.windows.append(self)

    def publish(self, values: torch.Tensor) -> bool:
        at = self._position * self._row
        version = self._board[at] + 1
        spare = version % 2
        deadline = time.monotonic() + _READ_S
        while spare + 1 in self._readers(at):
            if self._is_blocked or time.monotonic() > deadline:
                # A reader still holds the buffer: the old version stays published, and the next
                # attempt does not wait for that reader again.
                self._is_blocked = True
                return False
            time.sleep(0.0005)  # a copy of 4 MB takes as long
        self._is_blocked = False
        self._published[spare].mine.copy_(values)
        self._board[at] = version
        return True

    def _readers(self, at: int) -> set[int]:
        with self._calls.fence:
            pass
        gone = self.gone()
        marks = enumerate(self._board[at + 1 : at + self._row].tolist())
        return {mark for reader, mark in marks if mark and reader not in gone}

    def get(self, position: int) -> Pending:
        rank = self._ranks[position]
        if self._waits.is_gone(rank):
            return Lost(rank)
        if position != self._position:
            mine = self._published[0].mine
            self._count("get", mine.numel() * mine.itemsize)
        return _Reading(self, position)

    def begin_reading(self, position: int) -> tuple[int, torch.Tensor]:
        """Mark a rank's latest version as being read; return its number and its values."""
        at = position * self._row
        mark = at + 1 + self._position
        while True:
            version = self._board[at]
            self._board[mark] = 1 + version % 2
            with self._calls.fence:
                pass
            # If it is still the latest, the owner sees the mark before it writes this buffer again.
            if self._board[at] == version:
                break
        peers = self._published[version % 2].peers
        assert peers is not None
        return version, peers[position]

    def end_reading(self, position: int) -> None:
        self._board[position * self._row + 1 + self._position] = 0

    def _send(
        self, position: int, function: int, values: Memory | None, out: Memory | None, note: bytes
    ) -> Pending:
        return self._calls.post(self._number, position, function, values, out, note)


class _Reading:
    """A get: `wait` takes the version that is latest then; `values` is the owner's own buffer."""

    def __init__(self, window: SharedWindow, position: int) -> None:
        self._window = window
        self._position = position

    def is_over(self) -> bool:
        return True

    def wait(self) -> int:
        version, self._values = self._window.begin_reading(self._position)
        return version

    @property
    def values(self) -> torch.Tensor:
        return self._values

    def release(self) -> None:
        self._window.end_reading(self._position)
