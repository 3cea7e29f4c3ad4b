"""Losses and weights that are not finite: said once, and the end of the run if the job says so.

Every rank ends, and no rank waits for one that has ended. How ranks end depends on what they know:

- With synchronous strategies all ranks know all losses, one step later: they end at one step.
- Ranks that meet in collectives now and then tell each other at the end of a round.
- Ranks that do not wait for each other end alone, each by its own loss. The others go on.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import torch

from syncline.checkpoint import is_finite
from syncline.comm.base import Communicator, Partials, small_sum
from syncline.config import Job
from syncline.engine.lane import Lane
from syncline.engine.replica import Replica
from syncline.errors import RunStopped
from syncline.report.progress import Progress
from syncline.run_checkpoints import RunCheckpoints
from syncline.run_ranks import RunRanks


def mean_loss(losses: Sequence[float]) -> float:
    """Return the mean of the shards' losses; NaN where it has none (inf and -inf)."""
    try:
        return statistics.fmean(losses)
    except (OverflowError, ValueError):
        return math.nan


class NotFinite:
    """Watches the losses and weights of one rank's run."""

    def __init__(
        self,
        job: Job,
        replica: Replica,
        lane: Lane,
        progress: Progress,
        checkpoints: RunCheckpoints,
        ranks: RunRanks,
    ) -> None:
        self._stops = job.run.stop_when_not_finite
        self._replica = replica
        self._lane = lane
        self._progress = progress
        self._checkpoints = checkpoints
        self._ranks = ranks
        self._is_common = not replica.plan.answers_calls
        self._began: int | None = None
        meets = self._stops and self._is_common and replica.has_own and replica.comm.size > 1
        self._round = _Round(replica.comm) if meets else None
        self._period = job.strategy.own.steps_between_exchanges

    def look_at_loss(self, step: int, loss: float) -> None:
        """Note the loss of a step. If the run must end for it, raise RunStopped."""
        if self._round is not None and self._round.is_asked:
            self._lane.drain()
            for rank, began in self._round.answers().items():
                raise self._stopped(f"the loss of rank {rank} is not finite from step {began} on")
        if math.isfinite(loss):
            return
        if self._began is None:
            self._began = step
            if not self._stops:
                self._progress.note(f"the loss is not finite from step {step} on: {loss}")
        if self._stops and self._round is None:
            raise self._stopped(f"the loss of step {step} is {loss}")

    def end_step(self, step: int) -> None:
        """Tell the other ranks at the end of a round, where ranks meet only then."""
        if self._round is not None and step % self._period == 0:
            self._lane.submit(self._round.ask, self._began or 0)
            self._round.is_asked = True

    def may_save(self, step: int, *, all_hold: bool) -> bool:
        """Say whether the weights that the model holds may be saved: not if they end the run.

        `all_hold` says that every rank holds these weights: then all ranks raise RunStopped.
        """
        if not self._stops or is_finite(dict(self._replica.model.named_parameters())):
            return True
        what = f"the weights after step {step} are not finite"
        if all_hold:
            raise self._stopped(what)
        self._progress.note(f"{what}: no checkpoint is saved")
        return False

    def _stopped(self, what: str) -> RunStopped:
        who = "the run" if self._is_common else "this rank"
        # The rank that saves checkpoints names the last one: others may be ahead of it.
        is_writer = self._ranks.writes_folder
        last_good = f" {self._checkpoints.describe_last_good()}" if is_writer else ""
        return RunStopped(
            f"run.stop_when_not_finite: {what}, so {who} ends here.{last_good} Use a smaller "
            "optimizer.lr or optimizer.clip_norm in a new run; with "
            "--set run.stop_when_not_finite=false a run goes on.",
            is_said=self._is_common and not is_writer,
        )


class _Round:
    """A sum in which ranks tell each other, once a round, since when losses are not finite."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._told: Partials | None = None
        self.is_asked = False

    def ask(self, began: int) -> None:
        """Exchange the first steps, 0 for none. Runs on the comm lane of every rank."""
        comm = self._comm
        if self._told is None:
            self._told = small_sum(comm, comm.size, torch.float64)
        mine = self._told.sums[0].mine
        mine.zero_()
        mine[comm.position] = began
        with comm.traffic.task("check", after="step"):
            comm.all_reduce(self._told)
            comm.barrier()  # peers have read this rank's number

    def answers(self) -> dict[int, int]:
        """Return the first step of each rank that has one, after `ask` has run."""
        self.is_asked = False
        assert self._told is not None
        told = zip(self._comm.ranks, self._told.result.tolist(), strict=True)
        return {rank: int(began) for rank, began in sorted(told) if began}
