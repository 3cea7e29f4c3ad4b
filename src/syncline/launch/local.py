"""The small launcher: start N ranks on this machine, and wait for them.

A rank is a new program, or a fork of this process, which has loaded what all ranks need. torchrun
ends all ranks when one dies. Here the others live on: they end by themselves when the library
tells them, or train on if the strategy survives a death. The promises: Ctrl-C and SIGTERM stop
every rank (with SIGTERM, then after a grace period SIGKILL); nothing survives the launcher, even
if it is killed with SIGKILL; each rank that ended badly gets one line on stderr.

The launcher sleeps until a rank ends, a signal arrives or a deadline passes; it never polls.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType

from syncline.errors import ConfigError
from syncline.launch.env import rank_environment
from syncline.launch.forked import Forked, dying_with_parent

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

BAD_INPUT = 2
STOPPED = 3
"""The status of a rank that ends its run on purpose, before the last step, and has said why."""
_ANY_PORT = 29400


@dataclass(frozen=True)
class Outcome:
    """The ranks' exit statuses, negative for a signal; the signal that stopped the launcher."""

    statuses: tuple[int, ...]
    stopped_by: signal.Signals | None = None
    goes_on: bool = False
    """Whether the run succeeds if only one rank ends well."""

    @property
    def exit_code(self) -> int:
        """0 for success, 130 after Ctrl-C, 2 if a rank refused its input, 1 otherwise."""
        if self.stopped_by is not None:
            return 128 + self.stopped_by
        if not any(self.statuses) or (self.goes_on and 0 in self.statuses):
            return 0
        return 2 if 2 in self.statuses else 1


def launch(
    work: Sequence[str] | Callable[[], object],
    ranks: int,
    *,
    threads: int = 1,
    extra_env: Mapping[str, str] | None = None,
    port: int | None = None,
    grace_s: float = 10.0,
    after_failure_s: float | None = 10.0,
    go_on: bool = False,
    stdout: int | None = None,
    said: Collection[int] = (BAD_INPUT,),
) -> Outcome:
    """Run `work` as ranks 0 to `ranks - 1` and wait for all of them.

    A command is started once for each rank; a function is called in one fork of this process for
    each rank, so that ranks need not load again what is loaded here (seconds, for torch).

    After the first rank that ends badly the others have `after_failure_s` to end by themselves
    (None: no limit), then they are stopped. With `go_on` they are not stopped, and the run succeeds
    if any of them ends well. Stopping is SIGTERM, and SIGKILL after `grace_s`. `port` is where rank
    0 will listen, a free one if None. `stdout` is the file descriptor the ranks write to, this
    process's own if None; they have no stdin. Ranks that end with a status in `said` have said why
    themselves.

    Call it from the main thread: elsewhere signals are left alone, and the ranks die with the
    thread that started them.
    """
    address, free = _free_address()
    environment = functools.partial(
        rank_environment,
        ranks=ranks,
        address=address,
        port=free if port is None else _checked(port),
        key=secrets.token_hex(32),
        job=secrets.token_hex(8),
        threads=threads,
    )
    watch = _Watch(grace_s, None if go_on else after_failure_s, said)
    with _signals_to(watch.signals):
        try:
            for rank in range(ranks):
                environ = environment(rank) | dict(extra_env or {})
                if callable(work):
                    watch.add(Forked(work, rank, environ, stdout, watch.forget))
                else:
                    watch.add(_started(work, environ, stdout))
            return dataclasses.replace(watch.until_all_ended(), goes_on=go_on)
        finally:
            watch.close()


def free_port() -> int:
    """Return a free port. Another process may take it before it is used: rare, and reported."""
    return _free_address()[1]


def _free_address() -> tuple[str, int]:
    """Return this machine's own address and a free port, where rank 0 can listen.

    A machine may have IPv6 only, or no network at all. Ranks that share memory need none, and get
    an address all the same.
    """
    for family, host in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        with contextlib.suppress(OSError), socket.socket(family) as probe:
            probe.bind((host, 0))
            return host, int(probe.getsockname()[1])
    return "127.0.0.1", _ANY_PORT


def describe_end(rank: int, status: int) -> str:
    """Say how a rank ended, in words."""
    if status < 0:
        return f"rank {rank} was killed by {_signal_name(-status)} (exit status {status})"
    return f"rank {rank} ended with status {status}"


def _started(
    command: Sequence[str], environ: Mapping[str, str], stdout: int | None
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        process_group=0,
        preexec_fn=dying_with_parent(),
    )


