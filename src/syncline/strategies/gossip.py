"""Gossip SGD: every rank steps alone and mixes its parameters with one partner's.

Jin et al. 2016 (arXiv 1611.04581); exact rules from the first author's code. After the local step
a rank draws a partner j, itself included.

- Pull: the rank publishes its parameters; if j is another rank, it takes the mean with what j
  published last. No rank waits for another.
- Push: if j is another rank, the rank sends its parameters x to j. Then it mixes in what has
  arrived, n vectors with sum S: (s x + S) / (n + s), with s = 2 if it drew itself, else 1.

Push-sum (Kempe et al. 2003) also sends half of the rank's weight and divides by the weights: this
keeps the weighted mean over ranks on any topology. Here the weights multiply parameters; the local
step does not depend on the weight.
"""

from __future__ import annotations

import contextlib
import math
import random
import struct
from collections.abc import Sequence
from typing import Any

import torch

from syncline.comm.base import Communicator
from syncline.comm.window import Call, Pending, Window
from syncline.contract import Model, Plan, Saved, Strategy, UpdateSettings, Whole, World
from syncline.engine.bucket import Bucket
from syncline.errors import PeerGone
from syncline.seeds import seed_for
from syncline.sizes import Size
from syncline.strategies.replicas import OwnReplicas, begins_early, plan_own_replicas
from syncline.strategies.settings import GossipSettings

_WEIGHT = struct.Struct("<d")


