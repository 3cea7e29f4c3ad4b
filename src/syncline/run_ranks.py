"""The ranks of a run, as one of them sees it: which are there, which writes, how far they are."""

from __future__ import annotations

import statistics

from syncline.engine.replica import Replica
from syncline.errors import RankFailed, RunStopped
from syncline.perf.pace import Pace
from syncline.session import Session
from syncline.strategies.settings import OwnSettings


class RunRanks:
    """What one rank knows of the others, and tells them."""

    def __init__(self, own: OwnSettings, session: Session, replica: Replica) -> None:
        self._own = own
        self._control = session.control
        self._rank = session.world.rank
        self._lane = session.lane
        self._replica = replica
        self._workers = replica.plan.workers
        self.is_ending = False
        """Whether this rank has taken all its steps."""

    @property
    def writes_folder(self) -> bool:
        """Whether this rank writes the run folder: the lowest rank that is still there does."""
        if self._rank == 0:
            return True
        absent = self.absent()
        return all(rank in absent for rank in range(self._rank))

    def absent(self) -> set[int]:
        """Return the ranks that are lost, or have stopped before the end of the run."""
        if self._control is None:
            return set()
        # At the end ranks leave that have done everything: they were at the last gather.
        stopped = self._replica.run.left_early() if self.is_ending else self._control.left
        return {*self.lost(), *stopped}

    def lost(self) -> dict[int, RankFailed]:
        """Return the ranks that died or fell silent, and how."""
        return {} if self._control is None else self._control.gone

    def describe_absent(self) -> dict[int, str]:
        """Say, for each rank that is not there at the end, what happened to it."""
        stopped = {rank: f"rank {rank} stopped" for rank in self._replica.run.left_early()}
        return stopped | {rank: str(failure) for rank, failure in self.lost().items()}

    def check_workers(self) -> None:
        """Raise if no rank that computes was at the last gather."""
        self._replica.run.check_workers()
        left_early = self._replica.run.left_early()
        if all(rank in left_early for rank in self._workers):
            raise RunStopped("every rank that computes has stopped", is_said=True)

    def end_early(self) -> None:
        """Return when no rank needs this one any more, though not all steps are taken."""
        if self._replica.plan.answers_calls:
            self._replica.run.stay()
        else:
            self._lane.call(self._replica.comm.barrier)  # all ranks end at the same step

    def end_step(self, pace: Pace, now_s: float, total: int) -> None:
        """Record the end of a step; `total` are those of the run.

        With asynchronous strategies the mean of the workers' steps counts.
        """
        if self._control is None or self._own.is_synchronous:
            pace.end_step(now_s, self._replica.step_number)
            return
        found = self._control.steps()
        steps = {rank: found.get(rank, 0) for rank in self._workers}
        is_any_done = any(done >= total for rank, done in steps.items() if rank != self._rank)
        pace.end_step(now_s, statistics.fmean(steps.values()), is_any_done=is_any_done)

    def lost_shards(self, start: int) -> int:
        """Return how many shards the absent ranks had computed after step `start`, their first."""
        absent = self.absent()
        if self._control is None or not absent:
            return 0
        steps, dealt = self._control.steps(), self._replica.plan.shards
        return sum(max(0, steps.get(rank, 0) - start - 1) * len(dealt[rank]) for rank in absent)

    def show_phase(self, phase: str) -> None:
        """Tell other ranks what this one is doing: they name it if this rank fails."""
        if self._control is not None:
            self._control.progress.write(phase)
