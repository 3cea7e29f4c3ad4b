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

What represents the run is the mean over ranks, with push-sum the weighted mean. Vectors that have
arrived and are not mixed in yet belong to it: push-sum's mean is the same before and after mixing.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from syncline.comm.base import Communicator
from syncline.comm.window import Pending
from syncline.contract import Held, Model, Plan, Saved, Strategy, UpdateSettings, Whole, World
from syncline.engine.bucket import Bucket
from syncline.errors import PeerGone
from syncline.seeds import seed_for
from syncline.sizes import Size
from syncline.strategies.box import Box
from syncline.strategies.replicas import OwnReplicas, begins_early
from syncline.strategies.settings import GossipSettings
from syncline.strategies.vector import make_vectors, plan_vectors


class Gossip(Strategy):
    """Mixes with one partner at a time."""

    settings: GossipSettings

    def __init__(self, settings: GossipSettings | None = None, seed: int = 0) -> None:
        self.settings = settings or GossipSettings()
        self._seed = seed
        self._squares: dict[Box, tuple[float, float]] = {}
        """By vector, at the last gather: mean square distance to the mean; its square norm."""

    def plan(self, world: World, sizes: Sequence[Size], shards: int) -> Plan:
        return plan_vectors(world, sizes, shards, self.settings)

    def start(self, model: Model, comm: Communicator, saved: Saved) -> Whole:
        self.comm = comm
        self._exchange = self._pull if self.settings.rule == "pull" else self._push
        self._is_early = begins_early(self.settings.wants_early, comm)
        self._replicas = OwnReplicas(
            model,
            comm,
            self.settings,
            collect=self._collect,
            held=self._held,
            settle=self._settle,
            expose=self._expose,
            own_state=self._own_state,
            figures=self._figures,
        )
        vectors = make_vectors(model, comm, self.settings)
        self._boxes = [Box(self._replicas, vector, self.settings, saved) for vector in vectors]
        self._box_of = {bucket.index: box for box in self._boxes for bucket in box.vector.buckets}
        return self._replicas

    def gradient_ready(self, bucket: Bucket) -> None:
        bucket.comm.reduce_scatter(bucket.gradient)  # the mean over this rank's own shards

    def before_use(self, bucket: Bucket, update: UpdateSettings) -> None:
        bucket.optimizer.run(update)
        box = self._box_of[bucket.index]
        if bucket is box.vector.last:
            box.vector.update_settings(update.groups)
            self._exchange(box, bucket.step)

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

    def _pull(self, box: Box, step: int) -> None:
        """Mix, if it is the turn; if early, fetch in the step before, and publish before that."""
        mixes = self.settings.is_due(step)
        fetches = self._is_early and self.settings.is_due(step + 1)
        if not (mixes or fetches):
            return
        mine = box.vector.read()
        if fetches or not self._is_early:
            box.window.publish(mine)
        if mixes:
            with contextlib.suppress(PeerGone):  # if the partner died: as if the rank drew itself
                fetched = box.fetched or self._fetch(box, step)
                if fetched is not None:
                    fetched.wait()
                    mine.lerp_(fetched.values, 0.5)
                    fetched.release()
                    box.vector.write()
            box.fetched = None
        if fetches:
            box.fetched = self._fetch(box, step + 1)

    def _fetch(self, box: Box, step: int) -> Pending | None:
        partner = self.partner(step)
        if partner == self.comm.position or partner in box.window.gone():
            return None
        return box.window.get(partner)

    def _push(self, box: Box, step: int) -> None:
        if not self.settings.is_due(step):
            return
        mine = box.vector.read()
        partner = self.partner(step)
        is_sent = partner != self.comm.position and partner not in box.window.gone()
        if self.settings.push_sum:
            sent = kept = box.weight / 2 if is_sent else box.weight
        else:
            sent, kept = 1.0, 1.0 if is_sent else 2.0
        if is_sent:
            box.send(partner, mine, sent)
        total = box.mix_into(mine, kept)
        if self.settings.push_sum:
            box.weight = total

    def _own_state(self) -> dict[str, torch.Tensor]:
        """Return push-sum's weights, and values that have arrived but are not mixed in yet."""
        return {key: value for box in self._boxes for key, value in box.state().items()}

    def _settle(self) -> None:
        for box in self._boxes:
            box.settle()

    def _expose(self) -> None:
        for box in self._boxes:
            values, weight = box.mixed()
            self._replicas.publish(box.window, values)
            if box.weights is not None:
                number = torch.tensor([weight], dtype=torch.float64)
                self._replicas.publish(box.weights, number)

    def _collect(self, bucket: Bucket) -> torch.Tensor:
        """Return the mean over all ranks that are not gone; note their distance to it."""
        if self.comm.size == 1:
            return bucket.parameters.memory.mine.clone()
        box = self._box_of[bucket.index]
        if bucket is box.vector.buckets[0]:
            like = box.vector.memory.mine
            box.mean = self._replicas.mean(box.window, like, weights=box.weights)
            norm = box.mean.double().square().sum().item()
            self._squares[box] = (self._replicas.spread, norm)
        return box.vector.part(box.mean, bucket)

    def _held(self, bucket: Bucket) -> Iterator[Held]:
        """Yield the bucket's part of this rank's vector, with all that has arrived mixed in."""
        box = self._box_of[bucket.index]
        values, weight = box.mixed()
        yield Held(0, bucket.num_elements, box.vector.part(values, bucket), weight)

    def _figures(self) -> dict[str, Any]:
        """Return the distance to consensus: of ranks to their mean, relative to its norm."""
        apart, norm = (sum(pair[k] for pair in self._squares.values()) for k in (0, 1))
        return {"distance_to_consensus": math.sqrt(apart / norm) if norm else 0.0}
