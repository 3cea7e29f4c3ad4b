"""Gathers optimizer state from the ranks' strips into whole values per parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
import torch

from syncline.comm.alone import Alone
from syncline.comm.base import Communicator, exchange_bytes
from syncline.comm.window import Call
from syncline.engine.bucket import Bucket, Slot
from syncline.engine.optimizer import flatten_like

State = dict[str, dict[str, Any]]
"""By parameter name and by the optimizer's own keys."""
_CHUNK_BYTES = 1 << 20
"""How much one call reads: enough to outweigh the call's cost, and little memory."""
_LIST = -1
"""In place of an entry's number: the list of a rank's entries itself."""


class _Entry(msgspec.Struct):
    """One state value of one piece of a parameter, as its owner holds it."""

    name: str
    start: int
    stop: int
    key: str
    dtype: str = ""
    is_spread: bool = False
    """Whether the value has one number for each element, or belongs to the parameter as a whole."""
    plain: Any = None
    shape: list[int] = []


def _held(bucket: Bucket) -> list[tuple[_Entry, torch.Tensor | None]]:
    """List the entries of this rank's strip of a bucket, in a fixed order."""
    found: list[tuple[_Entry, torch.Tensor | None]] = []
    for slot in bucket.slots:
        for first, last, state in bucket.optimizer.held_of(slot):
            start, stop = first - slot.offset, last - slot.offset
            for key, value in sorted(state.items()):
                entry = _Entry(slot.name, start, stop, key)
                if not isinstance(value, torch.Tensor):
                    entry.plain = value
                    found.append((entry, None))
                    continue
                entry.dtype = str(value.dtype).removeprefix("torch.")
                entry.shape = list(value.shape)
                entry.is_spread = value.dim() > 0 and value.numel() == stop - start
                is_whole = value.shape == slot.parameter.shape
                flat = flatten_like(slot.parameter, value) if is_whole else value.reshape(-1)
                found.append((entry, flat.contiguous()))
    return found


def gather_optimizer_state(slots: Sequence[Slot], buckets: Sequence[Bucket]) -> State:
    """Return the whole state on every rank, each value shaped like its parameter.

    A collective of the ranks that hold a bucket's strips. A rank that updates everything has the
    whole state already.
    """
    whole: State = {}
    by_comm: dict[Communicator, list[Bucket]] = {}
    for bucket in buckets:
        comm = bucket.comm
        if bucket.family.updates == "each":
            comm = _alone
        by_comm.setdefault(comm, []).append(bucket)
    for comm, some in by_comm.items():
        whole |= _gather_among(slots, some, comm)
    return whole


_alone = Alone()


def _gather_among(slots: Sequence[Slot], buckets: Sequence[Bucket], comm: Communicator) -> State:
    mine = [held for bucket in buckets for held in _held(bucket)]

    def broadcast(root: int, number: int, size: int, dtype: torch.dtype) -> torch.Tensor:
        value = mine[number][1] if root == comm.position else torch.empty(size, dtype=dtype)
        assert value is not None
        comm.broadcast(value, root)
        return value

    listed = exchange_bytes(comm, msgspec.json.encode([entry for entry, _ in mine]))
    return _put_together(slots, enumerate(listed), broadcast)


class StateWindow:
    """A window through which a rank can read the other ranks' optimizer state.

    All ranks make it together. The state is consistent if no rank updates while it is read.
    """

    def __init__(self, comm: Communicator, buckets: Sequence[Bucket]) -> None:
        self._buckets = buckets
        self._held: list[tuple[_Entry, torch.Tensor | None]] = []
        self._inbox = comm.allocate(_CHUNK_BYTES, torch.uint8)
        functions = {"list": self._serve_list, "read": self._serve_read}
        self._window = comm.window(0, torch.uint8, functions)

    def gather(self, slots: Sequence[Slot], positions: Iterable[int]) -> State:
        """Return the whole state, read from the ranks in `positions`."""
        listed = []
        for position in positions:
            num_bytes = self._window.call(position, "list").wait()
            listed.append((position, bytes(self._read(position, _LIST, num_bytes).numpy())))

        def read(root: int, number: int, size: int, dtype: torch.dtype) -> torch.Tensor:
            return self._read(root, number, size * dtype.itemsize).view(dtype)

        return _put_together(slots, listed, read)

    def _read(self, position: int, number: int, num_bytes: int) -> torch.Tensor:
        found = torch.empty(num_bytes, dtype=torch.uint8)
        for start in range(0, num_bytes, _CHUNK_BYTES):
            part = self._inbox.part(0, min(_CHUNK_BYTES, num_bytes - start))
            self._window.call(position, "read", None, part, b"%d %d" % (number, start)).wait()
            found[start : start + _CHUNK_BYTES] = part.mine
        return found

    def _serve_list(self, call: Call) -> int:
        """List this rank's entries; return the length of the list in bytes."""
        self._held = [held for bucket in self._buckets for held in _held(bucket)]
        text = msgspec.json.encode([entry for entry, _ in self._held])
        self._list = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        return len(text)

    def _serve_read(self, call: Call) -> int:
        assert call.out is not None
        number, start = map(int, call.note.split())
        held = self._list if number == _LIST else self._held[number][1]
        assert held is not None
        call.out.copy_(held.view(torch.uint8)[start : start + call.out.numel()])
        return 0


def _put_together(
    slots: Sequence[Slot],
    listed: Iterable[tuple[int, bytes]],
    value_of: Callable[[int, int, int, torch.dtype], torch.Tensor],
) -> State:
    """Join the ranks' entries to whole values.

    `value_of(position, number, size, dtype)` returns the value of a position's entry.
    """
    shapes = {slot.name: slot.parameter for slot in slots}
    whole: State = {}
    for position, text in listed:
        for number, entry in enumerate(msgspec.json.decode(text, type=list[_Entry])):
            state = whole.setdefault(entry.name, {})
            if not entry.dtype:
                state[entry.key] = entry.plain
                continue
            dtype: torch.dtype = getattr(torch, entry.dtype)
            size = entry.stop - entry.start if entry.is_spread else max(1, _product(entry.shape))
            value = value_of(position, number, size, dtype)
            if not entry.is_spread:
                state[entry.key] = value.view(entry.shape).clone()
                continue
            parameter = shapes[entry.name]
            if entry.key not in state:
                state[entry.key] = torch.zeros_like(parameter, dtype=dtype).detach()
            target = state[entry.key]
            target.as_strided((target.numel(),), (1,))[entry.start : entry.stop] = value
    return whole


def _product(shape: Sequence[int]) -> int:
    size = 1
    for length in shape:
        size *= length
    return size
