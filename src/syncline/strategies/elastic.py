"""Elastic averaging: each rank trains its own replica; an elastic force ties it to a common center.

Zhang, Choromanska and LeCun 2015 (arXiv 1412.6651), as in Jin et al. 2016 (arXiv 1611.04581).
Every `period` steps, with a = beta / workers, x the rank's parameters and c the center, both old:

    d = a (x - c);  c <- c + d;  x <- step of the user's optimizer from x, then minus d

With a momentum optimizer this is EAMSGD. The center lies in strips, one per rank, or on ranks that
only serve; each owner serves the calls to its strip one after the other. The exchange needs only
the parameters before the step, so it overlaps backward; with `early` it begins even before the
forward pass. Workers that are gone do not count: the forces on the center still add up to beta.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from syncline.comm.base import Communicator
from syncline.comm.window import Counted, Functions
from syncline.contract import Held, Model, Plan, Saved, Strategy, UpdateSettings, Whole, World
from syncline.engine.bucket import Bucket
from syncline.errors import CheckpointError, PeerGone
from syncline.sizes import Size
from syncline.strategies.center import Center
from syncline.strategies.replicas import OwnReplicas, begins_early, own_first
from syncline.strategies.settings import ElasticSettings
from syncline.strategies.vector import Vector, make_vectors, plan_vectors


class Elastic(Strategy):
    """EASGD, asynchronous or not."""

    settings: ElasticSettings

    def __init__(self, settings: ElasticSettings | None = None, seed: int = 0) -> None:
        self.settings = settings or ElasticSettings()

    def plan(self, world: World, sizes: Sequence[Size], shards: int) -> Plan:
        return plan_vectors(world, sizes, shards, self.settings)

    def start(self, model: Model, comm: Communicator, saved: Saved) -> Whole:
        settings = self.settings
        self.comm = comm
        num_workers = settings.num_workers(comm.size)
        self._workers = {at for at, rank in enumerate(comm.ranks) if rank < num_workers}
        self._is_early = begins_early(settings.wants_early, comm)
        self._asks_late = settings.synchronous or settings.as_published
        """Whether a rank asks in the step itself, and not during backward."""
        self._replicas = OwnReplicas(
            model,
            comm,
            settings,
            collect=self._collect,
            held=self._held,
            settle=self._settle,
            own_state=self._own_state,
        )
        if any(key.partition("/")[0].isdigit() for key in saved.state):  # by bucket
            raise CheckpointError(
                "the checkpoint holds moves towards the center in the form of version 0.1.0. Go "
                "on with the version that wrote it."
            )
        vectors = make_vectors(model, comm, settings)
        self._centers = [self._make_center(model, vector, saved) for vector in vectors]
        self._center_of = {
            bucket.index: center for center in self._centers for bucket in center.vector.buckets
        }
        return self._replicas

    def _make_center(self, model: Model, vector: Vector, saved: Saved) -> Center:
        comm, settings = self.comm, self.settings
        owns = [not settings.servers or at not in self._workers for at in range(comm.size)]
        cuts = vector.cut(model, owns)
        moves = comm.allocate(vector.num_elements, vector.dtype)
        center = Center(vector, cuts, moves, settings.beta, settings.synchronous)
        low, high = cuts[comm.position : comm.position + 2]
        # The center represented the run.
        center.strips[comm.position] = vector.run_values(saved)[low:high].clone()
        answer = torch.zeros_like(moves.mine)
        if vector.load("moves", answer, saved.state):
            center.answer = answer
        functions: Functions = {"pull": Counted(center.pull), "read": center.read}
        center.window = self._replicas.window(0, vector.dtype, functions)
        return center

    def _is_due(self, step: int) -> bool:
        """Say whether there is an exchange in a step. A rank alone never exchanges."""
        return self.settings.is_due(step) and self.comm.size > 1

    def gradient_ready(self, bucket: Bucket) -> None:
        bucket.comm.reduce_scatter(bucket.gradient)  # the mean over this rank's own shards
        center = self._center_of[bucket.index]
        if self._is_due(bucket.step) and not (self._asks_late or center.is_asked):
            self._ask(center, bucket.step)

    def step_entered(self, step: int) -> None:
        if self.settings.synchronous and self._is_due(step):
            self._replicas.meet()  # all calls of the last exchange have been served

    def before_use(self, bucket: Bucket, update: UpdateSettings) -> None:
        center = self._center_of[bucket.index]
        if not self._is_due(bucket.step):
            bucket.optimizer.run(update)
        else:
            if self._asks_late and bucket is center.vector.buckets[0]:
                center.vector.update_settings(update.groups)
                center.vector.read()
                self._ask(center, bucket.step)
            moves = self._answers(center)
            bucket.optimizer.run(update)
            bucket.parameters.memory.mine.sub_(center.vector.part(moves, bucket))
        if self._is_early and self._is_due(bucket.step + 1):
            self._ask(center, bucket.step + 1)

    def discard(self, bucket: Bucket) -> None:
        """Apply this rank's moves without a step: the center has already moved."""
        center = self._center_of[bucket.index]
        if center.is_asked:
            bucket.parameters.memory.mine.sub_(self._answers(center))

    def _answers(self, center: Center) -> torch.Tensor:
        """Return this rank's moves from all strips; zero for a strip whose owner is gone."""
        if center.answer is not None:
            answer, center.answer = center.answer, None
            return answer
        if center.asked is not None:
            results = center.asked.wait()
            if None in results:
                for strip, result in zip(center.targets.strips, results, strict=True):
                    if result is None:
                        center.part(center.moves, strip.number).mine.zero_()
            center.asked = None
        return center.moves.mine

    def _ask(self, center: Center, step: int) -> None:
        """Send this rank's parameters to every strip of the center, and ask for its moves."""
        gone = center.window.gone()
        targets, num_workers = center.find_targets(gone, self._order), len(self._workers - gone)
        center.asked = center.window.call_all(
            "pull",
            targets,
            center.vector.memory,
            center.moves,
            lambda number: b"%d %d %d" % (number, step, num_workers),
        )

    def _order(self) -> list[int]:
        return own_first(self.comm)

    def _settle(self) -> None:
        """Copy the answers of early calls: `_collect` needs the memory that they are in."""
        for center in self._centers:
            if center.asked is not None:
                center.answer = self._answers(center).clone()

    def _own_state(self) -> dict[str, torch.Tensor]:
        """Return the moves that the center has made and this rank has not made yet."""
        state: dict[str, torch.Tensor] = {}
        for center in self._centers:
            if center.answer is not None:
                state |= center.vector.save("moves", center.answer)
        return state

    def _collect(self, bucket: Bucket) -> torch.Tensor:
        """Return the center; in a world of one, the rank's own values."""
        if self.comm.size == 1:
            return bucket.parameters.memory.mine.clone()
        center = self._center_of[bucket.index]
        if bucket is center.vector.buckets[0]:
            for number in center.owners(center.window.gone()):
                self._read(center, number)
        return center.vector.part(center.moves.mine, bucket).clone()

    def _held(self, bucket: Bucket) -> Iterator[Held]:
        """Yield the bucket's part of the strips of the center that this rank holds."""
        if self.comm.size == 1:
            yield Held(0, bucket.num_elements, bucket.parameters.memory.mine)
            return
        center = self._center_of[bucket.index]
        first = center.vector.start_of(bucket)
        for low, high, values in center.held_by(self.comm.position):
            start, stop = max(low, first), min(high, first + bucket.num_elements)
            if start < stop:
                yield Held(start - first, stop - first, values[start - low : stop - low])

    def _read(self, center: Center, number: int) -> None:
        """Read a strip from the rank that holds it now."""
        strip = center.part(center.moves, number)
        while True:
            owner = center.owners(center.window.gone())[number]
            with contextlib.suppress(PeerGone):
                center.window.call(owner, "read", None, strip, b"%d" % number).wait()
                return
