"""Messages between ranks over TCP: one connection per pair, kept busy.

Messages to a peer go out by urgency, then in the order of the `send` calls; the link is never idle
while a message waits. Messages are sent in pieces, so that an urgent one need not wait for the end
of a less urgent one; the kernel is given little more than is on its way. Each piece has a short
header that says which conversation it belongs to; the n-th message of a conversation goes to its
n-th receive, which must be of the same collective (`operations.py`). A message that comes before
its receive is kept, so that a slow receiver does not block the connection.

Both ends of a connection prove the job's key before the first byte. Sockets have no thread of
their own: the thread that sleeps in the hub serves them. While that thread does arithmetic, the
kernel's buffers keep the link busy.
"""

from __future__ import annotations

import fcntl
import heapq
import select
import socket
import struct
import termios
import time
from array import array
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from syncline.comm.context import Context
from syncline.comm.control import Control
from syncline.comm.group_numbers import GroupNumbers
from syncline.comm.hub import NUM_CHANNELS, PATIENT, Hub
from syncline.comm.network import Addressed
from syncline.comm.network_window import NetworkWindow
from syncline.comm.operations import KIND, refuse_mismatch
from syncline.comm.pace import PIECE_BYTES, Pace
from syncline.comm.rendezvous import Store, accept_all, connect_to, listen, read_address
from syncline.comm.window import Functions, Window
from syncline.errors import CommError

_HEADER = struct.Struct("<IIIIQ")  # group, channel, collective, bytes of the piece, of the message
# Unless marked as measured (docs/decisions/0007 and 0008), these limits are reasoned for 1 Gbit/s,
# which carries 125 kB in a millisecond.
_READ_AT_ONCE = 4 << 20
"""One peer's bytes are read for a millisecond at most, then the other peers' turn comes."""
_LARGEST_BYTES = 1 << 40
"""More than any machine's memory: a header with more is not from Syncline."""
_CHECK_S = 0.2
"""How often a wait checks that its peers still live; their death is known after seconds anyway."""
_BULKY_BYTES = 256 << 10
"""More than a socket's buffer holds, so it needs several reads; a pause makes them fewer.
Measured: pausing for these takes processor time from 110-130 to 84-97 ms a step."""
_MOST_SPARES = 8
"""Messages may come before their receive on each of five channels, for two steps at a time."""

Conversation = tuple[int, int]
"""A group's number and a channel."""


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor, not copied."""
    array: Any = tensor.detach().view(-1).view(torch.uint8).numpy()
    return memoryview(array)


@dataclass(eq=False)
class Exchange:
    """Messages that one hook waits for together."""

    left: int = 0
    waits_for: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    """Rank -> messages still to come from it."""

    def is_over(self) -> bool:
        return not self.left

    def arrived(self, rank: int) -> None:
        self.left -= 1
        self.waits_for[rank] -= 1


Receive = tuple[memoryview, Exchange, int]
"""Where a message goes, what waits for it, and the number of its collective."""


@dataclass(eq=False, slots=True)
class _Outgoing:
    """A message on its way out."""

    conversation: Conversation
    left: memoryview
    size_bytes: int
    exchange: Exchange
    operation: int


Listener = Callable[[int, bytearray], None]
"""Takes a rank and a message from it. The message's memory is reused after the call returns."""

Turn = tuple[int, int, _Outgoing]
"""Urgency, number and message. The smallest goes first: the most urgent, then the oldest."""


@dataclass(eq=False)
class _Incoming:
    """A message that is arriving: where it goes, how much has come, which exchange waits for it."""

    target: memoryview
    operation: int
    exchange: Exchange | None
    """None if no receive was posted when the message began to arrive."""
    num_bytes: int = 0


class _Spares:
    """Reused memory for messages that come before their receive: fresh pages cost more."""

    def __init__(self) -> None:
        self._held: deque[bytearray] = deque(maxlen=_MOST_SPARES)

    def take(self, size_bytes: int) -> bytearray:
        for buffer in self._held:
            if len(buffer) == size_bytes:
                self._held.remove(buffer)
                return buffer
        return bytearray(size_bytes)

    def give(self, buffer: bytearray) -> None:
        self._held.append(buffer)


