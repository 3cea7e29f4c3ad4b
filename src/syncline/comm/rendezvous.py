"""How the ranks of a job find each other: a star on every machine, a star of machines above it.

On each machine the rank with local rank 0, the machine's leader, answers on a Unix socket in the
abstract name space (nothing to clean up), checks the caller's user and key, and keeps two
connections with every member: one for control, one to pass shared memory. Leaders of other machines
reach rank 0 over TCP on the job's own interface. They read its address from the job's store, which
holds nothing secret and is not trusted: the key is proven on the connection itself.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import struct
import time
from dataclasses import dataclass, field
from typing import Protocol

from syncline.comm.handshake import answer, knock
from syncline.errors import CommError, ConfigError, KeyRefused

log = logging.getLogger("syncline")

_CREDENTIALS = struct.Struct("3i")


class Store(Protocol):
    """The two methods of torch's store that are used."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...


@dataclass(frozen=True)
class Place:
    """A rank's place in the world: what it needs to connect to others."""

    rank: int
    size: int
    local_rank: int
    local_ranks: tuple[int, ...]
    """The world's ranks on this machine, by local rank."""
    machine: int
    leaders: tuple[int, ...]
    """The rank that leads each machine."""
    job: str
    key: bytes


@dataclass
class Connections:
    """Connections of one rank, by the rank at the other end."""

    parent: tuple[int, socket.socket] | None = None
    children: dict[int, socket.socket] = field(default_factory=dict)
    memory: dict[int, socket.socket] = field(default_factory=dict)
    """For passing shared memory: a member has one to its leader, a leader one to each member."""

    def close(self) -> None:
        ends = [*self.children.values(), *self.memory.values()]
        for end in ends + ([self.parent[1]] if self.parent else []):
            end.close()


def _unix_name(place: Place) -> str:
    return f"\0syncline/{place.job}/{place.machine}"


def _peer_credentials(sock: socket.socket) -> tuple[int, int]:
    """Return process and user at the other end of a Unix socket, as the kernel knows them."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return pid, uid


def accept_all(
    listener: socket.socket, place: Place, wanted: set[tuple[int, str]]
) -> dict[tuple[int, str], socket.socket]:
    """Accept connections until every wanted (rank, purpose) has come; refuse and log all others."""
    came: dict[tuple[int, str], socket.socket] = {}
    while wanted:
        try:
            sock, address = listener.accept()
        except TimeoutError:
            missing = sorted({rank for rank, _ in wanted})
            raise CommError(
                f"rank {place.rank} waited {listener.gettimeout():.0f} s for rank"
                f"{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}, "
                "which never came. Look at the logs; does everybody have the same SYNCLINE_KEY?"
            ) from None
        sock.settimeout(10.0)
        try:
            if sock.family == socket.AF_UNIX:
                pid, uid = _peer_credentials(sock)
                caller = f"process {pid} of user {uid}"
                if uid not in (0, os.getuid()):
                    raise KeyRefused(f"rank {place.rank} refused {caller}: another user")
            else:
                caller = f"{address[0]}:{address[1]}"
            hello = answer(sock, place.key, place.job, place.rank, caller)
            if (hello.rank, hello.purpose) not in wanted:
                raise CommError(f"rank {place.rank} did not expect rank {hello.rank} again")
        except (KeyRefused, CommError, OSError, ValueError) as error:
            log.warning("%s", error)
            sock.close()
            continue
        wanted.discard((hello.rank, hello.purpose))
        came[hello.rank, hello.purpose] = sock
    return came


def connect_to(
    family: int, address: object, place: Place, purpose: str, to: int, timeout_s: float
) -> socket.socket:
    deadline = time.monotonic() + timeout_s
    while True:
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.settimeout(10.0)
        try:
            sock.connect(address)  # type: ignore[arg-type]  # str or (host, port), by family
            found = knock(sock, place.key, place.job, place.rank, purpose)
            if found != to:
                raise CommError(f"rank {place.rank} looked for rank {to} and found rank {found}")
            return sock
        except OSError as error:
            sock.close()
            if time.monotonic() > deadline:
                raise CommError(
                    f"rank {place.rank} could not reach rank {to} within {timeout_s:.0f} s "
                    f"({error}). Is rank {to} running? Look at its log first."
                ) from None
            time.sleep(0.02)
        except BaseException:
            sock.close()
            raise


def local_address_towards(host: str) -> str:
    """Return this machine's address on the interface that leads to `host`. Sends nothing."""
    reason = "no address"
    try:
        for family, kind, _, _, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            try:
                with socket.socket(family, kind) as probe:
                    probe.connect(address)
                    return str(probe.getsockname()[0])
            except OSError as error:  # a name may have an address that this machine cannot reach
                reason = error.strerror or str(error)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
    raise ConfigError(
        "MASTER_ADDR",
        f"got {host!r:.80} ({reason.lower()})",
        "every machine reaches rank 0 there",
        "Use a name or an address of rank 0's machine that this machine can reach.",
    )


