"""Injects a job's faults into a real rank: deaths, pauses and slow compute."""

from __future__ import annotations

import os
import signal
import time

from syncline.config import Job
from syncline.faults import Conditions
from syncline.launch.env import LaunchedRank


class InjectedFaults:
    """The faults of one rank."""

    def __init__(self, job: Job, world: LaunchedRank) -> None:
        """Refuse faults of ranks that do not exist, and faults after which no rank computes."""
        self._conditions = Conditions(faults=job.faults, seed=job.run.seed)
        self._rank = world.rank
        workers = job.strategy.own.workers(world.machines)
        self._conditions.check(world.size, world.num_machines or 1, "faults", workers)

    def begin_step(self, step: int) -> None:
        """Kill this process or pause it, if the job's faults say so for this step."""
        if self._conditions.dies(self._rank, step):
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(self._conditions.pause_s(self._rank, step))

    def slow_down(self, step: int, compute_s: float) -> None:
        """Sleep until this step's compute has taken as long as the job's faults say."""
        factor = self._conditions.factor(self._rank, step)
        if factor > 1:
            time.sleep((factor - 1) * compute_s)
