"""A rank ends at once when it is told to, and quietly."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

pytestmark = pytest.mark.processes

# A long wait in C without the GIL: handlers of the main thread wait as well, as inside torch.
LONG_CALL = """
import ctypes, sys
from syncline.launch.signals import end_promptly
end_promptly(lambda: print("last act"))
print("up", flush=True)
print("not flushed", end="")
libc = ctypes.CDLL(None)
while True: libc.usleep(30_000_000)
"""


@pytest.fixture
def start() -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}

    def begin(code: str) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdout=pipe, stderr=pipe, text=True, env=buffered
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        return process

    yield begin
    for process in started:
        with process:
            process.kill()


def end(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Status, what else it printed, and what it complained about."""
    assert process.stdout is not None
    assert process.stderr is not None
    return process.wait(20), process.stdout.read(), process.stderr.read()


@pytest.mark.parametrize(("sent", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_a_rank_inside_a_long_call_at_once_and_quietly(start, sent, status):
    process = start(LONG_CALL)
    time.sleep(0.1)
    began_s = time.monotonic()
    process.send_signal(sent)
    assert end(process) == (status, "not flushedlast act\n", "")
    assert time.monotonic() - began_s < 2


def test_leaving_does_not_wait_for_threads_or_for_a_last_act_that_hangs(start):
    process = start(
        "import threading, time\n"
        "from syncline.launch.signals import leave\n"
        "threading.Thread(target=time.sleep, args=(60,)).start()\n"
        "print('up', flush=True)\n"
        "leave(7, lambda: time.sleep(60))\n"
    )
    began_s = time.monotonic()
    assert end(process) == (7, "", "")
    assert time.monotonic() - began_s < 5


def test_leaving_survives_a_last_act_that_fails_and_flushes(start):
    process = start(
        "from syncline.launch.signals import leave\n"
        "print('up', flush=True)\n"
        "print('kept', end='')\n"
        "leave(3, lambda: 1 / 0)\n"
    )
    assert end(process) == (3, "kept", "")
