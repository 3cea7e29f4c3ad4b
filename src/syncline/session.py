"""One rank's session in a job: it connects the rank to the others, and ends in order.

`open_session` connects a rank once; the session holds its connections, comm lane and replicas.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import logging
import os
import sys
from types import TracebackType

from syncline.comm.alone import Alone
from syncline.comm.base import Communicator
from syncline.comm.context import Context
from syncline.comm.control import Control
from syncline.comm.hierarchical import Hierarchical
from syncline.comm.hub import Hub
from syncline.comm.network import Network, Transport
from syncline.comm.rendezvous import Connections, Place, meet
from syncline.comm.shape import Machines
from syncline.comm.shared_memory import SharedMemory, is_supported
from syncline.comm.store import (
    JobStore,
    find_machines,
    join_group_store,
    join_store,
    world_of_group,
)
from syncline.comm.streams import connect_streams
from syncline.config import Job
from syncline.config.session import SessionSettings
from syncline.draws import Streams
from syncline.engine.lane import Lane
from syncline.engine.replica import Replica
from syncline.errors import CommError, ConfigError, RankFailed, UsageError
from syncline.freed_memory import keep_freed_memory
from syncline.launch.env import LaunchedRank, read_world
from syncline.launch.met import tell_met
from syncline.resources import explain

log = logging.getLogger("syncline")

ALIKE_S = 0.1
"""How long a rank that fails waits to hear that a lower rank fails alike. A launcher may end it
soon after its peers have ended, so it must not wait long before it prints its traceback."""


class Session:
    """A rank's connections to its peers, its comm lane and its replicas."""

    def __init__(self, world: LaunchedRank, settings: SessionSettings) -> None:
        settings.check()
        self.world, self.settings = world, settings
        self.hub = Hub()
        self.lane = Lane(self.hub)
        self.replicas: list[Replica] = []
        self.streams = Streams()
        self.control: Control | None = None
        self.comm: Communicator = Alone(world.rank)
        self._links = Connections()
        self._store: JobStore | None = None  # kept alive: rank 0's store serves the other ranks
        self._is_closed = False
        self._error: BaseException | None = None
        self._pid = os.getpid()
        if world.remark:
            log.warning("%s", world.remark)
        if world.size > 1:
            self._connect()

    def _connect(self) -> None:
        settings = self.settings
        self._check_kind(self.world.num_machines or 1)
        self._find_others()
        world = self.world
        place = Place(
            world.rank,
            world.size,
            world.local_rank or 0,
            self._machines[world.machine or 0],
            world.machine or 0,
            tuple(members[0] for members in self._machines),
            world.job_id,
            world.key or b"",
        )
        self._links = meet(place, self._store, self._address, settings.meet_s)
        if world.launcher == "syncline" and world.rank == 0:
            tell_met(world.job_id)
        if not self._uses_network:
            self._store = None  # all ranks have read it: otherwise they would not have met
        self.control = Control(
            place, self._links, silent_s=settings.silent_s, hung_s=settings.hung_s
        )
        self.control.on_failure(self.lane.fail)
        self.comm = self._make_communicator()

    def _check_kind(self, num_machines: int) -> None:
        if self.settings.comm == "shared_memory" and num_machines > 1:
            raise ConfigError(
                "comm",
                f"got 'shared_memory' with {num_machines} machines",
                "machines share no memory",
                "Use 'auto': shared memory inside machines, the network across.",
            )

    def _find_others(self) -> None:
        """Find out which ranks share a machine, and where rank 0 is. Every rank calls it."""
        world, meet_s = self.world, self.settings.meet_s
        wants_network = self.settings.comm in ("network", "torch")
        if world.launcher == "torch.distributed":
            world, self._store = join_group_store(world, meet_s)
        elif wants_network or not world.is_on_one_machine:
            self._store = join_store(world, meet_s)
        self._machines: Machines = (tuple(range(world.size)),)
        if not world.is_on_one_machine:
            assert self._store is not None
            self._machines = find_machines(world, self._store)
        self.world = world.on_machines(self._machines)
        num_machines = len(self._machines)
        self._check_kind(num_machines)
        self._uses_network = wants_network or num_machines > 1
        self._address = world.address or "127.0.0.1"
        if world.address is None and num_machines > 1:
            raise ConfigError(
                "MASTER_ADDR",
                f"not set in a world of {num_machines} machines",
                "ranks listen on the interface that leads there",
                "Export it on every machine: a name or an address of rank 0's machine.",
            )

    def _make_communicator(self) -> Communicator:
        assert self.control is not None
        context = Context(self.control, self.hub)
        if not self._uses_network:
            if is_supported():
                return SharedMemory.of_machine(context, self._links.memory)
            raise ConfigError(
                "comm",
                "this processor does not keep stores in order",
                "shared memory is made for x86-64",
                "Use comm='network'.",
            )
        transport = self._make_transport()
        everybody = Network(context, transport, range(self.world.size))
        everybody.barrier()  # rank 0 must not leave, and end the store, before all have met
        sizes = sorted({len(members) for members in self._machines})
        if sizes == [1] or self.settings.comm in ("network", "torch"):
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
        everybody = Network(context, transport, range(self.world.size), self._machines)
        return Hierarchical.of(context, inside, everybody)

    def _make_transport(self) -> Transport:
        assert self.control is not None
        assert self._store is not None
        if self.settings.comm != "torch":
            meet_s = self.settings.meet_s
            return connect_streams(self.control, self.hub, self._store, self._address, meet_s)
        from syncline.comm.process_group import join_group

        store, hung_s = self._store.store, self.settings.hung_s
        return join_group(self.control, store, self._address, hung_s)

    @property
    def is_inherited(self) -> bool:
        """Whether this process is a fork of the rank: the connections are its parent's."""
        return os.getpid() != self._pid

    def check_alone(self) -> None:
        """Refuse to train alone if other ranks have turned up since this one joined."""
        if self.world.size > 1:
            return
        world = world_of_group() or read_world()
        if world.size > 1:
            raise UsageError(
                f"syncline.init() found no other ranks, but now {world.launcher} has "
                f"{world.size}: this one would train alone. Call init() after "
                "init_process_group(), and after a launcher inside the script (Lightning's) has "
                "started its processes."
            )

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
            self._stay(in_good_order=in_good_order)
        if self.control is not None:
            self.control.close(in_good_order=in_good_order)
        if self.lane.failure is None and in_good_order:
            self.comm.close()
            self.hub.close()
        self._links.close()

    def _stay(self, *, in_good_order: bool) -> None:
        """Answer other ranks that read optimizer state, until all have left."""
        states = [replica.state for replica in self.replicas]
        if in_good_order and self.control is not None and any(s.is_asked for s in states):
            with contextlib.suppress(KeyboardInterrupt):
                self.control.say_farewell()
                self.control.wait_until_left(set(range(self.world.size)) - {self.world.rank})
        for state in states:
            state.close()


