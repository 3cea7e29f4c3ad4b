"""The memory of this process, as the kernel counts it (Linux)."""

from __future__ import annotations

import re
from pathlib import Path


def peak_bytes() -> int:
    """Return the most memory that was resident in this process at any time.

    It counts each page in full that this process has used: its own; those that it got from its
    parent by fork, and libraries; shared memory, also what peers wrote and this process read.
    """
    return _bytes_of("VmHWM", Path("/proc/self/status"))


def share_bytes() -> int:
    """Return this process's share of the memory in use now (PSS).

    A page that n processes use counts 1/n in each of them, so shares add up to what is in use.
    """
    return _bytes_of("Pss", Path("/proc/self/smaps_rollup"))


def _bytes_of(key: str, path: Path) -> int:
    """Return an entry of a file of the kernel's; 0 if it has none, as on very old kernels."""
    try:
        found = re.search(rf"^{key}:\s+(\d+) kB$", path.read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) * 1024 if found else 0
