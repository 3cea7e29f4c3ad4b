"""The lock of a run folder: one run at a time writes into it.

It is a lock of the kernel (flock) on a file in the folder, so it ends with the processes that hold
it, also after kill -9. Ranks that are forks of the launcher hold it too. On a network file system
it also holds between machines. The file says which process has the lock, and is removed with it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import platform
import time
from collections.abc import Iterator
from pathlib import Path

from syncline.config import printable
from syncline.errors import ConfigError
from syncline.resources import reason

log = logging.getLogger("syncline")

LOCK = ".lock"
_PATIENCE_S = 2.0
"""How long a held lock is tried for: the ranks of a launcher that was killed end a moment later."""
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@contextlib.contextmanager
def locked(folder: Path, key: str) -> Iterator[None]:
    """Hold the lock of a run folder for the block; refuse a folder that another run uses.

    `key` is the option that named the folder.
    """
    path = folder / LOCK
    file = _open_locked(path, key)
    try:
        os.ftruncate(file, 0)
        os.write(file, f"process {os.getpid()} on {platform.node()}\n".encode())
        yield
    finally:
        # Removed before it is unlocked: whoever opens the old file notices it (`_open_locked`).
        with contextlib.suppress(OSError):
            path.unlink()
        os.close(file)


def _open_locked(path: Path, key: str) -> int:
    """Return the lock's file, open and locked."""
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(file, 200).decode("utf-8", "replace").strip()
            os.close(file)
            if time.monotonic() < deadline:
                time.sleep(0.05)
                continue
            raise ConfigError(
                key,
                f"{printable(path.parent)} is in use by {printable(holder) or 'another run'}",
                "one run at a time writes into a folder",
                "Wait for its end, or name another folder.",
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                os.close(file)
                raise
            log.warning(
                "%s: its file system has no locks (%s). Start no second run in it.",
                printable(path.parent),
                reason(error),
            )
            return file
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file), os.stat(path)):
                return file
        # The run before has removed the file in the meantime, and the lock with it: try again.
        os.close(file)
