"""A rank that is a fork of the launching process: it does not load torch again.

Loading torch takes seconds of processor time: for eight ranks on two cores ten seconds or more
before the first step, and the private memory of eight interpreters (decision 11). A fork takes
milliseconds and shares the pages. A fork has no threads but the one that forked: the launching
process must have no others, and must not have touched a GPU.
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
from syncline.resources import explain

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
        """Fork; the child calls `forget` to close what only the parent uses, then `work`."""
        sys.stdout.flush()
        sys.stderr.flush()
        die_with_parent = dying_with_parent()
        # A signal that comes before the child has set its own handlers must not be lost, and must
        # not run the parent's handlers.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            self.pid = os.fork()
            if self.pid == 0:
                _run_rank(rank, work, environ, stdout, (die_with_parent, forget), before)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        # Parent and child both do this, so the group exists before either of them goes on.
        os.setpgid(self.pid, self.pid)

    def wait(self) -> int:
        """Wait for the end of the rank and return its exit status, negative for a signal."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def dying_with_parent() -> Callable[[], None]:
    """Return a function that asks the kernel to kill the calling process when its parent dies."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    parent = os.getpid()

    def ask() -> None:
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        # If the parent died before the request, the kernel sends no signal.
        if os.getppid() != parent:
            os._exit(1)

    return ask


def _run_rank(
    rank: int,
    work: Callable[[], object],
    environ: Mapping[str, str],
    stdout: int | None,
    first_calls: tuple[Callable[[], None], ...],
    mask: set[int],
) -> NoReturn:
    """Do the child's work. Never returns: the callers on the stack are the parent's code."""
    try:
        os.setpgid(0, 0)
        for call in first_calls:
            call()
        _name_process(f"syncline:{rank}")
        _redirect_streams(stdout)
        reset_handlers()
        os.environ.clear()
        os.environ.update(environ)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        work()
    except KeyboardInterrupt:  # before the rank has handlers of its own
        leave(130)
    except SystemExit as ended:
        leave(ended.code if isinstance(ended.code, int) else int(ended.code is not None))
    except BaseException as error:
        why = explain(error)
        if why is None:
            traceback.print_exc()
        else:
            sys.stderr.write(f"syncline: rank {rank}: {why}\n")
        leave(1)
    leave(0)


def _name_process(text: str) -> None:
    """Set the name that `ps -o comm` and `top` show: the ranks' command lines are all the same."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, text.encode(), 0, 0, 0)


def _redirect_streams(stdout: int | None) -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    if stdout is not None:
        os.dup2(stdout, 1)


def reset_handlers() -> None:
    """Drop the parent's signal handlers, as exec does; ignored signals stay ignored."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, default)
