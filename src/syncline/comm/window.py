"""Windows: values and functions that a rank offers, for others to get or call at any time.

All ranks of a communicator make a window together; then each uses it without the others. Each may

- `publish` values; others `get` the latest version, whole, and learn its number;
- offer functions by name; others `call` one with values of their own, and get numbers back.

Calls are served one after the other on the owner's comm lane, between its own hooks: a rank deep
in backward still answers, and nothing else changes the owner's memory during a call. So a call
either happens wholly or not at all, also if the caller is killed in the middle. If a peer is gone,
only calls to that peer fail: they raise `PeerGone`.

Values passed to a call, and the memory for its answer, are lent until `wait` has returned.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from syncline.comm.base import Memory
from syncline.comm.context import Context
from syncline.comm.many_calls import OneByOne, PendingCalls, Targets
from syncline.comm.peer_waits import PeerWaits, id_of_call
from syncline.errors import CommError, PeerGone

MAX_NOTE_BYTES = 928
"""What a cell of shared memory holds beside its twelve words (`shared_window.py`)."""


@dataclass(eq=False)
class Call:
    """A call as its owner sees it."""

    sender: int
    """The caller's rank."""
    values: torch.Tensor | None
    out: torch.Tensor | None
    """The function writes its answer here."""
    note: bytes

    @classmethod
    def of(cls, rank: int, values: Memory | None, out: Memory | None, note: bytes) -> Call:
        """Return a call with the memory of `values` and `out`, on this rank."""
        mine = None if values is None else values.mine
        return cls(rank, mine, None if out is None else out.mine, note)


Function = Callable[[Call], int]
"""Serves a call; returns a number for the caller, such as the version that the call made."""


@dataclass(frozen=True)
class Counted:
    """A function that returns how many of its calls this rank has served, this one included.

    A call takes as long as any other with as many values, and no rank waits `until` it has come. So
    a simulation of sizes need not run the function for each call.
    """

    function: Function

    def __call__(self, call: Call) -> int:
        return self.function(call)


class Pending(Protocol):
    """A call or a get that is under way."""

    def is_over(self) -> bool: ...

    def wait(self) -> int:
        """Return the function's result, or the version of a get. Raises PeerGone."""

    @property
    def values(self) -> torch.Tensor:
        """The values of a get, valid after `wait` and until `release`."""

    def release(self) -> None:
        """Free the memory that `values` lies in."""


class Window(Protocol):
    """One rank's end of a window."""

    @property
    def num_calls(self) -> int:
        """Calls and gets to other ranks, so far."""

    @property
    def sent_bytes(self) -> int:
        """Bytes of values that this rank's calls and gets moved between ranks, both ways."""

    def publish(self, values: torch.Tensor) -> bool:
        """Let others get a copy of these values from now on.

        Return False if a reader still holds the old buffer; the old version then stays published.
        """

    def get(self, position: int) -> Pending:
        """Begin to get the latest version that a rank has published."""

    def call(
        self,
        position: int,
        function: str,
        values: Memory | None = None,
        out: Memory | None = None,
        note: bytes = b"",
    ) -> Pending:
        """Begin a call. `values` and `out` are memory of this communicator, or parts of it."""

    def call_all(
        self,
        function: str,
        targets: Targets,
        values: Memory,
        out: Memory,
        note: Callable[[int], bytes],
    ) -> PendingCalls:
        """Begin a call for each strip, with these parts of `values` and `out`.

        `note` returns the note for a strip, by its number.
        """

    def until(
        self,
        is_true: Callable[[], bool],
        why: Callable[[], str],
        late: Callable[[], Sequence[int]] | None = None,
    ) -> None:
        """Wait until `is_true`, which only calls from other ranks can change.

        `late` returns the ranks that it waits for: the first counts as hung after too long a wait.
        """

    def gone(self) -> frozenset[int]:
        """Return the positions of ranks that are known to have died, fallen silent or left."""


Functions = Mapping[str, Function]


class Done:
    """A call of a rank to itself, or a get that took no time."""

    def __init__(self, number: int, values: torch.Tensor | None = None) -> None:
        self._number = number
        self._values = values

    def is_over(self) -> bool:
        return True

    def wait(self) -> int:
        return self._number

    @property
    def values(self) -> torch.Tensor:
        assert self._values is not None
        return self._values

    def release(self) -> None:
        self._values = None