class _Peer:
    """The connection with one rank."""

    def __init__(
        self, rank: int, sock: socket.socket, hub: Hub, pace: Pace, control: Control
    ) -> None:
        self.rank = rank
        self._control = control
        self._pace = pace
        self.failure: str | None = None
        self._hub = hub
        self._sock = sock
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._unsent_bytes = 0
        self._outgoing: list[Turn] = []  # a heap
        self._num_sent = 0
        self._piece: list[memoryview] = []
        """The unsent rest of the current piece: its header and its bytes."""
        self._turn: Turn | None = None
        """The message that the current piece belongs to."""
        self._piece_bytes = 0
        self._is_blocked = False
        self._is_waiting = False
        self._num_queued = array("i", [0])
        self._posted: dict[Conversation, deque[Receive]] = defaultdict(deque)
        self._unexpected: dict[Conversation, deque[tuple[bytearray, int]]] = defaultdict(deque)
        self._spares = _Spares()
        self._listeners: dict[Conversation, Listener] = {}
        self._forgotten: set[int] = set()
        """Groups that are closed on this rank; their messages may still arrive."""
        self._incoming: dict[Conversation, _Incoming] = {}
        self._header = bytearray(_HEADER.size)
        self._target = memoryview(self._header)
        self._conversation: Conversation | None = None
        """The conversation of the piece that is arriving; None while its header is arriving."""
        hub.watch(sock.fileno(), select.EPOLLIN, self._on_event)

    def send(
        self,
        conversation: Conversation,
        message: memoryview,
        exchange: Exchange,
        urgency: int,
        operation: int,
    ) -> None:
        self._num_sent += 1
        outgoing = _Outgoing(conversation, message, len(message), exchange, operation)
        heapq.heappush(self._outgoing, (urgency, self._num_sent, outgoing))
        if not self._is_blocked and self.failure is None:
            self._write()

    def post(self, conversation: Conversation, receive: Receive) -> None:
        """Receive the conversation's next message."""
        unexpected = self._unexpected[conversation]
        if not unexpected:
            self._posted[conversation].append(receive)
            return
        self._deliver(*unexpected.popleft(), receive)

    def listen(self, conversation: Conversation, listener: Listener) -> None:
        """Hand every message of a conversation to a listener, also those already received."""
        self._listeners[conversation] = listener
        unexpected = self._unexpected[conversation]
        while unexpected:
            self._hand_to(listener, unexpected.popleft()[0])

    def _hand_to(self, listener: Listener, message: bytearray) -> None:
        listener(self.rank, message)
        self._spares.give(message)

    def _deliver(self, message: bytearray, operation: int, receive: Receive) -> None:
        """Copy a message that came before its receive to the receive's target."""
        target, exchange, _ = receive
        self._check(len(message), operation, receive)
        target[:] = message
        self._spares.give(message)
        exchange.arrived(self.rank)

    def _check(self, num_bytes: int, operation: int, receive: Receive) -> None:
        """Raise if a message is not the one that this rank waits for."""
        target, _, expected = receive
        if operation != expected:
            raise refuse_mismatch(self._control, expected, self.rank, operation)
        if num_bytes != len(target):
            raise CommError(
                f"rank {self.rank} sent {num_bytes} bytes where {len(target)} were expected: do "
                "all ranks run the same program with the same versions?"
            )

    def _on_event(self, events: int) -> None:
        try:
            if events & (select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR):
                self._read()
            if events & select.EPOLLOUT:
                self._write()
        except (OSError, EOFError) as error:
            # The control connections tell whether the peer is gone, and why.
            self.failure = str(error) or type(error).__name__
            self._hub.forget(self._sock.fileno())

    def _write(self) -> None:
        if self._unsent_bytes != self._pace.unsent_bytes:
            self._unsent_bytes = self._pace.unsent_bytes
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, self._unsent_bytes)
        while self._piece or self._outgoing:
            if not self._piece:
                if self._outgoing[0][0] >= PATIENT and self._must_wait():
                    break
                self._cut_piece()
            try:
                sent = self._sock.sendmsg(self._piece)
            except BlockingIOError:
                self._block(True)
                return
            except OSError as error:
                self.failure = self.failure or str(error)
                return
            self._piece_bytes -= sent
            if self._piece_bytes:
                # The kernel took only a part: its buffer is full.
                while sent >= len(self._piece[0]):
                    sent -= len(self._piece.pop(0))
                self._piece[0] = self._piece[0][sent:]
                self._block(True)
                return
            self._end_piece()
        self._block(False)

    def _block(self, is_blocked: bool) -> None:
        """Start or stop asking epoll to tell when the kernel takes more bytes."""
        if is_blocked != self._is_blocked:
            self._is_blocked = is_blocked
            out = select.EPOLLOUT if is_blocked else 0
            self._hub.change(self._sock.fileno(), select.EPOLLIN | out)

    def _resume(self) -> None:
        self._is_waiting = False
        if not self._is_blocked and self.failure is None:
            self._write()

    def _must_wait(self) -> bool:
        """Say whether patient messages must wait, since the kernel holds too much for this peer."""
        fcntl.ioctl(self._sock.fileno(), termios.TIOCOUTQ, self._num_queued)
        if self._num_queued[0] <= self._pace.patient_bytes:
            return False
        if not self._is_waiting:
            self._is_waiting = True
            self._hub.look_again(self._resume)
        return True

    def _cut_piece(self) -> None:
        """Cut the next piece from the most urgent message."""
        self._turn = urgency, _, message = heapq.heappop(self._outgoing)
        size = self._pace.patient_bytes if urgency >= PATIENT else self._pace.piece_bytes
        piece, message.left = message.left[:size], message.left[size:]
        header = _HEADER.pack(
            *message.conversation, message.operation, len(piece), message.size_bytes
        )
        self._piece = [memoryview(header), piece]
        self._piece_bytes = len(header) + len(piece)

    def _end_piece(self) -> None:
        assert self._turn is not None
        self._piece = []
        message = self._turn[2]
        if len(message.left):
            heapq.heappush(self._outgoing, self._turn)
        else:
            message.exchange.left -= 1
        self._turn = None

    def _read(self) -> None:
        budget = _READ_AT_ONCE
        while budget > 0:
            wanted: list[memoryview | bytearray] = [self._target]
            num_wanted = len(self._target)
            if self._conversation is not None:
                wanted.append(self._header)
                num_wanted += _HEADER.size
            try:
                count = self._sock.recvmsg_into(wanted)[0]
            except BlockingIOError:
                return
            if count == 0:
                raise EOFError("the connection was closed")
            self._pace.count(count)
            # Fewer bytes than asked for: the socket is empty, so do not ask again.
            budget = budget - count if count == num_wanted else 0
            more = count - len(self._target)
            self._target = self._target[count:]
            if more >= 0:
                self._end_part()
                # The same read may also have brought the next header, or a part of it.
                self._target = self._target[more:]
                if more == _HEADER.size:
                    self._end_part()

    def _end_part(self) -> None:
        """Take in a header or piece that is complete, and set where the next bytes go."""
        if self._conversation is None:
            group, channel, operation, num_bytes, size_bytes = _HEADER.unpack(self._header)
            self._conversation = (group, channel)
            incoming = self._incoming.get(self._conversation)
            if incoming is None:
                incoming = self._begin_message(self._conversation, operation, size_bytes)
            first, last = incoming.num_bytes, incoming.num_bytes + num_bytes
            if not num_bytes or last > size_bytes or size_bytes != len(incoming.target):
                raise CommError(f"rank {self.rank} sent a piece of no message: not one of ours")
            incoming.num_bytes = last
            self._target = incoming.target[first:last]
            return
        conversation, self._conversation = self._conversation, None
        self._target = memoryview(self._header)
        incoming = self._incoming[conversation]
        if incoming.num_bytes == len(incoming.target):
            del self._incoming[conversation]
            if incoming.exchange is not None:
                incoming.exchange.arrived(self.rank)
            else:
                message: Any = incoming.target.obj
                self._keep_unexpected(conversation, message, incoming.operation)

    def _begin_message(
        self, conversation: Conversation, operation: int, size_bytes: int
    ) -> _Incoming:
        """Return where to put a message whose first piece has arrived."""
        if size_bytes > _LARGEST_BYTES:
            raise CommError(f"rank {self.rank} announced {size_bytes} bytes: not one of ours")
        posted = self._posted[conversation]
        if posted:
            receive = posted.popleft()
            self._check(size_bytes, operation, receive)
            incoming = _Incoming(receive[0], operation, receive[1])
        else:
            incoming = _Incoming(memoryview(self._spares.take(size_bytes)), operation, None)
        self._incoming[conversation] = incoming
        return incoming

    def _keep_unexpected(
        self, conversation: Conversation, message: bytearray, operation: int
    ) -> None:
        listener = self._listeners.get(conversation)
        posted = self._posted[conversation]
        if conversation[0] in self._forgotten:
            self._spares.give(message)
        elif listener is not None:
            self._hand_to(listener, message)
        elif posted:
            # The receive was posted while the message arrived.
            self._deliver(message, operation, posted.popleft())
        else:
            self._unexpected[conversation].append((message, operation))

    def forget(self, group: int) -> None:
        """Drop messages of a group that is closed on this rank, also those still to come."""
        self._forgotten.add(group)
        tables: list[dict[Conversation, Any]] = [self._posted, self._unexpected, self._listeners]
        for table in tables:
            for conversation in [one for one in table if one[0] == group]:
                del table[conversation]

    def close(self) -> None:
        if self.failure is None:
            self._hub.forget(self._sock.fileno())
        self._sock.close()