class Gossip(Strategy):
    """Mixes with one partner at a time."""

    settings: GossipSettings

    def __init__(self, settings: GossipSettings | None = None, seed: int = 0) -> None:
        self.settings = settings or GossipSettings()
        self._seed = seed
        self._squares: dict[int, tuple[float, float]] = {}
        """By bucket, at the last gather: mean square distance to the mean; its square norm."""

    def plan(self, world: World, sizes: Sequence[Size], shards: int) -> Plan:
        return plan_own_replicas(world, shards, self.settings)

    def start(self, model: Model, comm: Communicator, saved: Saved) -> Whole:
        self.comm, self._buckets = comm, model.buckets
        rule = self.settings.rule
        self._step_bucket = self._pull if rule == "pull" else self._push
        self._is_early = begins_early(self.settings.early, comm)
        self._boxes = [_Box(comm, bucket, pushes=rule == "push") for bucket in model.buckets]
        self._replicas = OwnReplicas(
            model,
            comm,
            self.settings,
            collect=self._collect,
            settle=self._settle,
            expose=self._expose,
            own_state=self._own_state,
            figures=self._figures,
        )
        for bucket, box in zip(model.buckets, self._boxes, strict=True):
            box.window = self._replicas.window(bucket, bucket.num_elements, {"push": box.take})
            box.window.publish(bucket.parameters.memory.mine)
            arrived = saved.state.get(f"{bucket.index}/arrived")
            if arrived is not None and arrived.shape == box.arrived.shape:
                box.arrived.copy_(arrived)
                weights = saved.state[f"{bucket.index}/weights"].tolist()
                box.weight, box.arrived_weight = weights
        return self._replicas

    def gradient_ready(self, bucket: Bucket) -> None:
        bucket.comm.reduce_scatter(bucket.gradient)  # the mean over this rank's own shards

    def before_use(self, bucket: Bucket, update: UpdateSettings) -> None:
        bucket.optimizer.run(update)
        if self.settings.is_due(bucket.step):
            self._step_bucket(bucket, self._boxes[bucket.index])

    def partner(self, step: int) -> int:
        """Return the position of this rank's partner after a step; it may be its own."""
        size, mine = self.comm.size, self.comm.position
        turn = step // self.settings.period
        if self.settings.partners == "uniform":
            return random.Random(seed_for(self._seed, "partner", mine, turn)).randrange(size)
        if self.settings.partners == "ring":
            return (mine + 1) % size
        hop = 1 << turn % max(1, (size - 1).bit_length())
        return mine ^ hop if self.settings.partners == "hypercube" else (mine + hop) % size

    def _pull(self, bucket: Bucket, box: _Box) -> None:
        mine = bucket.parameters.memory.mine
        box.window.publish(mine)
        with contextlib.suppress(PeerGone):  # if the partner died: as if the rank drew itself
            fetched = box.fetched or self._fetch(box, bucket.step)
            if fetched is not None:
                fetched.wait()
                mine.lerp_(fetched.values, 0.5)
                fetched.release()
        box.fetched = None
        if self._is_early:
            box.fetched = self._fetch(box, bucket.step + self.settings.period)

    def _fetch(self, box: _Box, step: int) -> Pending | None:
        partner = self.partner(step)
        if partner == self.comm.position or partner in box.window.gone():
            return None
        return box.window.get(partner)

    def _push(self, bucket: Bucket, box: _Box) -> None:
        mine = bucket.parameters.memory.mine
        partner = self.partner(bucket.step)
        is_sent = partner != self.comm.position and partner not in box.window.gone()
        if self.settings.push_sum:
            sent = kept = box.weight / 2 if is_sent else box.weight
        else:
            sent, kept = 1.0, 1.0 if is_sent else 2.0
        if is_sent:
            box.send(partner, mine, sent)
        if box.arrived_weight:
            total = kept + box.arrived_weight
            mine.mul_(kept / total).add_(box.arrived, alpha=1 / total)
            kept = total
        box.arrived.zero_()
        box.arrived_weight, box.weight = 0.0, kept

    def _own_state(self) -> dict[str, torch.Tensor]:
        """Return push-sum's weights, and values that have arrived but are not mixed in yet."""
        state = {}
        for number, box in enumerate(self._boxes):
            weights = [box.weight, box.arrived_weight]
            state[f"{number}/weights"] = torch.tensor(weights, dtype=torch.float64)
            state[f"{number}/arrived"] = box.arrived.clone()
        return state

    def _settle(self) -> None:
        for box in self._boxes:
            box.settle()

    def _expose(self) -> None:
        for bucket, box in zip(self._buckets, self._boxes, strict=True):
            self._replicas.publish(box.window, bucket.parameters.memory.mine)

    def _collect(self, bucket: Bucket) -> torch.Tensor:
        """Return the mean over all ranks that are not gone; note their distance to it."""
        mine = bucket.parameters.memory.mine
        mean = self._replicas.mean(self._boxes[bucket.index].window, mine)
        norm = mean.double().square().sum().item()
        self._squares[bucket.index] = (self._replicas.spread, norm)
        return mean

    def _figures(self) -> dict[str, Any]:
        """Return the distance to consensus: of ranks to their mean, relative to its norm."""
        apart, norm = (sum(pair[k] for pair in self._squares.values()) for k in (0, 1))
        return {"distance_to_consensus": math.sqrt(apart / norm) if norm else 0.0}


class _Box:
    """What a rank keeps for one bucket: its window, and values sent, fetched or arrived."""

    window: Window

    def __init__(self, comm: Communicator, bucket: Bucket, *, pushes: bool) -> None:
        size = bucket.num_elements if pushes else 0
        self.arrived = torch.zeros_like(bucket.parameters.memory.mine[:size])
        self.arrived_weight = 0.0
        self.weight = 1.0
        self._outgoing = comm.allocate(size, bucket.dtype)
        self._sending: Pending | None = None
        self.fetched: Pending | None = None

    def send(self, partner: int, values: torch.Tensor, weight: float) -> None:
        """Send a copy, so that the rank need not wait; one is under way at a time."""
        self.settle()
        self._outgoing.mine.copy_(values)
        note = _WEIGHT.pack(weight)
        self._sending = self.window.call(partner, "push", self._outgoing, note=note)

    def settle(self) -> None:
        """Wait until the last values sent have arrived."""
        if self._sending is not None:
            with contextlib.suppress(PeerGone):  # the receiver died: what was sent to it is lost
                self._sending.wait()

    def take(self, call: Call) -> int:
        """Add what a peer has pushed."""
        (weight,) = _WEIGHT.unpack(call.note)
        assert call.values is not None
        self.arrived.add_(call.values, alpha=weight)
        self.arrived_weight += weight
        return 0
