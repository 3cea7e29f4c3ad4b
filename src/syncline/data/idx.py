"""IDX, the file format of MNIST and its relatives: a magic number, the lengths, the bytes.

Big-endian: two zero bytes, a type (8 for unsigned bytes, the only one read here), the number of
dimensions, a 32-bit length for each, then the values. Files may be gzipped. A damaged file raises
IdxError; memory is never allocated by the lengths in the header alone.
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
import numpy.typing as npt

UNSIGNED_BYTE = 8
PIECE_BYTES = 1 << 20  # read piece by piece: the header may announce more than there is


class IdxError(ValueError):
    """The file is damaged; the message says how, without the file's name."""


def read_shape(path: Path) -> tuple[int, ...]:
    """Read the lengths only."""
    with _opened(path) as stream:
        return _header(stream)


def read(path: Path) -> npt.NDArray[np.uint8]:
    """Read the whole array."""
    with _opened(path) as stream:
        shape = _header(stream)
        size = math.prod(shape)
        values = bytearray()
        while len(values) <= size and (piece := stream.read(PIECE_BYTES)):
            values += piece
    if len(values) != size:
        more = "more" if len(values) > size else str(len(values))
        raise IdxError(f"announces {size} bytes and holds {more}")
    return np.frombuffer(values, np.uint8).reshape(shape)


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
            yield cast(BinaryIO, stream)
    except (OSError, EOFError, zlib.error) as error:
        raise IdxError(f"cannot be read ({error})") from error


def _header(stream: BinaryIO) -> tuple[int, ...]:
    magic = stream.read(4)
    if len(magic) < 4 or magic[:3] != bytes([0, 0, UNSIGNED_BYTE]):
        raise IdxError(f"begins with {magic.hex(' ') or 'nothing'}, not with 00 00 08")
    dimensions = magic[3]
    lengths = stream.read(4 * dimensions)
    if len(lengths) < 4 * dimensions:
        raise IdxError("ends within its header")
    return struct.unpack(f">{dimensions}I", lengths)
