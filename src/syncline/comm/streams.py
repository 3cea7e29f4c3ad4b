"""Messages between ranks over TCP: one connection per pair, filled without a gap.

What is sent to a peer goes out in the order in which it was asked for, so the most urgent is
first and the link never idles while something waits. Each message has a short header that says
which conversation it belongs to; the n-th message of a conversation meets the n-th receive. One
that comes before its receive is kept until then, so nobody's wire stands still for a slow peer.

Every connection proves the job's key both ways before the first byte. Sockets are served by
whoever sleeps in the hub: no thread of their own, and the kernel's buffers bridge arithmetic.
"""

from __future__ import annotations

import select
import socket
import struct
import time
import zlib
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from syncline.comm.control import Control
from syncline.comm.hub import NUM_CHANNELS, Hub
from syncline.comm.network import Message
from syncline.comm.rendezvous import Store, accept_all, connect_to, listen, read_address
from syncline.errors import CommError

_HEADER = struct.Struct("<IIQ")  # group, channel, bytes
_READ_AT_ONCE = 4 << 20
_LARGEST_BYTES = 1 << 40
_CHECK_S = 0.2
_BULKY_BYTES = 256 << 10

Conversation = tuple[int, int]
"""A group's number and a channel."""


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return a contiguous tensor's memory."""
    array: Any = tensor.detach().view(-1).view(torch.uint8).numpy()
    return memoryview(array)


@dataclass(eq=False)
class Exchange:
    """Some messages that are waited for together."""

    left: int = 0
    waits_for: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    """Rank -> messages still to come from it."""

    def arrived(self, rank: int) -> None:
        self.left -= 1
        self.waits_for[rank] -= 1


Receive = tuple[memoryview, Exchange]


class _Peer:
    """The connection with one rank."""

    def __init__(self, rank: int, sock: socket.socket, hub: Hub) -> None:
        self.rank = rank
        self.failure: str | None = None
        self._hub = hub
        self._sock = sock
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._outgoing: deque[tuple[memoryview, Exchange | None]] = deque()
        self._is_blocked = False
        self._posted: dict[Conversation, deque[Receive]] = defaultdict(deque)
        self._early: dict[Conversation, deque[bytearray]] = defaultdict(deque)
        self._header = bytearray(_HEADER.size)
        self._target = memoryview(self._header)
        self._receive: Receive | None = None
        self._conversation: Conversation | None = None
        """Of the message that is arriving; None while its header is."""
        hub.watch(sock.fileno(), select.EPOLLIN, self._on_event)

    def send(self, conversation: Conversation, message: memoryview, exchange: Exchange) -> None:
        self._outgoing.append((memoryview(_HEADER.pack(*conversation, len(message))), None))
        self._outgoing.append((message, exchange))
        if not self._is_blocked:
            self._write()

    def post(self, conversation: Conversation, target: memoryview, exchange: Exchange) -> None:
        """Say where the conversation's next message goes."""
        early = self._early[conversation]
        if not early:
            self._posted[conversation].append((target, exchange))
            return
        self._deliver(early.popleft(), (target, exchange))

    def _deliver(self, message: bytearray, receive: Receive) -> None:
        """Copy a message that came early to where it was to go."""
        target, exchange = receive
        self._check_length(len(message), target)
        target[:] = message
        exchange.arrived(self.rank)

    def _check_length(self, found: int, target: memoryview) -> None:
        if found != len(target):
            raise CommError(
                f"rank {self.rank} sent {found} bytes where {len(target)} were expected: do all "
                "ranks run the same program with the same versions?"
            )

    def _on_event(self, events: int) -> None:
        try:
            if events & (select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR):
                self._read()
            if events & select.EPOLLOUT:
                self._write()
        except (OSError, EOFError) as error:
            # Who is gone, and whether in good order, is for the control connections to say.
            self.failure = str(error) or type(error).__name__
            self._hub.forget(self._sock.fileno())

    def _write(self) -> None:
        while self._outgoing:
            batch = [piece for piece, _ in list(self._outgoing)[:8]]
            try:
                sent = self._sock.sendmsg(batch)
            except BlockingIOError:
                if not self._is_blocked:
                    self._is_blocked = True
                    self._hub.change(self._sock.fileno(), select.EPOLLIN | select.EPOLLOUT)
                return
            except OSError as error:
                self.failure = self.failure or str(error)
                return
            while self._outgoing and sent >= len(self._outgoing[0][0]):
                piece, exchange = self._outgoing.popleft()
                sent -= len(piece)
                if exchange is not None:
                    exchange.left -= 1
            if sent:
                piece, exchange = self._outgoing[0]
                self._outgoing[0] = (piece[sent:], exchange)
        if self._is_blocked:
            self._is_blocked = False
            self._hub.change(self._sock.fileno(), select.EPOLLIN)

    def _read(self) -> None:
        budget = _READ_AT_ONCE
        while budget > 0:
            try:
                count = self._sock.recv_into(self._target)
            except BlockingIOError:
                return
            if count == 0:
                raise EOFError("the connection was closed")
            budget -= count
            self._target = self._target[count:]
            if not len(self._target):
                self._take()

    def _take(self) -> None:
        """A header or a message is complete: go on to what follows."""
        if self._conversation is None:
            group, channel, length = _HEADER.unpack(self._header)
            if length > _LARGEST_BYTES:
                raise CommError(f"rank {self.rank} announced {length} bytes: not one of ours")
            self._conversation = (group, channel)
            posted = self._posted[self._conversation]
            if posted:
                self._receive = posted.popleft()
                self._check_length(length, self._receive[0])
                self._target = self._receive[0]
            else:
                early = bytearray(length)
                self._target = memoryview(early)
                self._arriving = early
            if length:
                return
        conversation, self._conversation = self._conversation, None
        if self._receive is not None:
            self._receive[1].arrived(self.rank)
            self._receive = None
        else:
            self._keep_early(conversation, self._arriving)
        self._target = memoryview(self._header)

    def _keep_early(self, conversation: Conversation, message: bytearray) -> None:
        posted = self._posted[conversation]
        if posted:
            # Its receive was posted while it arrived.
            self._deliver(message, posted.popleft())
        else:
            self._early[conversation].append(message)

    def close(self) -> None:
        if self.failure is None:
            self._hub.forget(self._sock.fileno())
        self._sock.close()


