"""Asynchronous SGD with a parameter server: push gradients, pull parameters, wait for nobody.

Dean et al. 2012 (Downpour); the form of Zhang et al.'s code (papers.md 2.2). The parameters lie in
strips on all ranks, or on some that do nothing else. The user's optimizer runs where the strip is,
once for every push, and the answer to a push is the strip after it. Between pushes, with a
`period` above 1, a worker goes on with the user's optimizer on its own copy; what it pushes then is
the sum of its gradients since the last push.

Staleness of a push: how many other updates a strip has seen since the worker pulled it.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from syncline.comm.base import Communicator
from syncline.comm.meeting import Meeting
from syncline.engine.bucket import Bucket, Step
from syncline.engine.state import State, StateWindow
from syncline.strategies.apart import Apart
from syncline.strategies.base import Spreadable
from syncline.strategies.strip import Strip
from syncline.strategy_settings import ServerSettings


class Server(Apart):
    """Workers and servers; every rank is both unless some do nothing but serve."""

    settings: ServerSettings

    def __init__(self, settings: ServerSettings | None = None, seed: int = 0) -> None:
        self.settings = settings or ServerSettings()
        self.staleness: Counter[int] = Counter()
        """How often a push of this rank had which staleness."""

    def num_workers(self, world_size: int) -> int:
        return self.settings.num_workers(world_size)

    def may_lose(self, world_size: int) -> range:
        """Workers; not those that hold strips, and without dedicated servers all of them do."""
        return range(self.num_workers(world_size) if self.settings.servers else 0)

    def open(self, replica: Spreadable) -> None:
        self._progress = Meeting(self.comm, "step")
        self._strips = [Strip(self, replica, bucket) for bucket in self.buckets]
        self._state = StateWindow(self.comm, self.buckets)

    def strips_of(self, replica: Spreadable, bucket: Bucket) -> tuple[int, ...]:
        """Cut a bucket into strips for those who serve: all ranks, or the last few."""
        comm, servers = self.comm, self.settings.servers
        if not servers:
            return replica.cut(bucket, comm, comm.size)
        cuts = replica.cut(bucket, comm, servers)[: servers + 1]
        serves = [rank >= self.num_workers(comm.size) for rank in comm.ranks]
        return tuple(cuts[sum(serves[:position])] for position in range(comm.size + 1))

    def step_entered(self, step: Step) -> None:
        super().step_entered(step)
        ahead = self.settings.max_staleness
        if ahead != "none":
            self._progress.tell(step.number + 1)
            workers = range(self.num_workers(self.comm.size))
            self._progress.until(step.number + 1 - ahead, workers, but=self.takes_no_steps)

    def gather_state(self, replica: Spreadable, comm: Communicator, *, is_wanted: bool) -> State:
        """Read it from those who hold strips, while all who are there wait in a meeting."""
        self.settle()
        self.meeting.meet()
        holders = [at for at in range(comm.size) if any(one.is_held_by(at) for one in self._strips)]
        whole = self._state.gather(replica.slots, holders) if is_wanted else {}
        self.meeting.meet()
        return whole

    def before_use(self, bucket: Bucket) -> None:
        strip = self._strips[bucket.index]
        # Taken before anything is waited for: calls that are served meanwhile bring their own.
        hyper, without = bucket.update.hyper, bucket.update.without
        strip.gather(bucket, without)
        if self.is_due(bucket.step):
            strip.push(bucket, hyper)
        else:
            strip.step_alone(hyper, without)

    def report(self) -> dict[str, Any]:
        pushes = sum(self.staleness.values())
        mean = sum(k * times for k, times in self.staleness.items()) / max(1, pushes)
        histogram = {str(k): self.staleness[k] for k in sorted(self.staleness)}
        return {**super().report(), "staleness": histogram, "mean_staleness": mean}

    def settle(self) -> None:
        for strip in self._strips:
            strip.settle()

    def collect(self, bucket: Bucket) -> torch.Tensor:
        """Return the parameters as the servers have them."""
        return self._strips[bucket.index].read()
