"""A rank ends at once when it is told to, and quietly."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.processes

# pow() of huge integers is one long C call that keeps signal handlers waiting, as torch's do; but
# it holds the GIL. A wait in C without the GIL is what a torch call looks like to other threads.
LONG_CALL = """
import ctypes, sys
from syncline.launch.signals import end_promptly
end_promptly(lambda: print("last act"))
print("up", flush=True)
print("not flushed", end="")
while True: ctypes.CDLL(None).usleep(30_000_000)
"""


def start(code: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    return process


@pytest.mark.parametrize(("sent", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_a_rank_inside_a_long_call_at_once_and_quietly(sent, status):
    process = start(LONG_CALL)
    time.sleep(0.1)
    began_s = time.monotonic()
    process.send_signal(sent)
    out, err = process.communicate(timeout=20)
    assert time.monotonic() - began_s < 2
    assert (process.returncode, out, err) == (status, "not flushedlast act\n", "")


def test_leaving_does_not_wait_for_threads_or_for_a_last_act_that_hangs():
    process = start(
        "import threading, time\n"
        "from syncline.launch.signals import leave\n"
        "threading.Thread(target=time.sleep, args=(60,)).start()\n"
        "print('up', flush=True)\n"
        "leave(7, lambda: time.sleep(60))\n"
    )
    began_s = time.monotonic()
    assert process.wait(20) == 7
    assert time.monotonic() - began_s < 5
    process.communicate()


def test_leaving_survives_a_last_act_that_fails_and_flushes():
    process = start(
        "from syncline.launch.signals import leave\n"
        "print('up', flush=True)\n"
        "print('kept', end='')\n"
        "leave(3, lambda: 1 / 0)\n"
    )
    assert process.communicate(timeout=20) == ("kept", "")
    assert process.returncode == 3
