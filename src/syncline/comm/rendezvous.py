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
_ANSWER_S = 10.0
"""How long a caller may take for each message of its introduction."""
_PAUSE_S = 0.2
"""The longest pause between two attempts to reach a rank that has not come yet."""
_STAGES = 3
"""A leader waits up to `meet_s` three times: for its machine, for the store, for other machines."""


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
    listener: socket.socket, place: Place, wanted: set[tuple[int, str]], meet_s: float
) -> dict[tuple[int, str], socket.socket]:
    """Accept connections until every wanted (rank, purpose) has come; refuse and log all others.

    Callers that are refused do not prolong the limit `meet_s`.
    """
    came: dict[tuple[int, str], socket.socket] = {}
    deadline = time.monotonic() + meet_s
    while wanted:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            missing = sorted({rank for rank, _ in wanted})
            raise CommError(
                f"rank {place.rank} waited {meet_s:g} s for rank"
                f"{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}, "
                "which never came. Look at the logs; does everybody have the same SYNCLINE_KEY? If "
                "ranks start slowly, raise meet_s."
            )
        listener.settimeout(left_s)
        try:
            sock, address = listener.accept()
        except TimeoutError:
            continue
        sock.settimeout(_ANSWER_S)
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
        sock.settimeout(_STAGES * meet_s)
        wanted.discard((hello.rank, hello.purpose))
        came[hello.rank, hello.purpose] = sock
    return came


def connect_to(
    family: int, address: object, place: Place, purpose: str, to: int, meet_s: float
) -> socket.socket:
    """Return a connection with rank `to`, which may come up to `meet_s` later.

    What comes first on the connection, rank `to` sends when it has met all others, so the
    connection's own limit is longer.
    """
    deadline = time.monotonic() + meet_s
    pause_s = 0.01
    while True:
        sock = socket.socket(family, socket.SOCK_STREAM)
        # If rank `to` is busy with others, this connection waits in its queue.
        sock.settimeout(max(deadline - time.monotonic(), 1e-3))
        try:
            sock.connect(address)  # type: ignore[arg-type]  # str or (host, port), by family
            found = knock(sock, place.key, place.job, place.rank, purpose)
            if found != to:
                raise CommError(f"rank {place.rank} looked for rank {to} and found rank {found}")
            sock.settimeout(_STAGES * meet_s)
            return sock
        except OSError as error:
            sock.close()
            if time.monotonic() > deadline:
                raise CommError(
                    f"rank {place.rank} could not reach rank {to} within {meet_s:g} s "
                    f"({error}). Is rank {to} running? Look at its log first. If ranks start "
                    "slowly, raise meet_s."
                ) from None
            time.sleep(pause_s)
            # Many ranks that wait must not take the processor from the one they wait for.
            pause_s = min(2 * pause_s, _PAUSE_S)
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


def wait_for_listener(rank: int, address: str, port: int, meet_s: float) -> None:
    """Return when somebody listens where rank 0 is expected."""
    deadline = time.monotonic() + meet_s
    pause_s = 0.01
    while True:
        left_s = deadline - time.monotonic()
        try:
            socket.create_connection((address, port), max(left_s, 1e-3)).close()
            return
        except OSError as error:
            if left_s <= 0:
                raise CommError(
                    f"rank {rank} could not reach rank 0 at {address}:{port} within {meet_s:g} s "
                    f"({error}). Is rank 0 running? Look at its log first. If ranks start slowly, "
                    "raise meet_s."
                ) from None
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _PAUSE_S)


def meet(place: Place, store: Store | None, address: str | None, meet_s: float) -> Connections:
    """Connect this rank with its leader and its members. Every rank calls it."""
    is_leader = place.local_rank == 0
    if not is_leader:
        leader = place.local_ranks[0]
        control, memory = (
            connect_to(socket.AF_UNIX, _unix_name(place), place, purpose, leader, meet_s)
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
            wanted = {(rank, purpose) for rank in members for purpose in ("control", "memory")}
            for (rank, purpose), sock in accept_all(listener, place, wanted, meet_s).items():
                (links.memory if purpose == "memory" else links.children)[rank] = sock
        others = [rank for rank in place.leaders if rank != 0]
        if others:
            assert store is not None, "several machines need a store"
            assert address is not None, "several machines need an address"
            if place.rank == 0:
                links.children |= _answer_machines(place, store, address, others, meet_s)
            else:
                where = read_address(place, store, "control", 0)
                links.parent = (0, connect_to(*where, place, "control", 0, meet_s))
        return links


def _answer_machines(
    place: Place, store: Store, address: str, others: list[int], meet_s: float
) -> dict[int, socket.socket]:
    with listen(place, store, address, "control") as listener:
        came = accept_all(listener, place, {(rank, "control") for rank in others}, meet_s)
        return {rank: sock for (rank, _), sock in came.items()}


def listen(place: Place, store: Store, address: str, purpose: str) -> socket.socket:
    """Listen on the interface that leads to the job's address, and tell the others where."""
    host = local_address_towards(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.bind((host, 0))
    listener.listen(place.size)
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
