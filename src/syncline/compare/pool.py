"""Runs cells, each in a fork of this process that writes its cell's file and ends.

A fork has torch loaded, and what a run has allocated ends with it. If this process is killed, its
forks end too. Ctrl-C ends them; what they had not finished is run again by the next start.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn

from syncline.compare.grid import Cell
from syncline.config.words import brief
from syncline.errors import SynclineError
from syncline.launch.forked import dying_with_parent
from syncline.resources import explain

_WAIT_S = 0.5
"""How often the time left is shown."""


@dataclass
class _Running:
    cell: Cell
    pid: int
    end: int
    """A descriptor that is readable when the process has ended."""
    began_s: float


class RunFailed(SynclineError):
    """A run ended without a result; what others found is kept."""


def run_cells(
    cells: Iterable[Cell],
    work: Callable[[Cell], None],
    jobs: int,
    on_tick: Callable[[], None] = lambda: None,
) -> Iterator[tuple[Cell, float]]:
    """Run cells, so many at a time; yield each that has ended, and its seconds."""
    waiting, running = iter(cells), list[_Running]()
    try:
        while True:
            while len(running) < jobs and (cell := next(waiting, None)) is not None:
                _start(cell, work, running)
            if not running:
                return
            for one in _ended(running, on_tick):
                running.remove(one)
                _check(one)
                yield one.cell, time.monotonic() - one.began_s
    finally:
        for one in running:
            os.kill(one.pid, signal.SIGKILL)
            os.waitpid(one.pid, 0)
            os.close(one.end)


def _ended(running: Sequence[_Running], on_tick: Callable[[], None]) -> list[_Running]:
    """Wait until some have ended, and return them."""
    while True:
        ready, _, _ = select.select([one.end for one in running], [], [], _WAIT_S)
        on_tick()
        if ready:
            return [one for one in running if one.end in ready]


def _check(one: _Running) -> None:
    """Raise if a process that has ended did not do its work."""
    status = os.waitstatus_to_exitcode(os.waitpid(one.pid, 0)[1])
    os.close(one.end)
    if status:
        cell = one.cell
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        raise RunFailed(
            f"{cell.variant} on {cell.ranks} ranks, seed {cell.seed} ({cell.grid},"
            f" {cell.scenario}) {how}. Runs that have ended are kept; start again to go on."
        )


def _start(cell: Cell, work: Callable[[Cell], None], running: list[_Running]) -> None:
    """Fork a process for a cell, and add it to those that run."""
    sys.stdout.flush()
    sys.stderr.flush()
    die_with_parent = dying_with_parent()
    # Python ignores what is raised while it forks. A Ctrl-C has to wait until the process is among
    # those that run: only they are ended.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        pid = os.fork()
        if pid == 0:
            _run(cell, work, die_with_parent, before)
        running.append(_Running(cell, pid, os.pidfd_open(pid), time.monotonic()))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _run(
    cell: Cell,
    work: Callable[[Cell], None],
    die_with_parent: Callable[[], None],
    mask: set[int],
) -> NoReturn:
    """Do the fork's work. Never returns: the callers on the stack are the parent's code."""
    status = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it, and ends its forks
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        die_with_parent()
        gc.freeze()  # a collection would write to every object, and so copy its page
        work(cell)
        status = 0
    except SynclineError as error:
        sys.stderr.write(f"syncline: {brief(error)}\n")
        status = error.exit_code
    except BaseException as error:
        why = explain(error) if isinstance(error, Exception) else None
        if why is None:
            traceback.print_exc()
        else:
            sys.stderr.write(f"syncline: {why}\n")
    finally:
        sys.stderr.flush()
        os._exit(status)
