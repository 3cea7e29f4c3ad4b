"""Files that are replaced whole or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a name to write under; when that went well, the new file takes the place of the old.

    Readers see the old content or the new, never half of each, also after a crash.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()


def write_atomically(path: Path, data: bytes) -> None:
    """Replace a file's content in one go."""
    with replacing(path) as partial:
        partial.write_bytes(data)