class Streams:
    """This rank's connections with all others, as one group of ranks uses them."""

    name = "tcp"
    num_channels = NUM_CHANNELS
    device = torch.device("cpu")

    def __init__(
        self, control: Control, hub: Hub, peers: dict[int, _Peer], ranks: Sequence[int] = ()
    ) -> None:
        self._control = control
        self._hub = hub
        self._peers = peers
        self._group = zlib.crc32(repr(sorted(ranks)).encode())
        self._num_parts: dict[tuple[int, ...], int] = defaultdict(int)

    def part(self, ranks: Sequence[int]) -> Streams:
        """Return the same connections for conversations of some of the ranks."""
        members = tuple(sorted(ranks))
        self._num_parts[members] += 1
        return Streams(self._control, self._hub, self._peers, [*members, self._num_parts[members]])

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message], what: str) -> None:
        """Send to and receive from ranks, everything at once, and wait for all of it."""
        conversation = (self._group, self._hub.channel)
        exchange = Exchange(len(sends) + len(receives))
        for rank, tensor in receives:
            exchange.waits_for[rank] += 1
            self._peers[rank].post(conversation, bytes_of(tensor), exchange)
        for rank, tensor in sends:
            self._peers[rank].send(conversation, bytes_of(tensor), exchange)
        is_bulky = sum(tensor.nbytes for _, tensor in receives) > _BULKY_BYTES
        self._hub.num_bulky += is_bulky
        try:
            self._wait(exchange, [rank for rank, _ in sends], what)
        finally:
            self._hub.num_bulky -= is_bulky

    def _wait(self, exchange: Exchange, sends_to: Sequence[int], what: str) -> None:
        started = checked = time.monotonic()
        while exchange.left:
            self._hub.sleep()
            now = time.monotonic()
            if exchange.left and (now - checked > _CHECK_S or self._control.failure is not None):
                checked = now
                late = [rank for rank, count in exchange.waits_for.items() if count]
                self._check(late, sends_to, now - started, what)

    def _check(
        self, late: Sequence[int], sends_to: Sequence[int], waited_s: float, what: str
    ) -> None:
        """Raise if the wait makes no sense any more."""
        # One that has left in good order may have sent everything before: its end of file tells.
        left = self._control.left
        waits_for = [
            rank for rank in late or sends_to if rank not in left or self._peers[rank].failure
        ]
        self._control.check_waiting_for(waits_for, waited_s, what)
        for rank in waits_for:
            failure = self._peers[rank].failure
            if failure is not None:
                self._control.verdict()
                self._control.check_waiting_for([rank], waited_s, what)
                raise CommError(
                    f"rank {self._control.place.rank}: {what} with rank {rank} failed on the "
                    f"network: {failure}"
                )

    def close(self) -> None:
        for peer in self._peers.values():
            peer.close()


def connect_streams(
    control: Control, hub: Hub, store: Store, address: str, timeout_s: float
) -> Streams:
    """Connect this rank with every other. Every rank calls it."""
    place = control.place
    sockets: dict[int, socket.socket] = {}
    with listen(place, store, address, "data", timeout_s) as listener:
        for rank in range(place.rank):
            where = read_address(place, store, "data", rank)
            sockets[rank] = connect_to(*where, place, "data", rank, timeout_s)
        higher = {(rank, "data") for rank in range(place.rank + 1, place.size)}
        sockets |= {rank: sock for (rank, _), sock in accept_all(listener, place, higher).items()}
    control.on_failure(lambda failure: hub.wake())
    return Streams(control, hub, {rank: _Peer(rank, sock, hub) for rank, sock in sockets.items()})
