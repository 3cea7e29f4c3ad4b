"""The small launcher: start N ranks on this machine, and wait for them.

A rank is a new program, or a fork of this process, which has loaded what all ranks need. torchrun
ends all ranks when one dies. Here the others live on: they end by themselves when the library
tells them, or train on if the strategy survives a death. The promises: Ctrl-C and SIGTERM stop
every rank (with SIGTERM, then after a grace period SIGKILL); nothing survives the launcher, even
if it is killed with SIGKILL; each rank that ended badly gets one line on stderr; ranks that do
nothing at all after another has ended are not waited for.

The launcher sleeps until a rank ends, a signal arrives or a deadline passes. It looks at the ranks
from time to time only when one has ended.
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
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from syncline.errors import ConfigError
from syncline.launch.activity import Activity
from syncline.launch.env import rank_environment, read_world
from syncline.launch.forked import Forked, dying_with_parent
from syncline.launch.met import listen_for_meeting
from syncline.launch.outcome import Outcome, describe_end
from syncline.launch.signals import signals_to

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_MEETING = -1
"""Marks the socket that says that all ranks have met; a rank's pidfd is marked with its rank."""
GRACE_S = 10.0
"""From SIGTERM to SIGKILL: a rank may have to write what it has, to a slow disk."""
AFTER_FAILURE_S = 10.0
"""Ranks hear of a failed one within a second, then they may print and write for a while."""
FROZEN_S = 60.0
"""A rank that lives beats every second; a machine that swaps may delay that by many seconds."""
BAD_INPUT = 2
STOPPED = 3
"""The status of a rank that ends its run on purpose, before the last step, and has said why."""
_ANY_PORT = 29400
"""torchrun's own: any number would do where no rank listens."""


def launch(
    work: Sequence[str] | Callable[[], object],
    ranks: int,
    *,
    threads: int = 1,
    extra_env: Mapping[str, str] | None = None,
    port: int | None = None,
    grace_s: float = GRACE_S,
    after_failure_s: float | None = AFTER_FAILURE_S,
    go_on: bool = False,
    meets: bool = False,
    frozen_s: float = FROZEN_S,
    stdout: int | None = None,
    said: Collection[int] = (BAD_INPUT,),
) -> Outcome:
    """Run `work` as ranks 0 to `ranks - 1` and wait for all of them.

    A command is started once for each rank; a function is called in one fork of this process for
    each rank, so that ranks need not load again what is loaded here (seconds, for torch).

    After the first rank that ends badly the others have `after_failure_s` to end by themselves
    (None: no limit), then they are stopped. With `go_on` they are not stopped, and the run succeeds
    if any of them ends well. If all ranks surely call `init` (`meets`), that holds only after they
    have met: without the one that ended they never will. Stopping is SIGTERM, and SIGKILL after
    `grace_s`. Once a rank has ended, the rest is also stopped if none of them has run for
    `frozen_s`: not even a heartbeat, so they are frozen. Ranks that end with a status in `said`
    have said why themselves.

    `port` is where rank 0 will listen, a free one if None. `stdout` is the file descriptor the
    ranks write to, this process's own if None; they have no stdin.

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
    watch = _Watch(grace_s, after_failure_s, frozen_s, said, goes_on=go_on)
    with signals_to(watch.signals, (*_ENDING, signal.SIGTSTP)):
        try:
            if go_on and meets and ranks > 1:
                watch.expect_meeting(listen_for_meeting(read_world(environment(0)).job_id))
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
        self,
        grace_s: float,
        after_failure_s: float | None,
        frozen_s: float,
        said: Collection[int],
        *,
        goes_on: bool,
    ) -> None:
        self.grace_s = grace_s
        self.after_failure_s = after_failure_s
        self.frozen_s = frozen_s
        self.said = said
        self.goes_on = goes_on
        """Whether ranks have all the time they want after another has ended badly."""
        self.activity = Activity()
        self.look_at_s: float | None = None
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

    def expect_meeting(self, listener: socket.socket) -> None:
        """Do not go on without a rank before `listener` says that all ranks have met."""
        self.goes_on = False
        self.selector.register(listener, selectors.EVENT_READ, data=_MEETING)

    def until_all_ended(self) -> Outcome:
        while len(self.statuses) < len(self.ranks):
            events = self.selector.select(self._time_left_s())
            # A rank that ended after the meeting must not count as one that ended before it.
            for key, _ in sorted(events, key=lambda event: event[0].data != _MEETING):
                if key.data is None:
                    assert isinstance(key.fileobj, socket.socket)
                    for number in key.fileobj.recv(64):
                        self._take_signal(number)
                elif key.data == _MEETING:
                    self._take_meeting(key)
                else:
                    self._take_end(key)
            if self.deadline_s is not None and time.monotonic() >= self.deadline_s:
                self._take_deadline()
            if self.look_at_s is not None and time.monotonic() >= self.look_at_s:
                self._look_for_frozen()
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
        times = [at for at in (self.deadline_s, self.look_at_s) if at is not None]
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _take_meeting(self, key: selectors.SelectorKey) -> None:
        assert isinstance(key.fileobj, socket.socket)
        self.selector.unregister(key.fileobj)
        key.fileobj.close()
        self.goes_on = True

    def _look_for_frozen(self) -> None:
        """Stop the ranks that are left if none of them has run for a while."""
        self.look_at_s = time.monotonic() + self.frozen_s / 4
        alive = {rank: one.pid for rank, one in enumerate(self.ranks) if rank not in self.statuses}
        idle_s = self.activity.idle_s(alive)
        if alive and idle_s >= self.frozen_s and not self.is_stopping:
            _say(f"stopping {self._alive_in_words()}: frozen for {idle_s:.0f} s, and others ended")
            self._stop()

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
        self.look_at_s = self.look_at_s or time.monotonic()
        if status == 0 or self.is_stopping:
            return
        if status not in self.said:
            _say(describe_end(rank, status))
        if not self.goes_on and self.after_failure_s is not None and self.deadline_s is None:
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
        self.activity = Activity()

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


def _say(line: str) -> None:
    # In one write: the ranks print to the same stream.
    sys.stderr.write(f"syncline: {line}\n")
    sys.stderr.flush()
