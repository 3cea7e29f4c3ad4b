"""One rank's session in a job: it connects the rank to the others, and ends in order.

`open_session` connects a rank once. The session holds everything else: the control connections, the
communicator of the world, the comm lane, the replicas.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import fcntl
import logging
import os
import socket
import struct
import sys
from types import TracebackType
from typing import Any

import torch

from syncline.comm.alone import Alone
from syncline.comm.base import Communicator
from syncline.comm.context import Context
from syncline.comm.control import Control
from syncline.comm.hierarchical import Hierarchical
from syncline.comm.hub import Hub
from syncline.comm.network import Network, Transport
from syncline.comm.rendezvous import Connections, Place, local_address_towards, meet
from syncline.comm.shared_memory import SharedMemory, is_supported
from syncline.comm.streams import connect_streams
from syncline.engine.lane import Lane
from syncline.engine.replica import Replica
from syncline.errors import CommError, ConfigError, RankFailed, UsageError
from syncline.launch.env import World, read_world

log = logging.getLogger("syncline")

MEETING_S = 60.0
"""How long ranks wait for each other at the start: twice the time to load torch from cold disk."""
ALIKE_S = 0.1
"""How long a rank that fails waits to hear that a lower rank fails alike. A launcher may end it
soon after its peers have ended, so it must not wait long before it prints its traceback."""
KINDS = ("auto", "shared_memory", "network", "torch")
"""`network` is our own TCP streams; `torch` is messages in torch.distributed's process group."""
_SIOCGIFADDR = 0x8915


class Session:
    """A rank's connections to its peers, its comm lane and its replicas."""

    def __init__(self, world: World, kind: str, silent_s: float, hung_s: float) -> None:
        if kind not in KINDS:
            raise ConfigError("comm", f"got {kind!r}", f"it is one of {', '.join(KINDS)}", "")
        self.world = world
        self.hub = Hub()
        self.lane = Lane(self.hub)
        self.replicas: list[Replica] = []
        self.control: Control | None = None
        self.comm: Communicator = Alone(world.rank)
        self._links = Connections()
        self._store: Any = None  # kept alive: rank 0's store serves the other ranks
        self._owns_group = False
        self._is_closed = False
        self._error: BaseException | None = None
        if world.size > 1:
            self._connect(kind, silent_s, hung_s)

    def _connect(self, kind: str, silent_s: float, hung_s: float) -> None:
        world = self.world
        kind = "torch" if kind == "auto" and torch.cuda.is_available() else kind
        uses_network = kind in ("network", "torch") or world.num_machines > 1
        if kind == "shared_memory" and uses_network:
            raise ConfigError(
                "comm",
                f"got 'shared_memory' with {world.num_machines} machines",
                "machines share no memory",
                "Use 'auto': shared memory inside machines, the network across.",
            )
        self._store = self._join_network(kind, hung_s) if uses_network else None
        place = self._find_place(self._store)
        self._links = meet(place, self._store, world.address, MEETING_S)
        self.control = Control(place, self._links, silent_s=silent_s, hung_s=hung_s)
        self.control.on_failure(self.lane.fail)
        self.comm = self._make_communicator(kind)

    def _join_network(self, kind: str, hung_s: float) -> Any:
        """Return the job's store; for `torch`, also join the process group, unless the user did."""
        import torch.distributed as dist
        from torch.distributed.rendezvous import rendezvous

        world = self.world
        assert world.address is not None
        if not dist.is_initialized():
            _choose_interface(world.address)
            method = (
                f"tcp://{world.address}:{world.port}" if world.launcher == "slurm" else "env://"
            )
            timeout = datetime.timedelta(seconds=hung_s)
            try:
                if kind != "torch":
                    met = rendezvous(method, world.rank, world.size, timeout=timeout)
                    return next(met)[0]
                dist.init_process_group(
                    "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
                    init_method=method,
                    rank=world.rank,
                    world_size=world.size,
                    timeout=timeout,
                )
            except (RuntimeError, ValueError) as error:
                if "EADDRINUSE" in str(error) or "address already in use" in str(error).lower():
                    raise ConfigError(
                        "MASTER_PORT",
                        f"port {world.port} on {world.address} is in use",
                        "rank 0 listens there",
                        "Choose another port, or end the job that holds it.",
                    ) from None
                raise CommError(
                    f"rank {world.rank} could not join the job at {world.address}:{world.port}: "
                    f"{str(error).splitlines()[0]}"
                ) from None
            self._owns_group = True
        return dist.distributed_c10d._get_default_store()

    def _find_place(self, store: Any) -> Place:
        """Return this rank's place, with the ranks that share its machine."""
        world = self.world
        key = world.key or b""
        if world.num_machines == 1:
            ranks = tuple(range(world.size))
            return Place(
                world.rank, world.size, world.local_rank, ranks, 0, (0,), world.job_id, key
            )
        prefix = f"syncline/{world.job_id}/place"
        store.set(f"{prefix}/{world.rank}", f"{world.machine} {world.local_rank}")
        machines: dict[int, dict[int, int]] = {}
        for rank in range(world.size):
            found = store.get(f"{prefix}/{rank}").decode("ascii", "replace").split()
            if len(found) != 2 or not all(word.isdigit() for word in found):
                raise CommError(f"the job's store holds nonsense for rank {rank}: {found!r:.60}")
            machines.setdefault(int(found[0]), {})[int(found[1])] = rank
        self._machines = [
            tuple(rank for _, rank in sorted(members.items()))
            for _, members in sorted(machines.items())
        ]
        return Place(
            world.rank,
            world.size,
            world.local_rank,
            self._machines[world.machine],
            world.machine,
            tuple(members[0] for members in self._machines),
            world.job_id,
            key,
        )

    def _make_communicator(self, kind: str) -> Communicator:
        assert self.control is not None
        context = Context(self.control, self.hub)
        if self._store is None:
            if is_supported():
                return SharedMemory.of_machine(context, self._links.memory)
            raise ConfigError(
                "comm",
                "this processor does not keep stores in order",
                "shared memory is made for x86-64",
                "Use comm='network'.",
            )
        transport = self._make_transport(kind)
        everybody = Network(context, transport, range(self.world.size))
        everybody.barrier()  # rank 0 must not leave, and end the store, before all have met
        if self.world.num_machines == 1:
            return everybody
        sizes = sorted({len(members) for members in self._machines})
        if sizes == [1] or kind in ("network", "torch"):
            return everybody
        if len(sizes) > 1 or not is_supported():
            log.warning(
                "shared memory is not used inside machines: %s",
                f"they have different numbers of ranks ({sizes})"
                if len(sizes) > 1
                else "it is made for x86-64",
            )
            return everybody
        inside = SharedMemory.of_machine(context, self._links.memory)
        everybody = Network(context, transport, range(self.world.size), tuple(self._machines))
        return Hierarchical.of(context, inside, everybody)

    def _make_transport(self, kind: str) -> Transport:
        assert self.control is not None
        assert self.world.address is not None
        if kind != "torch":
            to = self.world.address
            return connect_streams(self.control, self.hub, self._store, to, MEETING_S)
        import torch.distributed as dist

        from syncline.comm.process_group import ProcessGroup

        assert dist.group.WORLD is not None
        device = (
            torch.device("cuda", self.world.local_rank)
            if torch.cuda.is_available()
            else torch.device("cpu")
        )
        return ProcessGroup(dist.group.WORLD, self.control, device)

    def close(self, *, in_good_order: bool = True) -> None:
        """Finish the lane's work, say farewell to the peers and free everything."""
        if self._is_closed:
            return
        self._is_closed = True
        if in_good_order and self.lane.failure is None:
            with contextlib.suppress(Exception):
                for replica in self.replicas:
                    replica.run.stay()
                self.lane.drain()
        if self.lane.failure is None:
            self.lane.close()
        if self.control is not None:
            self.control.close(in_good_order=in_good_order)
        if self.lane.failure is None and in_good_order:
            self.comm.close()
            self.hub.close()
            if self._owns_group:
                import torch.distributed as dist

                dist.destroy_process_group()
        self._links.close()


