"""Puts optimizer state together: from the ranks' strips to whole values by parameter.

An owner lists its entries (`held`), each with the parameter's elements that it belongs to. The
values of all owners together are the state as torch's optimizer has it on one rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import torch

from syncline.comm.alone import Alone
from syncline.comm.base import Communicator, exchange_bytes
from syncline.comm.window import Call
from syncline.engine.bucket import Bucket, Slot
from syncline.engine.strip_state import flatten_like, is_spread, zeros_like

State = dict[str, dict[str, Any]]
"""By parameter name and by the optimizer's own keys."""
_CHUNK_BYTES = 1 << 20
"""How much one call reads: enough to outweigh the call's cost, and little memory."""
_LIST = -1
"""In place of an entry's number: the list of a rank's entries itself."""


class Entry(msgspec.Struct):
    """One state value of one piece of a parameter, as its owner holds it."""

    name: str
    start: int
    stop: int
    key: str
    dtype: str = ""
    """Empty if the value is no tensor."""
    is_spread: bool = False
    """Whether the value has one number for each element, or belongs to the parameter as a whole."""
    plain: Any = None
    shape: list[int] = []

    @property
    def size(self) -> int:
        """How many numbers the value has."""
        if self.is_spread:
            return self.stop - self.start
        size = 1
        for length in self.shape:
            size *= length
        return size

    def empty(self) -> torch.Tensor:
        """Return flat memory for the value."""
        dtype = getattr(torch, self.dtype, None)
        if not isinstance(dtype, torch.dtype) or self.size < 0:
            raise ValueError(f"no values of type {self.dtype!r:.20} and shape {self.shape}")
        return torch.empty(self.size, dtype=dtype)


Held = tuple[Entry, torch.Tensor | None]
"""An entry and its value, flat; None if the entry holds the value itself."""


def bytes_of(flat: torch.Tensor) -> memoryview:
    """Return the memory of a flat tensor."""
    array: Any = flat.view(torch.uint8).numpy()
    return memoryview(array)


def encode_entries(held: Iterable[Held]) -> bytes:
    return msgspec.msgpack.encode([entry for entry, _ in held])


def decode_entries(data: bytes) -> list[Entry]:
    return msgspec.msgpack.decode(data, type=list[Entry])


def held_by(bucket: Bucket, *, before_load: bool = False) -> list[Held]:
    """Return copies of this rank's entries of a bucket, in a fixed order.

    `before_load`: as they were before what was loaded since the last update.
    """
    found: list[Held] = []
    with bucket.optimizer.lock, torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        for slot in bucket.slots:
            for first, last, state in bucket.optimizer.held_of(slot, before_load=before_load):
                start = slot.first_element + first - slot.offset
                stop = start + last - first
                found += [_entry_of(slot, start, stop, *pair) for pair in sorted(state.items())]
    return found


def _entry_of(slot: Slot, start: int, stop: int, key: str, value: Any) -> Held:
    entry = Entry(slot.name, start, stop, key)
    if not isinstance(value, torch.Tensor):
        entry.plain = value
        return entry, None
    entry.dtype = str(value.dtype).removeprefix("torch.")
    entry.shape = list(value.shape)
    entry.is_spread = is_spread(value, stop - start)
    if value.shape == slot.parameter.shape:
        return entry, flatten_like(slot.parameter, value)
    return entry, value.detach().reshape(-1).clone()


def put_together(slots: Sequence[Slot], held: Iterable[Held]) -> State:
    """Join the entries of all owners to whole values, each shaped like its parameter."""
    by_name = {slot.name: slot for slot in slots}
    whole: State = {}
    for entry, value in held:
        # Not around the loop: the next entry may take time, in which other code would run in these
        # modes on the virtual clock.
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            _put_entry(whole, by_name, entry, value)
    return {slot.name: whole[slot.name] for slot in slots if slot.name in whole}


