"""Finds out which ranks live and which are gone, and tells every rank within seconds.

One thread per rank watches the control connections (a star on every machine, a star of machines
above it). A rank can fail in three ways, each with its own message:

- died: its connection closed without a farewell; known at once;
- silent: no heartbeat for `silent_s`: a frozen process or a machine that is cut off;
- hung: another rank has waited for it for `hung_s`, and no rank has made progress for as long. A
  slow rank, or one that waits for a slow one, is not hung.

The first failure is passed on to every rank, and ranks that wait are woken. If the others can go
on without a rank (`tolerate`), its end is noted and passed on, and no other rank fails. Then every
rank watches the processes of its machine itself, so it does not depend on a leader to hear of them.
Across machines a leader that leaves in good order relays messages until all ranks below it have
left. Each rank keeps a progress record, which ranks of its machine can read after its death.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable

import msgspec

from syncline.comm.control_message import ControlMessage
from syncline.comm.handshake import Frames, pack
from syncline.comm.processes import LocalProcesses
from syncline.comm.progress import Reports, share_board
from syncline.comm.rendezvous import Connections, Place
from syncline.errors import CommError, RankDied, RankFailed, RankHung, RankSilent

log = logging.getLogger("syncline")

HEARTBEAT_S = 1.0
"""Short against `silent_s`, so some heartbeats may be late; one message a second costs nothing."""
EXPLAIN_S = 5.0
"""How long a failing rank may print its traceback before peers kill it: cores may be busy."""
_SEND_S = 5.0
"""How long a message may take to be sent: a peer that does not read for so long is frozen."""
_VERDICT_S = 3.0
"""How long to wait for the reason of a broken connection: heartbeats come every second."""
_HOW: dict[str, type[RankFailed]] = {"died": RankDied, "silent": RankSilent, "hung": RankHung}


class Control:
    """This rank's control connections, and which other ranks have left or failed."""

    def __init__(self, place: Place, links: Connections, *, silent_s: float, hung_s: float) -> None:
        self.place = place
        self.silent_s = silent_s
        self.hung_s = hung_s
        self.failure: RankFailed | None = None
        self.left: set[int] = set()
        self.gone: dict[int, RankFailed] = {}
        """Ranks that died or fell silent, where the others go on without them."""
        self.progress = share_board(place, links.memory)
        self._links = dict(links.children)
        if links.parent is not None:
            self._links[links.parent[0]] = links.parent[1]
        self._parent = links.parent[0] if links.parent else None
        self._children = set(links.children)
        self._reports = Reports(place, self.progress)
        self._processes = LocalProcesses(place, self.progress)
        self._heard = dict.fromkeys(self._links, time.monotonic())
        self._frames = {rank: Frames() for rank in self._links}
        self._callbacks: list[Callable[[RankFailed], None]] = []
        self._gone_callbacks: list[Callable[[int], None]] = []
        self._tolerated: frozenset[int] = frozenset()
        self._lock = threading.RLock()
        self._wake, self._waker = socket.socketpair()
        self._changed = threading.Condition(self._lock)
        self._closing = self._has_left = self._is_over = False
        for sock in self._links.values():
            sock.settimeout(_SEND_S)
        self._selector = selectors.DefaultSelector()  # here, where a refusal is the rank's error
        self._thread = threading.Thread(target=self._watch, name="syncline-control", daemon=True)
        self._thread.start()

    # What the rank's own threads call.

    def on_failure(self, callback: Callable[[RankFailed], None]) -> None:
        """Call back, on the control thread, when a peer is gone; at once if one already is."""
        with self._lock:
            self._callbacks.append(callback)
            failure = self.failure
        if failure is not None:
            callback(failure)

    def on_gone(self, callback: Callable[[int], None]) -> None:
        """Call back, on the control thread, when a rank has left, or is gone and tolerated."""
        with self._lock:
            self._gone_callbacks.append(callback)

    def tolerate(self, ranks: Iterable[int]) -> None:
        """From now on, go on without any of these ranks that is gone. Call it after a barrier.

        Only for ranks of one machine.
        """
        self._tolerated = frozenset(ranks)
        for rank in self._processes.watch():
            self._note_end(rank)
        self._waker.send(b"x")

    def _note_end(self, rank: int) -> None:
        """Note that a rank's process has ended: a failure, unless it wrote a farewell."""
        if not self._has_said_farewell(rank) and rank not in self.left:
            self._fail(rank, "died", f"rank {rank} died {self._reports.describe(rank)}.")

    def _has_said_farewell(self, rank: int) -> bool:
        """Say whether a rank of this machine wrote a farewell on the board; if so, note it."""
        if not self._reports.has_left(rank):
            return False
        self.left.add(rank)
        self._tell_gone(rank)
        return True

    def check(self) -> None:
        """Raise if a peer is known to be gone."""
        if self.failure is not None:
            raise self.failure

    def check_waiting_for(self, ranks: Iterable[int], waited_s: float, what: str) -> None:
        """Raise if waiting for these ranks cannot succeed."""
        self.check()
        waiting_for = list(ranks)
        for rank in waiting_for:
            if rank in self.gone:
                raise self.gone[rank]
            if rank in self.left:
                raise RankDied(
                    rank,
                    f"rank {rank} ended its run in good order, but rank {self.place.rank} still "
                    f"waits for it ({what} {self._reports.describe(self.place.rank)}). Give every "
                    "rank the same number of steps.",
                )
        if waiting_for:
            self.check_hung(waiting_for[0], waited_s, what)
            self.check()

    def check_hung(self, rank: int, waited_s: float, what: str) -> None:
        """Call a rank hung if this one has waited for it too long and no rank makes progress."""
        if waited_s > self.hung_s and self._stuck_s() > self.hung_s:
            self.call_hung(rank, waited_s, what)

    def _stuck_s(self) -> float:
        """Return for how many seconds no other rank that is still there has made progress."""
        return self._reports.stuck_s({*self.left, *self.gone})

    def call_hung(self, rank: int, waited_s: float, what: str) -> None:
        """Tell all ranks that this rank has waited for `rank` for too long.

        The rank furthest behind gets the blame, since `rank` may itself wait for that one.
        """
        begun = self._reports.num_begun({*self.left, *self.gone})
        culprit = min([rank, *begun], key=lambda other: begun.get(other, 0))
        through = "it" if culprit == rank else f"rank {rank}, which waits too"
        self._fail(
            culprit,
            "hung",
            f"rank {culprit} hangs {self._reports.describe(culprit)}: rank {self.place.rank} has "
            f"waited {waited_s:.0f} s for {through} ({what}).",
        )

    def steps(self) -> dict[int, int]:
        """Return how many steps each known rank has taken, also those that are gone."""
        return {rank: record[0] for rank, record in self._reports.everybody().items()}

    def where_is(self, rank: int) -> str:
        """Say where a rank was last seen: its step, phase and bucket."""
        return self._reports.describe(rank)

    def verdict(self, patience_s: float = _VERDICT_S) -> RankFailed | None:
        """Wait a moment for the control thread to find why a connection broke, and return it."""
        deadline = time.monotonic() + patience_s
        while self.failure is None and time.monotonic() < deadline:
            time.sleep(0.02)
        return self.failure

    def report(self, error: BaseException) -> None:
        """Tell all ranks that this rank fails by its own fault, and why."""
        why = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        rank = self.place.rank
        sentence = f"rank {rank} failed {self._reports.describe(rank)}: {why}"
        self._send_all(ControlMessage(gone=rank, how="died", why=sentence))

    def wait_until_left(self, ranks: set[int]) -> None:
        """Wait until these ranks have left or are gone, or one has failed."""
        while self.failure is None and ranks - self.left - self.gone.keys():
            with self._changed:
                self._changed.wait(HEARTBEAT_S)

    def say_farewell(self) -> None:
        """Tell the peers that this rank ends in good order. From now on failures are theirs."""
        if self.failure is None and not self._has_left:
            self._has_left = True
            self.progress.write_left()
            self._send_all(ControlMessage(left=[self.place.rank]))

    def close(self, *, in_good_order: bool = True) -> None:
        """Close the connections; say farewell first, so that peers do not report a death."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
        if in_good_order and self.failure is None:
            self.say_farewell()
            if len(self.place.leaders) > 1:  # the children's messages pass through here
                self.wait_until_left(self._children)
        self._is_over = True
        self._waker.send(b"x")
        self._thread.join(timeout=_SEND_S)
        for sock in self._links.values():
            sock.close()
        self._wake.close()
        self._waker.close()
        self._processes.close()

    # The control thread.

    def _watch(self) -> None:
        with self._selector as selector:
            selector.register(self._wake, selectors.EVENT_READ, None)
            for rank, sock in self._links.items():
                selector.register(sock, selectors.EVENT_READ, rank)
            next_beat = time.monotonic()
            watched: set[int] = set()
            while not self._is_over:
                now = last_turn = time.monotonic()
                if now >= next_beat:
                    self._beat()
                    self._stuck_s()
                    next_beat = now + HEARTBEAT_S
                files = self._processes.files
                for file in files.keys() - watched:
                    watched.add(file)
                    selector.register(file, selectors.EVENT_READ, files[file])
                for key, _ in selector.select(max(0.0, next_beat - time.monotonic())):
                    if key.fileobj is self._wake:
                        if not self._is_over:
                            self._wake.recv(1)
                    elif key.fileobj in watched:
                        selector.unregister(key.fileobj)
                        self._note_end(key.data)
                    elif not self._read(key.data):
                        selector.unregister(key.fileobj)
                        self._heard.pop(key.data, None)
                now = time.monotonic()
                if now - last_turn > 3 * HEARTBEAT_S:
                    # This rank itself was frozen: that it missed beats does not mean silence.
                    self._heard = dict.fromkeys(self._heard, now)
                    self._processes.forget_beats()
                self._look_for_silence()
                self._processes.end_those_due()

    def _beat(self) -> None:
        self.progress.beat()
        records = self._reports.local()
        if self.place.local_rank != 0:
            records = {self.place.rank: records[self.place.rank]}
        for rank in self._links:
            # To the parent only this machine's records, to children all known ones: no cycles.
            known = records if rank == self._parent else self._reports.heard | records
            self._send([rank], ControlMessage(records=known))

    def _read(self, rank: int) -> bool:
        """Handle what a peer sent; return False when its connection has ended."""
        try:
            data = self._links[rank].recv(1 << 16)
            messages = [
                msgspec.json.decode(frame, type=ControlMessage)
                for frame in self._frames[rank].feed(data)
            ]
        except (OSError, CommError, msgspec.MsgspecError):
            data, messages = b"", []
        for message in messages:
            self._heard[rank] = time.monotonic()
            self._reports.heard.update(message.records)
            if message.left:
                self.left.update(message.left)
                self._tell_gone(message.left[0])
                self._send_all(ControlMessage(left=message.left), but=rank)
            if message.gone is not None:
                self._fail(message.gone, message.how, message.why, source=rank)
        if not data and rank not in self.left and not self._is_over:
            self._fail(rank, "died", f"rank {rank} died {self._reports.describe(rank)}.")
        return bool(data)

    def _look_for_silence(self) -> None:
        now = time.monotonic()
        for rank in self._processes.watched() - self.left:
            self._has_said_farewell(rank)
            self._processes.look_for_beat(rank, now)
        heard_last = self._processes.last_beats() | self._heard
        for rank, heard in heard_last.items():
            if now - heard > self.silent_s and rank not in self.left:
                self._fail(
                    rank,
                    "silent",
                    f"rank {rank} is silent for {now - heard:.0f} s: frozen, or cut off. "
                    f"Last seen {self._reports.describe(rank)}.",
                )

    def _fail(self, rank: int, how: str, sentence: str, source: int | None = None) -> None:
        """Note the first failure, pass it on and wake the threads that wait."""
        with self._lock:
            if self.failure is not None or rank in self.gone:
                return
            failure = _HOW.get(how, RankDied)(rank, sentence)
            if rank in self._tolerated and how != "hung" and rank != self.place.rank:
                log.warning("rank %d: %s The others go on.", self.place.rank, sentence)
                self.gone[rank] = failure
                self._heard.pop(rank, None)
                self._processes.end_after(rank, EXPLAIN_S if how == "died" else 0.0)
                self._send_all(ControlMessage(gone=rank, how=how, why=sentence), but=source)
                self._tell_gone(rank)
                return
            if rank != self.place.rank and not self._has_left:
                # Log before another thread can see the failure and end the process.
                log.error("rank %d: %s", self.place.rank, sentence)
                failure.is_logged = True
            self.failure = failure
            callbacks = [] if self._has_left else list(self._callbacks)
            self._changed.notify_all()
        self._send_all(ControlMessage(gone=rank, how=how, why=sentence), but=source)
        for callback in callbacks:
            callback(failure)

    def _tell_gone(self, rank: int) -> None:
        with self._changed:
            self._changed.notify_all()
        for callback in self._gone_callbacks:
            callback(rank)

    def _send_all(self, message: ControlMessage, but: int | None = None) -> None:
        self._send([rank for rank in self._links if rank != but], message)

    def _send(self, ranks: Iterable[int], message: ControlMessage) -> None:
        frame = pack(message)
        with self._lock:
            for rank in ranks:
                # If a peer cannot be written to, reading from it will fail and report that.
                with contextlib.suppress(OSError):
                    self._links[rank].sendall(frame)
