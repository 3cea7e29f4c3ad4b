"""Other work on the machine: processes that spin, one core each, for as long as a context lasts."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

# It asks the kernel to be killed with its parent. The parent may have ended before it could ask.
_SPIN = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, int(signal.SIGKILL), 0, 0, 0)  # PR_SET_PDEATHSIG
while os.getppid() == int(sys.argv[1]):
    for _ in range(1_000_000):
        pass
"""


@contextlib.contextmanager
def busy(count: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Keep `count` processes spinning; they are killed at the end, however it comes."""
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(count):
            command = [sys.executable, "-S", "-c", _SPIN, str(os.getpid())]
            processes.append(subprocess.Popen(command, stdin=subprocess.DEVNULL))
        yield processes
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()