def _put_entry(
    whole: State, slots: Mapping[str, Slot], entry: Entry, value: torch.Tensor | None
) -> None:
    state = whole.setdefault(entry.name, {})
    if value is None:
        state[entry.key] = entry.plain
    elif not entry.is_spread:
        state[entry.key] = value.view(entry.shape).clone()
    else:
        if entry.key not in state:
            state[entry.key] = zeros_like(slots[entry.name], value.dtype)
        target = state[entry.key]
        target.as_strided((target.numel(),), (1,))[entry.start : entry.stop] = value


def gather_optimizer_state(slots: Sequence[Slot], buckets: Sequence[Bucket]) -> State:
    """Return the whole state on every rank, each value shaped like its parameter.

    A collective of the ranks that hold a bucket's strips. A rank that updates everything has the
    whole state already.
    """
    by_comm: dict[Communicator, list[Bucket]] = {}
    for bucket in buckets:
        comm = _alone if bucket.family.updates == "each" else bucket.holders
        by_comm.setdefault(comm, []).append(bucket)
    return put_together(
        slots, (held for comm, some in by_comm.items() for held in _exchange(some, comm))
    )


_alone = Alone()


def _exchange(buckets: Sequence[Bucket], comm: Communicator) -> Iterator[Held]:
    mine = [held for bucket in buckets for held in held_by(bucket)]
    listed = exchange_bytes(comm, encode_entries(mine))
    for root, data in enumerate(listed):
        for number, entry in enumerate(decode_entries(data)):
            value = mine[number][1] if root == comm.position else None
            if entry.dtype:
                value = entry.empty() if value is None else value
                comm.broadcast(value, root)
            yield entry, value


class StateWindow:
    """A window through which a rank can read the other ranks' optimizer state.

    All ranks make it together. Each rank's part is as it was at one moment.
    """

    def __init__(self, comm: Communicator, buckets: Sequence[Bucket]) -> None:
        self._buckets = buckets
        self._listed: dict[int, tuple[torch.Tensor, list[Held]]] = {}
        """By the rank that reads: a copy of the state when it asked for the list."""
        self._inbox = comm.allocate(_CHUNK_BYTES, torch.uint8)
        functions = {"list": self._serve_list, "read": self._serve_read, "end": self._serve_end}
        self._window = comm.window(0, torch.uint8, functions)

    def gather(self, slots: Sequence[Slot], positions: Iterable[int]) -> State:
        """Return the whole state, read from the ranks in `positions`."""
        return put_together(slots, (held for at in positions for held in self._held_at(at)))

    def _held_at(self, position: int) -> Iterator[Held]:
        num_bytes = self._window.call(position, "list").wait()
        listed = self._read(position, _LIST, torch.empty(num_bytes, dtype=torch.uint8))
        for number, entry in enumerate(decode_entries(bytes(listed.numpy()))):
            yield entry, self._read(position, number, entry.empty()) if entry.dtype else None
        self._window.call(position, "end").wait()

    def _read(self, position: int, number: int, found: torch.Tensor) -> torch.Tensor:
        data = found.view(torch.uint8)
        for start in range(0, data.numel(), _CHUNK_BYTES):
            part = self._inbox.part(0, min(_CHUNK_BYTES, data.numel() - start))
            self._window.call(position, "read", None, part, b"%d %d" % (number, start)).wait()
            data[start : start + _CHUNK_BYTES] = part.mine
        return found

    def _serve_list(self, call: Call) -> int:
        """List this rank's entries; return the length of the list in bytes."""
        held = [held for bucket in self._buckets for held in held_by(bucket)]
        text = encode_entries(held)
        self._listed[call.sender] = torch.frombuffer(bytearray(text), dtype=torch.uint8), held
        return len(text)

    def _serve_read(self, call: Call) -> int:
        assert call.out is not None
        number, start = map(int, call.note.split())
        listed, held = self._listed[call.sender]
        value = listed if number == _LIST else held[number][1]
        assert value is not None
        call.out.copy_(value.view(torch.uint8)[start : start + call.out.numel()])
        return 0

    def _serve_end(self, call: Call) -> int:
        self._listed.pop(call.sender, None)
        return 0
