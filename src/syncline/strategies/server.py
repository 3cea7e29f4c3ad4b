"""Asynchronous SGD with a parameter server: workers push gradients and pull parameters, no waiting.

Dean et al. 2012 (Downpour SGD); in the form of Zhang et al. 2015. The parameters lie in strips on
all ranks, or on ranks that only serve. The owner of a strip runs the user's optimizer once for
every push and answers with the new strip. Between pushes, with a `period` above 1, a worker takes
steps with the user's optimizer on its own copy; it then pushes the sum of its gradients since the
last push, and the owner decays weights for as many steps. The last step of the run ends with a push
too. In the middle of a run a checkpoint holds what a worker has not pushed yet.

Staleness of a push: how many other updates a strip has seen since the worker pulled it.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from syncline.comm.base import Communicator
from syncline.comm.meeting import Meeting
from syncline.contract import Model, Plan, Saved, Strategy, UpdateSettings, Whole, World
from syncline.engine.bucket import Bucket
from syncline.engine.state import State, StateWindow
from syncline.sizes import Size
from syncline.strategies.pushes import Pushes
from syncline.strategies.replicas import OwnReplicas, plan_own_replicas
from syncline.strategies.rule_trial import decay_of_steps, decays_apart
from syncline.strategies.server_settings import ServerSettings
from syncline.strategies.strip import ServedStrip


class Server(Strategy):
    """Workers and servers; every rank is both, unless there are dedicated servers."""

    settings: ServerSettings

    def __init__(self, settings: ServerSettings | None = None, seed: int = 0) -> None:
        self.settings = settings or ServerSettings()
        self.staleness: Counter[int] = Counter()
        """How many of this rank's pushes had each staleness."""

    def plan(self, world: World, sizes: Sequence[Size], shards: int) -> Plan:
        is_own = self.settings.period > 1  # between pushes a worker's parameters are its own
        plan = plan_own_replicas(world, shards, self.settings, keeps_own=is_own)
        return dataclasses.replace(plan, pulls=True)

    def start(self, model: Model, comm: Communicator, saved: Saved) -> Whole:
        self.comm, self._model = comm, model
        self._replicas = OwnReplicas(
            model,
            comm,
            self.settings,
            collect=self._collect,
            held=lambda bucket: self._pushes[bucket.index].held(),
            settle=self._settle,
            own_state=self._own_state,
            gather_state=self._gather_state,
            read_state=self._read_state,
            figures=self._figures,
        )
        self._progress = Meeting(comm, "step")
        workers = self.settings.num_workers(comm.size)
        owns = [not self.settings.servers or rank >= workers for rank in comm.ranks]
        apart = decays_apart(model) if self.settings.period > 1 else False
        for group in model.buckets[0].optimizer.settings:
            decay_of_steps(group, self.settings.period, apart=apart)  # refuse now, not at a push
        self._pushes: list[Pushes] = []
        for bucket in model.buckets:
            cuts = model.cut(bucket, owns)
            low, high = cuts[comm.position : comm.position + 2]
            strip = ServedStrip(model, bucket, low, high, apart, saved)
            self._pushes.append(Pushes(self, self._replicas, bucket, strip, cuts, saved))
        self._state = StateWindow(comm, model.buckets)
        return self._replicas

    def gradient_ready(self, bucket: Bucket) -> None:
        bucket.comm.reduce_scatter(bucket.gradient)  # the mean over this rank's own shards

    def step_entered(self, step: int) -> None:
        ahead = self.settings.max_staleness
        if ahead != "none":
            self._progress.tell(step + 1)
            workers = range(self.settings.num_workers(self.comm.size))
            self._progress.until(step + 1 - ahead, workers, but=self._replicas.takes_no_steps)

    def before_use(self, bucket: Bucket, update: UpdateSettings) -> None:
        pushes = self._pushes[bucket.index]
        pushes.accumulate(update.without)
        is_last = bucket.step + 1 == self._model.total_steps
        if self.settings.is_due(bucket.step) or is_last:
            pushes.push(update)
        else:
            pushes.step_alone(update)

    def _gather_state(self, is_wanted: bool) -> State:
        """Return the state, read from the owners of strips between two meetings of all ranks."""
        self._settle()
        self._replicas.meet()
        whole = self._read_state() if is_wanted else {}
        self._replicas.meet()
        return whole

    def _read_state(self) -> State:
        """Return the state as the owners of strips have it now: others may be pushing."""
        self._settle()
        everybody = range(self.comm.size)
        holders = [at for at in everybody if any(one.is_held_by(at) for one in self._pushes)]
        return self._state.gather(self._model.slots, holders)

    def _figures(self) -> dict[str, Any]:
        pushes = sum(self.staleness.values())
        mean = sum(k * times for k, times in self.staleness.items()) / max(1, pushes)
        histogram = {str(k): self.staleness[k] for k in sorted(self.staleness)}
        return {"staleness": histogram, "mean_staleness": mean}

    def _settle(self) -> None:
        for pushes in self._pushes:
            pushes.settle()

    def _own_state(self) -> dict[str, torch.Tensor]:
        """Return what a worker has not pushed yet, and its own optimizer's state, if any."""
        if self.settings.period == 1:
            return {}
        return {key: value for one in self._pushes for key, value in one.state().items()}

    def _collect(self, bucket: Bucket) -> torch.Tensor:
        """Return the parameters as the servers have them."""
        return self._pushes[bucket.index].read()
