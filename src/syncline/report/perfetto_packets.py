"""Packets of a Perfetto trace, encoded here: varints and length-delimited fields, no dependency.

Each track has a packet sequence of its own, so that its number and its names are written once.
Numbers of fields are those of Perfetto's public `perfetto_trace.proto`; tests decode the file with
Perfetto's own classes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import IO

_CLEARED, _NEEDS_STATE = 1, 2  # TracePacket.SequenceFlags
_BEGIN, _END, _COUNTER = 1, 2, 4  # TrackEvent.Type
_COUNT, _BYTES = 2, 3  # CounterDescriptor.Unit
_BY_NUMBER = 3  # TrackDescriptor.ChildTracksOrdering.EXPLICIT


_BYTE = [bytes((value,)) for value in range(128)]


def varint(value: int) -> bytes:
    """Return a number from 0 on, seven bits a byte, the lowest first.

    >>> varint(300).hex()
    'ac02'
    """
    if value < 0x80:
        return _BYTE[value]
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)


def number(field: int, value: int) -> bytes:
    """Return a field that holds a number; negative ones take ten bytes, as protobuf wants."""
    return varint(field << 3) + varint(value & 0xFFFF_FFFF_FFFF_FFFF)


def block(field: int, data: bytes | str) -> bytes:
    """Return a field that holds a message, text or bytes."""
    data = data.encode() if isinstance(data, str) else data
    return varint(field << 3 | 2) + varint(len(data)) + data


def process(uuid: int, pid: int, name: str, label: str) -> bytes:
    """Describe the track of a process, whose tracks have an order."""
    inside = number(1, pid) + block(6, name) + (block(8, label) if label else b"")
    return number(1, uuid) + block(3, inside) + number(11, _BY_NUMBER)


def thread(uuid: int, parent: int, pid: int, tid: int, name: str) -> bytes:
    """Describe the track of a thread. Those of a process are shown in the order of `tid`."""
    inside = number(1, pid) + number(2, tid) + block(5, name)
    return number(1, uuid) + number(5, parent) + block(4, inside) + number(12, tid)


def counter(uuid: int, parent: int, name: str, *, is_bytes: bool) -> bytes:
    """Describe the track of a number that changes; without a parent it is that of all ranks."""
    unit = number(3, _BYTES if is_bytes else _COUNT)
    return track(uuid, name) + (number(5, parent) if parent else b"") + block(8, unit)


def track(uuid: int, name: str) -> bytes:
    """Describe a track that belongs to no process."""
    return number(1, uuid) + block(2, name)


def write_descriptor(file: IO[bytes], descriptor: bytes) -> None:
    """Write a track that has no events of its own."""
    file.write(block(1, block(60, descriptor)))


class Track:
    """Writes the events of one track, in the order of time.

    Slices of a track nest: one that began later ends earlier, or at the same time.
    """

    def __init__(self, file: IO[bytes], descriptor: bytes, uuid: int, sequence: int) -> None:
        """`sequence` counts the tracks of the file from 1."""
        self._write = file.write
        self._names: dict[tuple[int, str], int] = {}
        self._new = b""
        self._kinds: dict[tuple[str, str], bytes] = {}
        self._keys: dict[str, tuple[bytes, bytes]] = {}
        own = number(10, sequence)
        default = block(59, block(11, number(11, uuid)))
        first = own + number(13, _CLEARED) + number(87, 1) + default + block(60, descriptor)
        self._write(block(1, first))
        self._own = own + number(13, _NEEDS_STATE)
        self._end = self._own + block(11, number(9, _END))

    def begin(
        self, at_ns: int, name: str, category: str, flows: Iterable[int] = (), **values: int | str
    ) -> None:
        """Begin a slice. Two slices that have the same flow are joined by an arrow."""
        event = self._kinds.get((name, category)) or self._kind(name, category)
        for flow in flows:
            event += _FLOW + flow.to_bytes(8, "little")
        for key, value in values.items():
            of_number, of_text = self._keys.get(key) or self._key(key)
            if isinstance(value, str):
                note = of_text + _sized(value.encode())
            else:
                note = of_number + (varint(value) if value >= 0 else varint(value + (1 << 64)))
            event += _NOTE + _sized(note)
        new = block(12, self._new) if self._new else b""
        self._new = b""
        self._put(at_ns, self._own + new + _EVENT + _sized(event))

    def end(self, at_ns: int) -> None:
        """End the slice that began last."""
        self._put(at_ns, self._end)

    def count(self, at_ns: int, value: int) -> None:
        """Set a counter."""
        self._put(at_ns, self._own + block(11, number(9, _COUNTER) + number(30, value)))

    def _put(self, at_ns: int, packet: bytes) -> None:
        self._write(_PACKET + _sized(_AT + varint(at_ns) + packet))

    def _kind(self, name: str, category: str) -> bytes:
        known = number(10, self._known(2, name)) + number(3, self._known(1, category))
        self._kinds[name, category] = number(9, _BEGIN) + known
        return self._kinds[name, category]

    def _key(self, key: str) -> tuple[bytes, bytes]:
        known = number(1, self._known(3, key))
        self._keys[key] = known + varint(4 << 3), known + varint(6 << 3 | 2)
        return self._keys[key]

    def _known(self, kind: int, name: str) -> int:
        """Return a name's number on this sequence; a new one is written with the next slice."""
        known = self._names.get((kind, name))
        if known is None:
            known = self._names[kind, name] = len(self._names) + 1
            self._new += block(kind, number(1, known) + block(2, name))
        return known


def _sized(data: bytes) -> bytes:
    size = len(data)
    return (_BYTE[size] if size < 128 else varint(size)) + data


_PACKET, _AT, _EVENT = varint(1 << 3 | 2), varint(8 << 3), varint(11 << 3 | 2)
_NOTE, _FLOW = varint(4 << 3 | 2), varint(47 << 3 | 1)