class Lost(Done):
    """A call to a rank that is already gone."""

    def __init__(self, rank: int) -> None:
        super().__init__(0)
        self._rank = rank

    def wait(self) -> int:
        raise PeerGone(self._rank)


def call_own_function(
    functions: Functions,
    rank: int,
    function: str,
    values: Memory | None,
    out: Memory | None,
    note: bytes,
) -> Done:
    """Call a function that this rank itself offers: nothing is sent."""
    return Done(functions[function](Call.of(rank, values, out, note)))


def bytes_moved(*memories: Memory | None) -> int:
    return sum(one.mine.numel() * one.mine.itemsize for one in memories if one is not None)


class ServedWindow(OneByOne):
    """What the real windows have in common: counting calls, sending and serving them."""

    def __init__(self, ranks: tuple[int, ...], context: Context, functions: Functions) -> None:
        self._ranks = ranks
        self._position = ranks.index(context.rank)
        self._context = context
        self._waits = PeerWaits(context)
        self._functions = functions
        self._numbers = {name: number for number, name in enumerate(functions)}
        self._in_order = list(functions.values())
        self.num_calls = self.sent_bytes = 0

    def call(
        self,
        position: int,
        function: str,
        values: Memory | None = None,
        out: Memory | None = None,
        note: bytes = b"",
    ) -> Pending:
        rank = self._ranks[position]
        if position == self._position:
            return call_own_function(self._functions, rank, function, values, out, note)
        if self._waits.is_gone(rank):
            return Lost(rank)
        if len(note) > MAX_NOTE_BYTES:
            raise CommError(f"a note of {len(note)} bytes is too long for a window")
        self._count(function, bytes_moved(values, out))
        return self._send(position, self._numbers[function], values, out, note)

    def _count(self, what: str, num_bytes: int) -> None:
        """Count a call or a get to another rank."""
        self.num_calls += 1
        self.sent_bytes += num_bytes
        self._context.traffic.add(self._context.hub.channel, what, num_bytes)

    def _send(
        self, position: int, function: int, values: Memory | None, out: Memory | None, note: bytes
    ) -> Pending:
        """Send a call to its owner, another rank."""
        raise NotImplementedError

    def serve(self, function: int, call: Call, name: str, number: int) -> int:
        """Serve a call; the window's name and the call's number tell it from others."""
        with torch.no_grad():
            serve = self._in_order[function]
            return self.record_served(lambda: serve(call), call.sender, name, number)

    def record_served(self, run: Callable[[], int], caller: int, name: str, number: int) -> int:
        """Run what serves a call; record it, if a trace is recorded."""
        recorder = self._context.traffic.recorder
        if recorder is None:
            return run()
        recorder.open()
        result = run()
        recorder.close_served(id_of_call(name, caller, self._context.rank, number), caller)
        return result

    def until(
        self,
        is_true: Callable[[], bool],
        why: Callable[[], str],
        late: Callable[[], Sequence[int]] | None = None,
    ) -> None:
        self._waits.until(is_true, why, late)

    def gone(self) -> frozenset[int]:
        return self._waits.gone(self._ranks)


class AloneWindow(OneByOne):
    """The window of a world of one."""

    num_calls = 0
    sent_bytes = 0

    def __init__(self, rank: int, functions: Functions) -> None:
        self._rank = rank
        self._functions = functions
        self._published: torch.Tensor | None = None
        self._version = 0

    def publish(self, values: torch.Tensor) -> bool:
        self._published = values.clone()
        self._version += 1
        return True

    def get(self, position: int) -> Pending:
        return Done(self._version, self._published)

    def call(
        self,
        position: int,
        function: str,
        values: Memory | None = None,
        out: Memory | None = None,
        note: bytes = b"",
    ) -> Pending:
        return call_own_function(self._functions, self._rank, function, values, out, note)

    def until(
        self,
        is_true: Callable[[], bool],
        why: Callable[[], str],
        late: Callable[[], Sequence[int]] | None = None,
    ) -> None:
        if not is_true():
            raise RuntimeError(f"a rank alone waits for calls that no other rank can make: {why()}")

    def gone(self) -> frozenset[int]:
        return frozenset()