_session: Session | None = None


def open_session(settings: SessionSettings) -> Session:
    """Connect this process to its job and return the session.

    The world is that of a process group which the user has made, or what the environment says. A
    second call with the same settings returns the session that is open: a notebook's cell may run
    twice.
    """
    if _session is not None:
        _check_same(_session, settings)
        return _session
    return _open(world_of_group() or read_world(), settings)


def open_session_of(job: Job, world: LaunchedRank) -> Session:
    """Connect this process as a rank of `syncline train`."""
    if _session is not None:
        raise UsageError("a session is open in this process. A job is trained in one of its own.")
    run = job.run
    times = run.silent_s, run.hung_s, run.meet_s
    return _open(world, SessionSettings(job.strategy.comm, *times, run.threads))


def _open(world: LaunchedRank, settings: SessionSettings) -> Session:
    global _session
    keep_freed_memory()
    try:
        _session = Session(world, settings)
    except OSError as error:
        raise CommError(explain(error) or f"the rank could not be connected: {error}") from error
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


def _check_same(session: Session, settings: SessionSettings) -> None:
    """Refuse a second call of `init` that asks for something else."""
    if session._error is not None or session.lane.failure is not None:
        raise UsageError(
            "syncline.init() was called again after the job failed. Start the process again (in a "
            "notebook, restart the kernel)."
        )
    before, now = dataclasses.asdict(session.settings), dataclasses.asdict(settings)
    changed = [
        f"{name} was {before[name]!r}, now {now[name]!r}"
        for name in now
        if before[name] != now[name]
    ]
    if changed:
        raise UsageError(
            f"syncline.init() was called twice, with other settings ({'; '.join(changed)}), but a "
            "process joins its job once. Call it with the settings of before, or start the process "
            "again."
        )


def current_session() -> Session:
    if _session is None:
        raise UsageError("syncline.init() was not called. Call it once, before anything else.")
    return _session


def fail_session(error: BaseException) -> None:
    """Tell the peers why this rank ends, unless it ends in good order: `sys.exit(0)`."""
    if isinstance(error, SystemExit) and not error.code:
        return
    if _session is not None and _session._error is None and not _session.is_inherited:
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
    if _session is not None and not _session.is_inherited:  # else the parent leaves, when it ends
        _session.close(in_good_order=_session._error is None)
    _session = None


def _leave() -> None:
    session = _session
    close_session()
    if session is None or session.is_inherited:
        return
    if session._error or session.lane.failure:
        # Threads may be stuck in calls to a dead peer; the interpreter would wait for them.
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(1)
