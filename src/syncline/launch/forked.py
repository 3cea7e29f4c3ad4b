"""A rank that is a fork of the launching process: what that has loaded, no rank loads again.

Loading torch takes two to five seconds of processor time; for eight ranks on two cores that is up
to twenty seconds before the first step, and the private memory of eight interpreters. A fork takes
milliseconds and shares the pages. It carries no threads over: the launching process must have
none, and must not have touched a GPU.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import NoReturn

from syncline.launch.signals import leave

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15


class Forked:
    """A rank in a fork of this process, in a process group of its own, without stdin."""

    def __init__(
        self,
        work: Callable[[], object],
        rank: int,
        environ: Mapping[str, str],
        stdout: int | None,
        forget: Callable[[], None],
    ) -> None:
        """Fork; the child calls `forget` to close what is the parent's alone, then `work`."""
        sys.stdout.flush()
        sys.stderr.flush()
        die_with_parent = dying_with_parent()
        # A signal that comes between the fork and the child's own handlers must not be lost, and
        # must not be told to the parent's.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            self.pid = os.fork()
            if self.pid == 0:
                _be(rank, work, environ, stdout, (die_with_parent, forget), before)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        # The child does the same: whoever comes first, nobody signals a group that is not there.
        os.setpgid(self.pid, self.pid)

    def wait(self) -> int:
        """Return the status the rank ended with, negative for a signal."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def dying_with_parent() -> Callable[[], None]:
    """Return what a fresh child calls first: it asks the kernel to be killed with its parent."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    parent = os.getpid()

    def ask() -> None:
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        # The parent may have died before the request: then nobody will send the signal.
        if os.getppid() != parent:
            os._exit(1)

    return ask


def _be(
    rank: int,
    work: Callable[[], object],
    environ: Mapping[str, str],
    stdout: int | None,
    first_acts: tuple[Callable[[], None], ...],
    mask: set[int],
) -> NoReturn:
    """Live the child's life. Never returns: the stack below belongs to the parent."""
    try:
        os.setpgid(0, 0)
        for act in first_acts:
            act()
        _name(f"syncline:{rank}")
        _take_streams(stdout)
        _forget_handlers()
        os.environ.clear()
        os.environ.update(environ)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        work()
    except KeyboardInterrupt:  # before the rank has handlers of its own
        leave(130)
    except SystemExit as ended:
        leave(ended.code if isinstance(ended.code, int) else int(ended.code is not None))
    except BaseException:
        traceback.print_exc()
        leave(1)
    leave(0)


def _name(text: str) -> None:
    """Give the process a name that `ps -o comm` and `top` show: all ranks have one command line."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, text.encode(), 0, 0, 0)


def _take_streams(stdout: int | None) -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    if stdout is not None:
        os.dup2(stdout, 1)


def _forget_handlers() -> None:
    """Drop the parent's signal handlers, as starting a program would; what is ignored stays so."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, default)
