"""Lets one rank alone read the optimizer state that other ranks hold.

People save on rank 0, so reading must not be a collective: the other ranks may compute, wait in a
collective, sit in a barrier or have left their loop. Each rank has a thread that sleeps until a
peer connects, so it can answer at any time, also where no comm lane has a thread. Nothing is
unpickled: entries are decoded into a fixed type, values are raw numbers.

On one machine the thread listens on a Unix socket in the abstract name space and checks the
caller's user; on several, on TCP at the job's interface. Both ends prove the job's key.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Iterable, Iterator

import msgspec
import torch

from syncline.comm.control import Control
from syncline.comm.handshake import answer, knock, pack, receive_frame
from syncline.comm.rendezvous import local_address_towards
from syncline.engine.state import Held, bytes_of, decode_entries, encode_entries
from syncline.errors import CommError, KeyRefused

log = logging.getLogger("syncline")

_PURPOSE = "state"
_LOOK_S = 1.0
"""How often a rank that waits for an answer looks whether a rank has failed."""
_GREET_S = 10.0
"""How long a connection may take to prove the job's key."""
_CREDENTIALS = struct.Struct("3i")
_LENGTH = struct.Struct("<q")
_REFUSED = -1
"""In place of the length of a list of entries: a frame with the reason follows."""
_END = -2
_MAX_LIST_BYTES = 1 << 30


class StateRequest(msgspec.Struct, forbid_unknown_fields=True):
    """What a rank asks of another."""

    step: int
    """The state after this many steps."""
    loads: int
    """How often state was loaded before."""
    buckets: list[int]


Answers = Callable[[StateRequest], Iterable[list[Held]]]
"""Yields the entries of each bucket; raises CommError with a reason."""


class StateService:
    """A thread that answers the other ranks' requests."""

    def __init__(self, control: Control, address: str | None, answers: Answers) -> None:
        """`address` is the job's; None on one machine."""
        self._place = control.place
        self._answers = answers
        if len(self._place.leaders) == 1 or address is None:
            name = f"syncline/{self._place.job}/state/{self._place.rank}/{secrets.token_hex(4)}"
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._listener.bind("\0" + name)
            self.where = name
            """Where the other ranks reach this one."""
        else:
            host = local_address_towards(address)
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._listener = socket.socket(family, socket.SOCK_STREAM)
            self._listener.bind((host, 0))
            self.where = f"{host} {self._listener.getsockname()[1]}"
        self._listener.listen(self._place.size)
        self._is_closed = False
        threading.Thread(target=self._run, name="syncline-state", daemon=True).start()

    def close(self) -> None:
        """End the thread. Connections that are being served end by themselves."""
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._listener.close()

    def _run(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                if self._is_closed:
                    return
                continue
            # A thread for each: a caller that is slow to prove its key must not delay the others.
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        torch.set_num_threads(1)  # of this thread: copies must not start a pool of their own
        with sock:
            try:
                sock.settimeout(_GREET_S)
                caller = _caller(sock)
                answer(sock, self._place.key, self._place.job, self._place.rank, caller)
                request = msgspec.json.decode(receive_frame(sock), type=StateRequest)
                sock.settimeout(None)
            except (KeyRefused, CommError, OSError, ValueError) as error:
                log.warning("%s", error)
                return
            with contextlib.suppress(OSError):  # the reader died; others report that
                self._send_all(sock, request)

    def _send_all(self, sock: socket.socket, request: StateRequest) -> None:
        try:
            for held in self._answers(request):
                listed = encode_entries(held)
                sock.sendall(_LENGTH.pack(len(listed)) + listed)
                for _, value in held:
                    if value is not None:
                        sock.sendall(bytes_of(value))
            sock.sendall(_LENGTH.pack(_END))
        except (CommError, TypeError) as error:  # TypeError: state that cannot be encoded
            reason = f"rank {self._place.rank}: {error}"
            sock.sendall(_LENGTH.pack(_REFUSED) + pack(reason))


def ask(control: Control, rank: int, where: str, request: StateRequest) -> Iterator[Held]:
    """Yield a rank's entries of the buckets in the request. Waits until the rank has them."""
    with _connect(control, rank, where) as sock:
        sock.sendall(pack(request))
        sock.settimeout(_LOOK_S)
        while True:
            (length,) = _LENGTH.unpack(_receive(control, rank, sock, bytearray(_LENGTH.size)))
            if length == _END:
                return
            if length == _REFUSED:
                sock.settimeout(_GREET_S)
                raise CommError(msgspec.json.decode(receive_frame(sock), type=str))
            if not 0 <= length <= _MAX_LIST_BYTES:
                raise CommError(f"rank {rank} sent a list of {length} bytes: not one of ours")
            for entry in decode_entries(bytes(_receive(control, rank, sock, bytearray(length)))):
                value = None
                if entry.dtype:
                    value = entry.empty()
                    _receive(control, rank, sock, bytes_of(value))
                yield entry, value


def _connect(control: Control, rank: int, where: str) -> socket.socket:
    place = control.place
    found = re.fullmatch(r"([0-9a-fA-F.:]{2,45}) (\d{1,5})", where)
    if found is None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        address: object = "\0" + where
    else:
        family = socket.AF_INET6 if ":" in found[1] else socket.AF_INET
        sock, address = socket.socket(family, socket.SOCK_STREAM), (found[1], int(found[2]))
    try:
        sock.settimeout(_GREET_S)
        sock.connect(address)  # type: ignore[arg-type]  # str or (host, port), by family
        if sock.family == socket.AF_UNIX:
            _caller(sock)
        met = knock(sock, place.key, place.job, place.rank, _PURPOSE)
        if met != rank:
            raise CommError(f"rank {place.rank} looked for rank {rank} and found rank {met}")
    except (OSError, ValueError) as error:
        sock.close()
        raise _lost(control, rank, error) from None
    return sock


def _receive(
    control: Control, rank: int, sock: socket.socket, into: bytearray | memoryview
) -> bytearray | memoryview:
    """Fill memory from a socket, as long as no rank fails."""
    view, done = memoryview(into), 0
    while done < len(view):
        try:
            num_bytes = sock.recv_into(view[done:])
        except TimeoutError:
            control.check()
            continue
        except OSError as error:
            raise _lost(control, rank, error) from None
        if not num_bytes:
            raise _lost(control, rank, "the connection ended")
        done += num_bytes
    return into


def _lost(control: Control, rank: int, why: object) -> Exception:
    return control.verdict() or CommError(
        f"rank {control.place.rank} could not read optimizer state from rank {rank}: {why}"
    )


def _caller(sock: socket.socket) -> str:
    """Name the other end of a connection; refuse another user's process on this machine."""
    if sock.family != socket.AF_UNIX:
        return f"a connection from {sock.getpeername()[0]}"
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    if uid not in (0, os.getuid()):
        raise KeyRefused(f"process {pid} of user {uid} was refused: another user")
    return f"process {pid} of user {uid}"
