"""`syncline ARGUMENTS` as a user types it, in a process that need not load Python and torch first.

The process is a fork of the test's: it gets its own streams, folder, environment and signal
handlers, and runs the command line's `main`, or a user's script (`start_script`). It answers to
what `subprocess.Popen` does, and it ends with the test's process, should that be killed.
With `fork_scripts` the ranks of `syncline run` and `syncline verify` are forks as well.
"""

from __future__ import annotations

import atexit
import functools
import gc
import logging
import os
import runpy
import select
import signal
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

# What a script would load by and by is loaded before the fork.
import torch._dynamo  # noqa: F401

import syncline.cli.run
import syncline.cli.verify
from syncline.cli.main import main
from syncline.launch.forked import dying_with_parent
from syncline.launch.local import launch
from syncline.launch.outcome import Outcome


class Started:
    """A `syncline` that was started."""

    def __init__(
        self,
        *arguments: str,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        traced: bool = True,
        first: Callable[[], None] | None = None,
        program: Callable[[], object] = main,
    ) -> None:
        """Lines are not counted unless `traced`, which saves a quarter of the time.

        `first` is called before the program.
        """
        self.returncode: int | None = None
        self._files = _file("stdout"), _file("stderr")
        sys.stdout.flush()
        sys.stderr.flush()
        die_with_parent = dying_with_parent()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                gc.freeze()  # a collection would write to every object, and so copy its page
                die_with_parent()
                _prepare(self._files, cwd, os.environ if env is None else env, traced)
                if first is not None:
                    first()
                _run(program, arguments)
            finally:
                os._exit(70)
        self._end = os.pidfd_open(self.pid)

    def communicate(self, timeout: float = 60.0) -> tuple[str, str]:
        """Wait for its end; return what it has printed."""
        self.wait(timeout)
        return self._texts

    def wait(self, timeout: float = 60.0) -> int:
        """Wait for its end and return its status, negative for a signal."""
        if self.returncode is None:
            if not select.select([self._end], [], [], timeout)[0]:
                self.kill()
                said = self._texts[1]
                raise subprocess.TimeoutExpired("syncline", timeout, stderr=said.encode())
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            os.close(self._end)
            out, err = self._files
            self._texts = _text_of(out), _text_of(err)
            out.close()
            err.close()
        return self.returncode

    def poll(self) -> int | None:
        """Return its status, or None while it is running."""
        if self.returncode is None and not select.select([self._end], [], [], 0)[0]:
            return None
        return self.wait()

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            signal.pidfd_send_signal(self._end, number)

    def kill(self) -> None:
        """End it now, and with it its ranks."""
        self.send_signal(signal.SIGKILL)
        self.wait()


def start_script(
    script: Path, *arguments: str, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> Started:
    """Start `python SCRIPT ARGUMENTS`, as one rank or without a launcher."""

    def run() -> None:
        run_script(str(script), *arguments)

    return Started(cwd=cwd, env=env, traced=False, program=run)


def run_script(script: str, *arguments: str) -> NoReturn:
    """Do what `python SCRIPT ARGUMENTS` does, from its first line to its last exit handler."""
    sys.argv = [script, *arguments]
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    sys.excepthook = sys.__excepthook__
    atexit._clear()  # those of the test's process
    status: object = 0
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as ended:
        status = ended.code
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        status = 1
    atexit._run_exitfuncs()
    sys.exit(status)  # type: ignore[arg-type]


def run_forked(program: str) -> str:
    """Run a Python program in a fork of this process, which has torch loaded, without a tracer."""

    def run() -> None:
        exec(program, {"__name__": "__main__"})

    started = Started(traced=False, program=run)
    out, said = started.communicate(200)
    assert started.returncode == 0, said
    return out


def fork_scripts() -> None:
    """Let `syncline run` and `syncline verify` fork the ranks of a script. For `first`.

    That ranks are started as programs is tested in tests/launch and tests/cli/test_cli_run.py.
    """

    def launch_forked(
        work: Sequence[str] | Callable[[], object], ranks: int, **settings: Any
    ) -> Outcome:
        if not callable(work):
            _, script, *arguments = work
            work = functools.partial(run_script, script, *arguments)
        return launch(work, ranks, **settings)

    for module in (syncline.cli.run, syncline.cli.verify):
        module.launch = launch_forked  # type: ignore[attr-defined]


def _file(name: str) -> IO[bytes]:
    return os.fdopen(os.memfd_create(name), "w+b")


def _text_of(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode()


def _prepare(
    files: tuple[IO[bytes], IO[bytes]], cwd: Path | None, env: Mapping[str, str], traced: bool
) -> None:
    """Be like a process that was just started."""
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    for number, file in enumerate(files, start=1):
        os.dup2(file.fileno(), number)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    if cwd is not None:
        os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    signal.set_wakeup_fd(-1)
    for ending in (signal.SIGTERM, signal.SIGHUP, signal.SIGALRM):
        signal.signal(ending, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    warnings.resetwarnings()
    logging.root.handlers.clear()
    if not traced:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]


def _run(program: Callable[[], object], arguments: tuple[str, ...]) -> NoReturn:
    sys.argv = ["syncline", *arguments]
    status: object = 0
    try:
        program()
    except SystemExit as ended:
        status = ended.code
    except BaseException:
        traceback.print_exc()
        status = 1
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os._exit(status if isinstance(status, int) else int(status is not None))