class Streams:
    """This rank's connections with all others, as one group of ranks uses them."""

    name = "tcp"
    num_channels = NUM_CHANNELS

    def __init__(
        self,
        control: Control,
        hub: Hub,
        peers: dict[int, _Peer],
        numbers: GroupNumbers | None = None,
        group: int = 0,
    ) -> None:
        """`numbers` are shared by all parts; None makes the streams of the world, group 0."""
        self._control = control
        self._hub = hub
        self._peers = peers
        self._group = group
        self._is_part = numbers is not None
        self._numbers = numbers or GroupNumbers()
        self._windows: list[Streams] = []
        """The streams that windows of these ranks use."""

    def part(self, ranks: Sequence[int]) -> Streams:
        """Return streams for a group of some of the ranks, over the same connections."""
        peers = {rank: self._peers[rank] for rank in ranks if rank in self._peers}
        group = self._numbers.take(ranks)
        return Streams(self._control, self._hub, peers, self._numbers, group)

    def prepare(
        self, sends: Sequence[Addressed], receives: Sequence[Addressed], about: int
    ) -> Callable[[str], None]:
        """Return a function that sends and receives everything at once and waits for all of it."""
        outgoing = [(self._peers[rank], bytes_of(tensor)) for rank, tensor in sends]
        incoming = [(self._peers[rank], bytes_of(tensor)) for rank, tensor in receives]
        return lambda what: self._exchange(outgoing, incoming, what, KIND[what] | about)

    def begin(
        self, sends: Sequence[Addressed], receives: Sequence[Addressed], what: str, about: int
    ) -> Callable[[], None]:
        """Begin to send and receive everything; return a function that waits for all of it."""
        outgoing = [(self._peers[rank], bytes_of(tensor)) for rank, tensor in sends]
        incoming = [(self._peers[rank], bytes_of(tensor)) for rank, tensor in receives]
        exchange = self._begin(outgoing, incoming, KIND[what] | about)
        return lambda: self._end(exchange, outgoing, incoming, what)

    def window(
        self,
        context: Context,
        ranks: tuple[int, ...],
        num_elements: int,
        dtype: torch.dtype,
        functions: Functions,
    ) -> Window:
        """Return a window among ranks, with conversations of its own."""
        part = self.part(ranks)
        self._windows.append(part)
        return NetworkWindow(part, context, ranks, num_elements, dtype, functions)

    # Messages of windows: all have one urgency, so that they keep their order.

    def listen(self, channel: int, listener: Listener) -> None:
        """Hand every message on a channel to a listener, from whichever rank it comes."""
        for peer in self._peers.values():
            peer.listen((self._group, channel), listener)

    def send(self, rank: int, channel: int, tensor: torch.Tensor) -> Exchange:
        """Begin to send a tensor, which must not change until the exchange is over."""
        return self._send(rank, channel, bytes_of(tensor))

    def send_bytes(self, rank: int, channel: int, message: bytes) -> None:
        self._send(rank, channel, memoryview(message))

    def _send(self, rank: int, channel: int, message: memoryview) -> Exchange:
        exchange = Exchange(1)
        self._peers[rank].send((self._group, channel), message, exchange, 0, KIND["message"])
        return exchange

    def receive(self, rank: int, channel: int, tensor: torch.Tensor) -> Exchange:
        """Begin to receive the next message on a channel into a tensor."""
        exchange = Exchange(1)
        exchange.waits_for[rank] += 1
        receive = (bytes_of(tensor), exchange, KIND["message"])
        self._peers[rank].post((self._group, channel), receive)
        return exchange

    def _exchange(
        self,
        sends: Sequence[tuple[_Peer, memoryview]],
        receives: Sequence[tuple[_Peer, memoryview]],
        what: str,
        operation: int,
    ) -> None:
        self._end(self._begin(sends, receives, operation), sends, receives, what)

    def _begin(
        self,
        sends: Sequence[tuple[_Peer, memoryview]],
        receives: Sequence[tuple[_Peer, memoryview]],
        operation: int,
    ) -> Exchange:
        conversation = (self._group, self._hub.channel)
        exchange = Exchange(len(sends) + len(receives))
        for peer, target in receives:
            exchange.waits_for[peer.rank] += 1
            peer.post(conversation, (target, exchange, operation))
        for peer, message in sends:
            peer.send(conversation, message, exchange, self._hub.urgency, operation)
        return exchange

    def _end(
        self,
        exchange: Exchange,
        sends: Sequence[tuple[_Peer, memoryview]],
        receives: Sequence[tuple[_Peer, memoryview]],
        what: str,
    ) -> None:
        is_bulky = sum([len(target) for _, target in receives]) > _BULKY_BYTES
        self._hub.num_bulky += is_bulky
        try:
            self._wait(exchange, [peer.rank for peer, _ in sends], what)
        finally:
            self._hub.num_bulky -= is_bulky

    def _wait(self, exchange: Exchange, sends_to: Sequence[int], what: str) -> None:
        started = checked = time.monotonic()
        while exchange.left:
            self._hub.sleep(exchange.is_over)
            now = time.monotonic()
            if exchange.left and (now - checked > _CHECK_S or self._control.failure is not None):
                checked = now
                late = [rank for rank, count in exchange.waits_for.items() if count]
                self._check(late, sends_to, now - started, what)

    def _check(
        self, late: Sequence[int], sends_to: Sequence[int], waited_s: float, what: str
    ) -> None:
        """Raise if the wait cannot succeed."""
        # A rank that left in good order may have sent everything: only its end of file is final.
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
        for window in self._windows:
            window.close()
        for peer in self._peers.values():
            if self._is_part:
                peer.forget(self._group)
            else:
                peer.close()


def connect_streams(
    control: Control, hub: Hub, store: Store, address: str, meet_s: float
) -> Streams:
    """Connect this rank with every other. Every rank calls it."""
    place = control.place
    sockets: dict[int, socket.socket] = {}
    with listen(place, store, address, "data") as listener:
        for rank in range(place.rank):
            where = read_address(place, store, "data", rank)
            sockets[rank] = connect_to(*where, place, "data", rank, meet_s)
        higher = {(rank, "data") for rank in range(place.rank + 1, place.size)}
        came = accept_all(listener, place, higher, meet_s)
        sockets |= {rank: sock for (rank, _), sock in came.items()}
    # With more peers less comes from each in a millisecond: pause longer and send larger pieces, so
    # that a system call still moves enough. Decision 7's figures are for 4 machines: 3 peers.
    scale = max(1.0, len(sockets) / 3)
    hub.pause_s *= scale
    pace = Pace(len(sockets), hub.pause_s, int(scale * PIECE_BYTES))
    peers = {rank: _Peer(rank, sock, hub, pace, control) for rank, sock in sockets.items()}
    return Streams(control, hub, peers)
