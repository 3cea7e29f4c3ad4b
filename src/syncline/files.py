"""Files that are replaced whole or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from syncline.errors import ConfigError


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to; if the block succeeds, that file replaces `path`.

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


def check_can_be_written(key: str, path: Path) -> None:
    """Refuse, before a run starts, a path that could not be written at its end."""
    if not path.parent.is_dir():
        rule, fix = "a file is written into a folder that is there", "Create it, or name another."
        raise ConfigError(key, f"there is no folder {path.parent}", rule, fix)
    if path.is_dir():
        raise ConfigError(key, f"{path} is a folder", "this is one file", "Name a file.")


def write_atomically(path: Path, data: bytes) -> None:
    """Replace a file's content, whole or not at all."""
    with replacing(path) as partial:
        partial.write_bytes(data)
