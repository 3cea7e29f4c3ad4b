"""Files that are replaced whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path

from syncline.errors import CannotWrite, ConfigError
from syncline.resources import why_not_written

# What `replacing` calls its temporary files: the name, the number of the process.
_PARTIAL = re.compile(r"\..+\.\d+\.partial")
# How file systems say that a folder cannot be synced.
_NOT_SYNCED = (errno.EINVAL, errno.ENOTSUP, errno.EBADF)


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
        sync_folder(path.parent)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()


def sync_folder(folder: Path) -> None:
    """Write a folder's names to the disk: a rename is not safe from a crash before that."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(file)
    except OSError as error:
        if error.errno not in _NOT_SYNCED:
            raise
    finally:
        os.close(file)


def make_folder(folder: Path) -> None:
    """Create a folder and those above it; what is created is safe from a crash."""
    missing = [one for one in (folder, *folder.parents) if not one.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for one in missing:
        sync_folder(one.parent)


def remove_partials(folder: Path) -> None:
    """Remove what writers that were killed have left in a folder, if there is one.

    Call it only if no living process writes there.
    """
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for name in os.listdir(folder):
            if _PARTIAL.fullmatch(name):
                with contextlib.suppress(OSError):
                    (folder / name).unlink()


@contextlib.contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turn an OSError in the block into one line that names `path` and the way out."""
    try:
        yield
    except OSError as error:
        raise CannotWrite(f"{path}: {why_not_written(error)}") from error


def check_can_be_written(key: str, path: Path, made: Path | None = None) -> None:
    """Refuse, before a run starts, a path that could not be written at its end.

    `made` is a folder that the run creates, if it is not there yet.
    """
    is_made = made is not None and path.parent.absolute() == made.absolute()
    if not (path.parent.is_dir() or is_made):
        rule, fix = "a file is written into a folder that is there", "Create it, or name another."
        raise ConfigError(key, f"there is no folder {path.parent}", rule, fix)
    if path.is_dir():
        raise ConfigError(key, f"{path} is a folder", "this is one file", "Name a file.")


def write_atomically(path: Path, data: bytes) -> None:
    """Replace a file's content, whole or not at all."""
    with replacing(path) as partial:
        partial.write_bytes(data)
