"""The trace of a real run: all ranks' tasks, on one clock."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from syncline.comm.base import Communicator, exchange_bytes
from syncline.config import Job, job_to_toml
from syncline.engine.replica import Replica
from syncline.engine.traced import header_of
from syncline.files import explained
from syncline.perf.clocks import Moment, OneClock, Rounds, compare
from syncline.perf.meetings import divide
from syncline.perf.recorder import Recorder
from syncline.perf.trace import Header, Task, Trace
from syncline.run_ranks import RunRanks
from syncline.session import Session

_NUM_ROUNDS = 400
"""Barriers to compare clocks by: the shortest count, and of many a few are not disturbed."""


class _Told(msgspec.Struct, array_like=True):
    """What a rank tells the others at the end."""

    tasks: list[Task]
    sent_bytes: int


class NotTraced:
    """What a run without a trace has instead."""

    def __init__(self) -> None:
        self._nothing = contextlib.nullcontext()

    def task(self, kind: str, step: int) -> contextlib.AbstractContextManager[None]:
        return self._nothing

    def write(self, ranks: RunRanks) -> None:
        pass


class RunTrace:
    """Records one rank's run, and puts the trace of all ranks together. Every rank makes one."""

    def __init__(
        self,
        path: Path,
        replica: Replica,
        session: Session,
        job: Job,
        steps: range,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`steps` are those that the run takes; `now` is this rank's clock."""
        self._path = path
        self._replica, self._session, self._now = replica, session, now
        self._job, self._steps = job, steps
        self._before_bytes = session.comm.traffic.step_bytes
        self.recorder = Recorder(session.comm.ranks[session.comm.position], now)
        self.recorder.step, self.recorder.last_step = steps.start, steps.stop - 1
        self._first = self._compare_clocks()
        replica.recorder = self.recorder

    @contextlib.contextmanager
    def task(self, kind: str, step: int) -> Iterator[None]:
        """Record what is done inside as a task of the compute lane."""
        self.recorder.end_backward()
        started = self._now()
        yield
        self.recorder.follow(kind, -1, step, started)

    def write(self, ranks: RunRanks) -> None:
        """Write all ranks' tasks. Every rank calls it."""
        mine, last = self._stop(), self._first
        told = {self.recorder.rank: msgspec.json.encode(mine)}
        if not ranks.absent():  # where ranks are lost, the trace holds this rank's tasks alone
            comm, last = self._session.comm, self._compare_clocks()
            with comm.traffic.apart():
                found = self._session.lane.call(exchange_bytes, comm, told[self.recorder.rank])
            told = dict(zip(comm.ranks, found, strict=True))
        if ranks.writes_folder:
            everybody = {rank: msgspec.json.decode(one, type=_Told) for rank, one in told.items()}
            with explained(self._path):
                self._together(everybody, last).write(self._path)

    def _stop(self) -> _Told:
        """Stop recording; return what this rank has recorded."""
        self._replica.recorder = None
        sent_bytes = self._session.comm.traffic.step_bytes - self._before_bytes
        return _Told(self.recorder.tasks, sent_bytes)

    def _together(self, everybody: dict[int, _Told], last: Moment) -> Trace:
        """Return the trace of these ranks; `last` compares their clocks at the end."""
        clock = OneClock(self._first, last)
        starts_s = [
            clock.time_s(task.rank, task.start_s)
            for one in everybody.values()
            for task in one.tasks
        ]
        clock = OneClock(self._first, last, min(starts_s, default=0.0))
        tasks = [_on(clock, task) for one in everybody.values() for task in one.tasks]
        facts = clock.facts()
        header = msgspec.structs.replace(
            self._header(),
            clocks=facts,
            sent_bytes=tuple(
                everybody[rank].sent_bytes if rank in everybody else 0
                for rank in sorted(self._session.comm.ranks)
            ),
        )
        return Trace(tuple(divide(tasks, header.machines, facts.latency_s)), header)

    def _header(self) -> Header:
        job, replica = self._job, self._replica
        return msgspec.structs.replace(
            header_of(replica.strategy, self._session.comm, replica.buckets, replica.shards),
            strategy=job.strategy.name,
            samples=job.data.batch // replica.shards,
            first_step=self._steps.start,
            steps=len(self._steps),
            job=job_to_toml(job),
        )

    def _compare_clocks(self) -> Moment:
        comm = self._session.comm
        with comm.traffic.apart():
            return self._session.lane.call(_compare, comm, self._now)


def _compare(comm: Communicator, now: Callable[[], float]) -> Moment:
    """Compare all ranks' clocks. Every rank calls it, on the comm lane."""
    came, left = [], []
    for _ in range(_NUM_ROUNDS):
        came.append(now())
        comm.barrier()
        left.append(now())
    mine = msgspec.json.encode(Rounds(tuple(came), tuple(left)))
    found = dict(zip(comm.ranks, exchange_bytes(comm, mine), strict=True))
    rounds = [msgspec.json.decode(found[rank], type=Rounds) for rank in sorted(found)]
    return compare(rounds, comm.machines)


def _on(clock: OneClock, task: Task) -> Task:
    """Return a task with its times on another clock."""
    parts = tuple(
        msgspec.structs.replace(part, end_s=clock.time_s(task.rank, part.end_s))
        for part in task.parts
    )
    start_s, end_s = clock.time_s(task.rank, task.start_s), clock.time_s(task.rank, task.end_s)
    return msgspec.structs.replace(task, start_s=start_s, end_s=end_s, parts=parts)