class _Watch:
    """The ranks that were started, and the wait for their ends."""

    def __init__(
        self, grace_s: float, after_failure_s: float | None, said: Collection[int]
    ) -> None:
        self.grace_s = grace_s
        self.after_failure_s = after_failure_s
        self.said = said
        self.ranks: list[subprocess.Popen[bytes] | Forked] = []
        self.statuses: dict[int, int] = {}
        self.stopped_by: signal.Signals | None = None
        self.is_stopping = False
        self.deadline_s: float | None = None
        self.selector = selectors.DefaultSelector()
        heard, self.signals = socket.socketpair()
        self.signals.setblocking(False)
        heard.setblocking(False)
        self.selector.register(heard, selectors.EVENT_READ)

    def add(self, process: subprocess.Popen[bytes] | Forked) -> None:
        self.ranks.append(process)
        # A pidfd is readable once the process has ended. Unlike a pid, it is never used again.
        pidfd = os.pidfd_open(process.pid)
        self.selector.register(pidfd, selectors.EVENT_READ, data=len(self.ranks) - 1)

    def until_all_ended(self) -> Outcome:
        while len(self.statuses) < len(self.ranks):
            for key, _ in self.selector.select(self._time_left_s()):
                if key.data is None:
                    assert isinstance(key.fileobj, socket.socket)
                    for number in key.fileobj.recv(64):
                        self._take_signal(number)
                else:
                    self._take_end(key)
            if self.deadline_s is not None and time.monotonic() >= self.deadline_s:
                self._take_deadline()
        statuses = tuple(self.statuses[rank] for rank in range(len(self.ranks)))
        return Outcome(statuses, self.stopped_by)

    def close(self) -> None:
        """Kill and wait for the ranks that still run, and close what is open."""
        self._send(signal.SIGKILL)
        for rank, process in enumerate(self.ranks):
            if rank not in self.statuses:
                process.wait()
        self.forget()

    def forget(self) -> None:
        """Close what is open here and signal no rank. A forked rank calls it on its own copy."""
        for key in list(self.selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
            else:
                os.close(key.fd)
        self.selector.close()
        self.signals.close()

    def _time_left_s(self) -> float | None:
        return None if self.deadline_s is None else max(0.0, self.deadline_s - time.monotonic())

    def _take_end(self, key: selectors.SelectorKey) -> None:
        rank = key.data
        process = self.ranks[rank]
        # The ended process keeps its pid until `wait`, so this group cannot be another's. If the
        # rank failed, kill what it left in the group (workers that load data).
        ended = os.waitid(os.P_PIDFD, key.fd, os.WEXITED | os.WNOWAIT)
        assert ended is not None
        if ended.si_status != 0:
            _signal_group(process.pid, signal.SIGKILL)
        self.selector.unregister(key.fd)
        os.close(key.fd)
        status = process.wait()
        self.statuses[rank] = status
        if status == 0 or self.is_stopping:
            return
        if status not in self.said:
            _say(describe_end(rank, status))
        if self.after_failure_s is not None and self.deadline_s is None:
            self.deadline_s = time.monotonic() + self.after_failure_s

    def _take_signal(self, number: int) -> None:
        if number == signal.SIGTSTP:
            self._suspend_all()
        elif number not in _ENDING:
            return
        elif self.stopped_by is None:
            self._take_ending(signal.Signals(number))
        else:
            # A second signal: do not wait any longer.
            self.deadline_s = time.monotonic()

    def _suspend_all(self) -> None:
        """Suspend ranks and launcher on Ctrl-Z: the terminal's signal reaches the launcher only."""
        self._send(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        self._send(signal.SIGCONT)

    def _take_ending(self, received: signal.Signals) -> None:
        self.stopped_by = received
        _say(f"stopping {self._alive_in_words()}: {received.name} was received")
        self._stop()

    def _take_deadline(self) -> None:
        if self.is_stopping:
            _say(f"killing {self._alive_in_words()}: no end within {self.grace_s:g} s of SIGTERM")
            self._send(signal.SIGKILL)
            self.deadline_s = None
        else:
            waited = f"{self.after_failure_s:g} s"
            _say(f"stopping {self._alive_in_words()}: still running {waited} after the first end")
            self._stop()

    def _stop(self) -> None:
        self.is_stopping = True
        self.deadline_s = time.monotonic() + self.grace_s
        self._send(signal.SIGTERM)
        # A stopped (frozen) process handles SIGTERM only after SIGCONT.
        self._send(signal.SIGCONT)

    def _send(self, number: signal.Signals) -> None:
        for rank, process in enumerate(self.ranks):
            if rank not in self.statuses:
                _signal_group(process.pid, number)

    def _alive_in_words(self) -> str:
        alive = [str(rank) for rank in range(len(self.ranks)) if rank not in self.statuses]
        return f"rank{'s' if len(alive) != 1 else ''} {', '.join(alive)}"


@contextlib.contextmanager
def _signals_to(end: socket.socket) -> Iterator[None]:
    """Write the terminal's signals and SIGTERM to a socket instead of acting on them.

    A signal that was ignored when we were started (nohup, a shell's background job) stays ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def only_wake(number: int, frame: FrameType | None) -> None: ...

    before = {number: signal.getsignal(number) for number in (*_ENDING, signal.SIGTSTP)}
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


def _checked(port: int) -> int:
    fix = "Choose another port, or none: a free one is found."
    if not 1 <= port <= 65535:
        raise ConfigError("port", f"got {port}", "a port lies between 1 and 65535", fix)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
            probe.listen()
        except OSError as error:
            reason = (error.strerror or type(error).__name__).lower()
            raise ConfigError(
                "port", f"got {port} ({reason})", "rank 0 listens on it", fix
            ) from None
    return port


def _signal_group(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _say(line: str) -> None:
    # In one write: the ranks print to the same stream.
    sys.stderr.write(f"syncline: {line}\n")
    sys.stderr.flush()