def _choose_interface(address: str) -> None:
    """Bind Gloo to the interface that leads to the job's address, unless the user chose one."""
    mine = local_address_towards(address)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):
                reply = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
                if socket.inet_ntoa(reply[20:24]) == mine:
                    os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


_session: Session | None = None


def open_session(kind: str, silent_s: float, hung_s: float, world: World | None = None) -> Session:
    """Connect this process to its job and return the session. A second call is refused."""
    global _session
    if _session is not None:
        raise UsageError("syncline.init() was called twice. Call it once, before distribute().")
    _session = Session(world or read_world(), kind, silent_s, hung_s)
    atexit.register(_leave)
    previous = sys.excepthook

    def note_failure(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        control = None if _session is None else _session.control
        heard = None if control is None else control.failure
        fail_session(error)
        log.disabled = True  # that peers end now follows from this rank's failure
        if control is None or not _is_told_elsewhere(error, control, heard):
            previous(kind, error, trace)

    sys.excepthook = note_failure
    return _session


def current_session() -> Session:
    if _session is None:
        raise UsageError("syncline.init() was not called. Call it once, before anything else.")
    return _session


def fail_session(error: BaseException) -> None:
    """Tell the peers why this rank ends."""
    if _session is not None and _session._error is None:
        _session._error = error
        control = _session.control
        if control is not None and control.failure is None:
            control.report(error)


def _is_told_elsewhere(error: BaseException, control: Control, heard: RankFailed | None) -> bool:
    """Say whether the traceback is of no use: another rank failed first, or fails alike.

    `heard` is what was known of another rank when this one failed. One line names the other rank.
    """
    rank = control.place.rank
    if isinstance(error, RankFailed):
        if not error.is_logged:
            print(f"rank {rank}: {error}", file=sys.stderr)
        return True
    alike = " ".join(f"{type(error).__name__}: {error}".split())[:200]  # as reports quote it
    if heard is not None:
        return alike in str(heard)
    other = control.verdict(ALIKE_S) if rank > 0 else None
    if other is None or other.rank > rank or alike not in str(other):
        return False
    print(f"rank {rank}: {other}", file=sys.stderr)
    return True


def close_session() -> None:
    """Leave the job. Called at exit; calling it earlier allows another `init()`."""
    global _session
    if _session is not None:
        _session.close(in_good_order=_session._error is None)
        _session = None


def _leave() -> None:
    session = _session
    close_session()
    if session is not None and (session._error or session.lane.failure):
        # Threads may be stuck in calls to a dead peer; the interpreter would wait for them.
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(1)
