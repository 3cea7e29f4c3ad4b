"""Signals: SIGTERM and SIGINT end a rank at once, whatever its main thread is doing.

Python runs signal handlers in the main thread between two bytecodes: during a long torch call that
is seconds late. Python writes to the wake-up descriptor at once, and a thread that reads it can
end the process. The launcher gets its signals as bytes of a socket (`signals_to`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import NoReturn

_FLUSH_S = 0.5
"""How long a process that ends may take to write its last output: a pipe may be full."""


def end_promptly(last_act: Callable[[], None] | None = None) -> None:
    """Let SIGTERM and SIGINT end this process, from now on, with status 128 + the signal.

    `last_act` may restore the terminal; it gets half a second. Call from the main thread.
    """
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)

    def only_wake(number: int, frame: FrameType | None) -> None: ...

    ending = (signal.SIGTERM, signal.SIGINT)
    for number in ending:
        signal.signal(number, only_wake)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)

    def watch() -> None:
        while True:
            (number,) = os.read(read_end, 1)
            if number in ending:
                leave(128 + number, last_act)

    threading.Thread(target=watch, name="syncline-signals", daemon=True).start()


def end_cleanly() -> None:
    """Make SIGTERM and SIGHUP raise SystemExit, so that every `finally` on the way runs."""

    def stop(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGHUP, stop)


def leave(status: int, last_act: Callable[[], None] | None = None) -> NoReturn:
    """End the process now, from any thread, after flushing what was printed so far.

    `sys.exit` would join threads and run finalizers; a thread stuck in C++ would block that.
    """

    def act() -> None:
        for step in (last_act, sys.stdout.flush, sys.stderr.flush):
            with contextlib.suppress(Exception):
                if step is not None:
                    step()

    # The main thread may hold a stream's lock and never release it: do not wait for it long.
    helper = threading.Thread(target=act, daemon=True)
    helper.start()
    helper.join(_FLUSH_S)
    os._exit(status)


@contextlib.contextmanager
def signals_to(end: socket.socket, numbers: Sequence[signal.Signals]) -> Iterator[None]:
    """Write signals to a socket instead of acting on them; on another thread than main, do nothing.

    A signal that was ignored when we were started (nohup, a shell's background job) stays ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def only_wake(number: int, frame: FrameType | None) -> None: ...

    before = {number: signal.getsignal(number) for number in numbers}
    before = {number: old for number, old in before.items() if old is not signal.SIG_IGN}
    for number in before:
        signal.signal(number, only_wake)
    old_fd = signal.set_wakeup_fd(end.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(old_fd)
        for number, old in before.items():
            signal.signal(number, old)
