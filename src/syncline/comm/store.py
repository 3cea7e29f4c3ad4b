"""The job's store: a small table in torch.distributed's TCPStore that every rank can reach.

Ranks leave there where they run and where they listen. It is rank 0's, torchrun's, or that of a
process group that the user made. It holds nothing secret and is not trusted: what is read from it
is checked, and the key is proven on connections of our own.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import os
import re
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from syncline.comm.rendezvous import local_address_towards, wait_for_listener
from syncline.comm.shape import Machines
from syncline.errors import CommError, ConfigError
from syncline.launch.env import LaunchedRank, read_world_of_group

_num_sessions = 0
"""How many sessions of this process used a store of the user's: their entries stay in it."""


@dataclass(frozen=True)
class JobStore:
    """The entries of one job, with a limit on how long a rank waits for one."""

    store: Any
    rank: int
    meet_s: float

    def set(self, key: str, value: str) -> None:
        self.store.set(key, value)

    def get(self, key: str) -> bytes:
        """Return an entry, once the rank that makes it has come."""
        try:
            self.store.wait([key], datetime.timedelta(seconds=self.meet_s))
            return bytes(self.store.get(key))
        except RuntimeError as error:
            raise CommError(
                f"rank {self.rank} waited {self.meet_s:g} s (meet_s) for {key!r} in the job's "
                f"store: {_first_line(error)}. The rank that writes it never came, or has ended: "
                "look at the logs."
            ) from None


def world_of_group() -> LaunchedRank | None:
    """Return the world of the process group that the user made; None if there is none."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    return read_world_of_group(dist.get_rank(), dist.get_world_size())


def join_group_store(world: LaunchedRank, meet_s: float) -> tuple[LaunchedRank, JobStore]:
    """Return the store of the user's process group, and the world with the id of its job."""
    global _num_sessions
    store = JobStore(dist.distributed_c10d._get_default_store(), world.rank, meet_s)
    key = f"syncline/job/{_num_sessions}"
    _num_sessions += 1
    if world.rank == 0:
        store.set(key, secrets.token_hex(8))
    return replace(world, job_id=_checked(store.get(key), r"[0-9a-f]{16}", 0)), store


def join_store(world: LaunchedRank, meet_s: float) -> JobStore:
    """Return the store where rank 0 listens. Every rank calls it."""
    from torch.distributed.rendezvous import rendezvous

    address, port = world.address, world.port
    if address is None or port is None:
        raise ConfigError(
            "MASTER_ADDR, MASTER_PORT",
            f"not set under {world.launcher}",
            "a network needs to know where rank 0 listens",
            "Export both, the same for every rank, or use comm = 'auto' on one machine.",
        )
    local_address_towards(address)  # refuses a name that leads nowhere
    if world.rank > 0:
        # torch would wait as long, and print a page of its own frames if nobody came.
        wait_for_listener(world.rank, address, port, meet_s)
    host = f"[{address}]" if ":" in address else address
    timeout = datetime.timedelta(seconds=meet_s)
    try:
        method = f"tcp://{host}:{port}"
        store = next(rendezvous(method, world.rank, world.size, timeout=timeout))[0]
    except (RuntimeError, ValueError) as error:
        if "EADDRINUSE" in str(error) or "address already in use" in str(error).lower():
            raise ConfigError(
                "MASTER_PORT",
                f"port {port} on {address} is in use",
                "rank 0 listens there",
                "Choose another port, or end the job that holds it.",
            ) from None
        raise CommError(
            f"rank {world.rank} could not join the job at {address}:{port} within {meet_s:g} s "
            f"(meet_s): {_first_line(error)}"
        ) from None
    return JobStore(store, world.rank, meet_s)


def find_machines(world: LaunchedRank, store: JobStore) -> Machines:
    """Return all ranks by machine, machines in the order of their lowest rank. Every rank calls it.

    Ranks share a machine if their launcher says so or, if it says nothing, if their machine has one
    id.
    """
    mine = machine_id() if world.machine is None else str(world.machine)
    prefix = f"syncline/{world.job_id}/machine"
    store.set(f"{prefix}/{world.rank}", mine)
    machines: dict[str, list[int]] = {}
    for rank in range(world.size):
        found = _checked(store.get(f"{prefix}/{rank}"), r"[0-9a-f]{1,32}", rank)
        machines.setdefault(found, []).append(rank)
    return tuple(tuple(ranks) for ranks in machines.values())


def machine_id(host: str | None = None, namespaces: Mapping[str, int] | None = None) -> str:
    """Return a text that is equal for processes that can share memory and see each other.

    It covers the machine's name, its boot, and the namespaces of network (abstract sockets) and of
    processes (pids): two containers count as two machines unless they share both.
    """
    boot = ""
    with contextlib.suppress(OSError):  # a sandbox may hide them: the name has to do
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        if namespaces is None:
            namespaces = {name: os.stat(f"/proc/self/ns/{name}").st_ino for name in ("net", "pid")}
    text = "\0".join([host or socket.gethostname(), boot, str(sorted((namespaces or {}).items()))])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _checked(value: bytes, pattern: str, rank: int) -> str:
    """Return an entry as text. The store is open to any program, so its form is checked."""
    text = value.decode("ascii", "replace")
    if not re.fullmatch(pattern, text):
        raise CommError(
            f"the job's store holds {text!r:.60} where an entry of rank {rank} should be: another "
            "program writes there. Use a trusted network."
        )
    return text


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0].rstrip(".")
