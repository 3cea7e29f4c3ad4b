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


def varint(value: int) -> bytes:
    """Return a number from 0 on, seven bits a byte, the lowest first.

    >>> varint(300).hex()
    'ac02'
    """
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
        own = number(10, sequence)
        default = block(59, block(11, number(11, uuid)))
        first = own + number(13, _CLEARED) + number(87, 1) + default + block(60, descriptor)
        self._write(block(1, first))
        self._own = own + number(13, _NEEDS_STATE)
        self._end = self._own + block(11, number(9, _END))

    def begin(
        self, at_ns: int, name: str, category: str, flows: Iterable[int] = (), **values: int | str
    ) -> None:
        """Begin a slice. Slices with the same flow, two in all, are joined by an arrow."""
        event = number(9, _BEGIN) + number(10, self._known(2, name))
        event += number(3, self._known(1, category))
        for flow in flows:
            event += _FLOW + flow.to_bytes(8, "little")
        for key, value in values.items():
            shown = block(6, value) if isinstance(value, str) else number(4, value)
            event += block(4, number(1, self._known(3, key)) + shown)
        new = block(12, self._new) if self._new else b""
        self._new = b""
        self._put(at_ns, self._own + new + block(11, event))

    def end(self, at_ns: int) -> None:
        """End the slice that began last."""
        self._put(at_ns, self._end)

    def count(self, at_ns: int, value: int) -> None:
        """Set a counter."""
        self._put(at_ns, self._own + block(11, number(9, _COUNTER) + number(30, value)))

    def _put(self, at_ns: int, packet: bytes) -> None:
        packet = b"\x40" + varint(at_ns) + packet
        self._write(b"\x0a" + varint(len(packet)) + packet)

    def _known(self, kind: int, name: str) -> int:
        """Return a name's number on this sequence; a new one is written with the next slice."""
        known = self._names.get((kind, name))
        if known is None:
            known = self._names[kind, name] = len(self._names) + 1
            self._new += block(kind, number(1, known) + block(2, name))
        return known


_FLOW = varint(47 << 3 | 1)