def meet(place: Place, store: Store | None, address: str | None, timeout_s: float) -> Connections:
    """Connect this rank with its leader and its members. Every rank calls it."""
    is_leader = place.local_rank == 0
    if not is_leader:
        leader = place.local_ranks[0]
        control, memory = (
            connect_to(socket.AF_UNIX, _unix_name(place), place, purpose, leader, timeout_s)
            for purpose in ("control", "memory")
        )
        return Connections((leader, control), memory={leader: memory})
    with contextlib.ExitStack() as stack:
        links = Connections()
        members = place.local_ranks[1:]
        if members:
            listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            try:
                listener.bind(_unix_name(place))
            except OSError:
                raise CommError(
                    f"rank {place.rank} cannot lead job {place.job} on this machine: a job of the "
                    "same name runs here. Wait for it, or choose another port (MASTER_PORT)."
                ) from None
            listener.listen(2 * len(members))
            listener.settimeout(timeout_s)
            wanted = {(rank, purpose) for rank in members for purpose in ("control", "memory")}
            for (rank, purpose), sock in accept_all(listener, place, wanted).items():
                (links.memory if purpose == "memory" else links.children)[rank] = sock
        others = [rank for rank in place.leaders if rank != 0]
        if others:
            assert store is not None, "several machines need a store"
            assert address is not None, "several machines need an address"
            if place.rank == 0:
                links.children |= _answer_machines(place, store, address, others, timeout_s)
            else:
                where = read_address(place, store, "control", 0)
                links.parent = (0, connect_to(*where, place, "control", 0, timeout_s))
        return links


def _answer_machines(
    place: Place, store: Store, address: str, others: list[int], timeout_s: float
) -> dict[int, socket.socket]:
    with listen(place, store, address, "control", timeout_s) as listener:
        came = accept_all(listener, place, {(rank, "control") for rank in others})
        return {rank: sock for (rank, _), sock in came.items()}


def listen(
    place: Place, store: Store, address: str, purpose: str, timeout_s: float
) -> socket.socket:
    """Listen on the interface that leads to the job's address, and tell the others where."""
    host = local_address_towards(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.bind((host, 0))
    listener.listen(place.size)
    listener.settimeout(timeout_s)
    port = listener.getsockname()[1]
    store.set(f"syncline/{place.job}/{purpose}/{place.rank}", f"{host} {port}")
    return listener


def read_address(
    place: Place, store: Store, purpose: str, rank: int
) -> tuple[socket.AddressFamily, tuple[str, int]]:
    """Return where a rank listens. The store is open to any program, so the text is checked."""
    found = store.get(f"syncline/{place.job}/{purpose}/{rank}").decode("ascii", "replace")
    match = re.fullmatch(r"([0-9a-fA-F.:]{2,45}) (\d{1,5})", found)
    if match is None or not 0 < int(match[2]) < 65536:
        raise CommError(
            f"rank {place.rank} read {found!r:.80} from the job's store where rank {rank}'s "
            "address should be: another program writes there. Use a trusted network."
        )
    return socket.AF_INET6 if ":" in match[1] else socket.AF_INET, (match[1], int(match[2]))
