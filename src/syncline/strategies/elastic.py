"""Elastic averaging: each rank trains its own replica; an elastic force ties it to a common center.

Zhang, Choromanska and LeCun 2015 (arXiv 1412.6651), as in Jin et al. 2016 (arXiv 1611.04581).
Every `period` steps, with a = beta / ranks, x the rank's parameters and c the center, both old:

    d = a (x - c);  c <- c + d;  x <- step of the user's optimizer from x, then minus d

With a momentum optimizer this is EAMSGD. The center lies in strips, one per rank; each rank serves
the calls to its strip one after the other. The exchange needs only the parameters before the step,
so it overlaps backward; with `early` it begins even before the forward pass.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch

from syncline.comm.base import Communicator
from syncline.contract import Model, Plan, Saved, Strategy, UpdateSettings, Whole, World
from syncline.engine.bucket import Bucket, view_of
from syncline.errors import PeerGone
from syncline.sizes import Size
from syncline.strategies.center import Center
from syncline.strategies.replicas import OwnReplicas, begins_early, own_first, plan_own_replicas
from syncline.strategies.settings import ElasticSettings


class Elastic(Strategy):
    """EASGD, asynchronous or not."""

    settings: ElasticSettings

    def __init__(self, settings: ElasticSettings | None = None, seed: int = 0) -> None:
        self.settings = settings or ElasticSettings()

    def plan(self, world: World, sizes: Sequence[Size], shards: int) -> Plan:
        return plan_own_replicas(world, shards, self.settings)

    def start(self, model: Model, comm: Communicator, saved: Saved) -> Whole:
        self.comm, self._buckets = comm, model.buckets
        self._rate = self.settings.beta / comm.size
        early = begins_early(self.settings.early, comm)
        self._is_early = early and not self.settings.synchronous
        self._replicas = OwnReplicas(
            model,
            comm,
            self.settings,
            collect=self._collect,
            settle=self._settle,
            own_state=self._own_state,
        )
        self._centers = [self._center_of(model, bucket, saved) for bucket in model.buckets]
        return self._replicas

    def _center_of(self, model: Model, bucket: Bucket, saved: Saved) -> Center:
        comm = self.comm
        cuts = model.cut(bucket, [True] * comm.size)
        memory = bucket.parameters.memory
        moves = comm.allocate(bucket.num_elements, bucket.dtype)
        center = Center(memory, cuts, moves, self._rate, self.settings.synchronous)
        low, high = cuts[comm.position : comm.position + 2]
        for slot in bucket.slots:
            if slot.name in saved.parameters:  # the center represented the run
                view_of(moves.mine, slot).copy_(saved.parameters[slot.name])
        begins = moves.mine if saved.parameters else memory.mine
        center.strips[comm.position] = begins[low:high].clone()
        answer = saved.state.get(f"{bucket.index}/moves")
        if answer is not None and answer.shape == moves.mine.shape:
            center.answer = answer
        functions = {"pull": center.pull, "read": center.read}
        center.window = self._replicas.window(bucket, 0, functions)
        return center

    def _is_due(self, step: int) -> bool:
        """Say whether there is an exchange in a step. A rank alone never exchanges."""
        return self.settings.is_due(step) and self.comm.size > 1

    def gradient_ready(self, bucket: Bucket) -> None:
        bucket.comm.reduce_scatter(bucket.gradient)  # the mean over this rank's own shards
        center = self._centers[bucket.index]
        if self._is_due(bucket.step) and not (self.settings.synchronous or center.is_asked):
            self._ask(bucket, bucket.step)

    def step_entered(self, step: int) -> None:
        if self.settings.synchronous and self._is_due(step):
            self._replicas.meet()  # all calls of the last exchange have been served

    def before_use(self, bucket: Bucket, update: UpdateSettings) -> None:
        if not self._is_due(bucket.step):
            bucket.optimizer.run(update)
        else:
            if self.settings.synchronous:
                self._ask(bucket, bucket.step)
            moves = self._answers(bucket)
            bucket.optimizer.run(update)
            bucket.parameters.memory.mine.sub_(moves)
        if self._is_early and self._is_due(bucket.step + 1):
            self._ask(bucket, bucket.step + 1)

    def discard(self, bucket: Bucket) -> None:
        """Apply this rank's moves without a step: the center has already moved."""
        if self._centers[bucket.index].is_asked:
            bucket.parameters.memory.mine.sub_(self._answers(bucket))

    def _answers(self, bucket: Bucket) -> torch.Tensor:
        """Return this rank's moves from all strips; zero for a strip whose owner is gone."""
        center = self._centers[bucket.index]
        if center.answer is not None:
            answer, center.answer = center.answer, None
            return answer
        for number, pending in center.asked.items():
            try:
                pending.wait()
            except PeerGone:
                center.part(center.moves, number).mine.zero_()
        center.asked = {}
        return center.moves.mine

    def _ask(self, bucket: Bucket, step: int) -> None:
        """Send this rank's parameters to every strip of the center, and ask for its moves."""
        center = self._centers[bucket.index]
        owners = center.owners()
        for number in own_first(self.comm):
            if number not in owners:
                continue
            owner = owners[number]
            where = center.part(bucket.parameters.memory, number)
            moves = center.part(center.moves, number)
            note = b"%d %d" % (number, step)
            center.asked[number] = center.window.call(owner, "pull", where, moves, note)

    def _settle(self) -> None:
        """Copy the answers of early calls: `_collect` needs the memory that they are in."""
        for bucket, center in zip(self._buckets, self._centers, strict=True):
            if center.asked:
                center.answer = self._answers(bucket).clone()

    def _own_state(self) -> dict[str, torch.Tensor]:
        """Return the moves that the center has made and this rank has not made yet."""
        pairs = ((number, center.answer) for number, center in enumerate(self._centers))
        return {f"{number}/moves": one.clone() for number, one in pairs if one is not None}

    def _collect(self, bucket: Bucket) -> torch.Tensor:
        """Return the center; in a world of one, the rank's own values."""
        if self.comm.size == 1:
            return bucket.parameters.memory.mine.clone()
        center = self._centers[bucket.index]
        for number in center.owners():
            self._read(center, number)
        return center.moves.mine.clone()

    def _read(self, center: Center, number: int) -> None:
        """Read a strip from the rank that holds it now."""
        strip = center.part(center.moves, number)
        while True:
            owner = center.owners()[number]
            with contextlib.suppress(PeerGone):
                center.window.call(owner, "read", None, strip, b"%d" % number).wait()
                return
