"""Learning in virtual time: one model object, whose tensors are one rank's at a time.

The arithmetic is that of the engine and of `train.py`, with the same functions on the same data,
so the weights are those of a real run, bit for bit.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from syncline import checkpoint
from syncline.comm.base import Communicator, Partials
from syncline.config import Job
from syncline.contract import ParamGroups, WholeValues
from syncline.engine.bucket import Bucket, Slot, add_gradient, view_of
from syncline.engine.buffer_homes import flat_buffers, load_flat_buffers
from syncline.engine.buffers import Buffers
from syncline.engine.clip import Norm
from syncline.engine.flags import encode
from syncline.engine.optimizer import OptimizerOnStrip, Reach, param_group_numbers, snapshot
from syncline.engine.optimizer_trial import find_reach
from syncline.engine.told_settings import flatten, told_to_servers
from syncline.evaluation import evaluate_alone
from syncline.losses import loss_of
from syncline.recipe import Order, build_model, build_optimizer, load_data, set_learning_rate
from syncline.sim.course import Source
from syncline.sim.rank import VirtualRank


class Learning:
    """What all ranks share: the data, the model object and the initial values."""

    def __init__(self, job: Job) -> None:
        """`job` is resolved."""
        torch.set_num_threads(job.run.threads)
        self.job = job
        self.data = load_data(job)
        assert job.strategy.shards is not None
        self.shards = job.strategy.shards
        self.order = Order(job, self.data)
        self.model = build_model(job, self.data)
        self.loss = loss_of(job.model.loss)
        self.model.train()
        self.optimizer = build_optimizer(job.optimizer, self.model)
        self.reach = find_reach(self.optimizer)
        self._param_group_of = param_group_numbers(self.optimizer)
        self.parameters = dict(self.model.named_parameters())
        self.first = {name: value.detach().clone() for name, value in self.parameters.items()}
        self.first_buffers = [buffer.clone() for buffer in self.model.buffers()]
        self._losses: dict[int, dict[tuple[int, ...], float]] = {}
        """By step: the mean loss of the shards of each group of ranks that step together."""
        self.evaluated: dict[int, tuple[float, float | None, float | None]] = {}
        """By number of steps: time, test loss and accuracy."""
        self.autograd_s = 0.0
        """Time spent in forward and backward."""
        self.used_by: object = None

    @property
    def inside_parameters(self) -> bool:
        """Whether the optimizer may update a part of a parameter."""
        return self.reach is not Reach.PARAMETER

    @property
    def num_settings(self) -> int:
        """How many numbers the optimizer's settings have."""
        return len(flatten(snapshot(self.optimizer)))

    @property
    def clips(self) -> bool:
        """Whether gradients are clipped."""
        return self.job.optimizer.clip_norm is not None

    def slots(self) -> list[Slot]:
        """Return new slots for one rank, in registration order."""
        named = enumerate(self.parameters.items())
        return [Slot(name, parameter, number) for number, (name, parameter) in named]

    def param_group_of(self, slot: Slot) -> int:
        return self._param_group_of[id(slot.parameter)]

    def digest(self) -> str:
        return checkpoint.digest_of(self.model.state_dict())

    def note_loss(self, step: int, shards: Sequence[int], loss: float) -> None:
        """Note the mean loss of some shards of a step; each of their ranks does."""
        if shards:
            self._losses.setdefault(step, {})[tuple(shards)] = loss

    def losses(self) -> dict[int, float]:
        """Return the mean loss of each step of the run, over all shards that were computed."""
        found: dict[int, float] = {}
        for step, by_shards in sorted(self._losses.items()):
            if len(by_shards) == 1:
                (found[step],) = by_shards.values()  # as it is: a mean could change its last bit
            else:
                total = math.fsum(len(shards) * loss for shards, loss in by_shards.items())
                found[step] = total / sum(map(len, by_shards))
        return found

    def evaluate(self) -> tuple[float | None, float | None]:
        """Return test loss and accuracy of the model as it is now, summed as in a real run."""
        if self.data.test is None:
            return None, None
        return evaluate_alone(self.model, self.data.test, self.loss)


class RankLearner:
    """One rank's parameters and buffers, and its losses and gradients of the current step."""

    def __init__(self, learning: Learning) -> None:
        self._learning = learning
        self._has_gradient: set[int] = set()
        self._norm: Norm | None = None
        self._entered: deque[tuple[int, tuple[int, ...]]] = deque()
        """The run's step and shards of each step that was entered and has not ended."""

    @property
    def statistics(self) -> Partials | None:
        return self._buffers.statistics

    def lay_out(self, rank: VirtualRank) -> None:
        learning, step = self._learning, rank.share.step
        self._share, self._flags = rank.share, rank.flags
        self._losses = [0.0] * len(step.shards)
        views = []
        for bucket in rank.buckets:
            memory = bucket.parameters.memory
            for slot in bucket.slots:
                view = view_of(memory.mine, slot)
                if bucket.comm.position == 0 or not memory.is_common:
                    view.copy_(learning.first[slot.name])
                views.append((slot.parameter, view))
        buffers = list(learning.model.buffers())
        for buffer, first in zip(buffers, learning.first_buffers, strict=True):
            buffer.data = first.clone()
        self._buffers = Buffers(learning.model, step.comm, step.spread)
        self._mine = [*views, *((buffer, buffer.data) for buffer in buffers)]
        learning.used_by = None

    def optimizer_of(
        self, bucket: Bucket, parameters: torch.Tensor, gradient: torch.Tensor, low: int, high: int
    ) -> OptimizerOnStrip:
        learning, memory = self._learning, (parameters, gradient)
        return OptimizerOnStrip(
            learning.optimizer, bucket, memory, low, high, learning.reach, learning.param_group_of
        )

    def flat_buffers(self) -> torch.Tensor:
        self.borrow()
        return flat_buffers(self._learning.model)

    def load(self, rank: VirtualRank, whole: WholeValues) -> None:
        """Replace this rank's parameters and buffers by those that represent the run."""
        with torch.no_grad():
            for bucket, values in zip(rank.buckets, whole.buckets, strict=True):
                bucket.parameters.memory.mine.copy_(values)
            load_flat_buffers(self.borrow(), whole.buffers)

    def evaluate(self, rank: VirtualRank, done: int, whole: WholeValues | None) -> None:
        model = self.borrow()
        kept = None
        if whole is not None:
            mine = [bucket.parameters.memory.mine.clone() for bucket in rank.buckets]
            kept = WholeValues(mine, flat_buffers(model))
            self.load(rank, whole)
        now_s = rank.world.clock.now_s
        self._learning.evaluated[done] = (now_s, *self._learning.evaluate())
        if kept is not None:
            self.load(rank, kept)

    def borrow(self) -> nn.Module:
        """Point the model object at this rank's parameters and buffers, and return it."""
        if self._learning.used_by is not self:
            self._learning.used_by = self
            for tensor, mine in self._mine:
                if tensor.data_ptr() != mine.data_ptr():
                    tensor.data = mine
        return self._learning.model

    def compute(self, rank: VirtualRank, shard: int, source: Source) -> None:
        learning, model = self._learning, self.borrow()
        if shard != self._share.mine[0]:
            with torch.no_grad():
                self._buffers.begin_shard()
        images, labels = learning.order.batch_of_shard(learning.data, *source)
        started = time.perf_counter()
        loss = learning.loss(model(images), labels)
        loss.backward()
        learning.autograd_s += time.perf_counter() - started
        part = self._share.step
        order = part.shards.index(shard)
        self._losses[order] = loss.item()
        with torch.no_grad():
            for slot in rank.slots:
                gradient = slot.parameter.grad
                if gradient is not None:
                    self._has_gradient.add(slot.number)
                assert slot.bucket is not None
                add_gradient(slot, slot.bucket.leaf, gradient, slot.bucket.scale)
                slot.parameter.grad = None
            self._buffers.end_shard(order, part.leaves[shard])

    def settings(self, step: int) -> ParamGroups:
        learning = self._learning
        total = learning.order.total
        set_learning_rate(learning.optimizer, learning.job.optimizer, step, total)
        return snapshot(learning.optimizer)

    def flags(self, step: int, sources: Sequence[Source]) -> list[float]:
        is_alone = len(self._share.step.comm.ranks) == 1
        shards = tuple(shard for _, shard in sources) if is_alone else self._share.step.shards
        self._entered.append((step, shards))
        with_gradient, self._has_gradient = self._has_gradient, set()
        settings = snapshot(self._learning.optimizer)
        self.borrow()
        return encode(
            [number in with_gradient for number in range(len(self._learning.first))],
            has_changed_buffers=self._buffers.has_changed_others,
            is_early_invalid=False,
            step_s=0.0,
            losses=self._losses,
            settings=told_to_servers(self._share, settings, self._buffers.counts()),
        )

    def clip(self, rank: VirtualRank) -> None:
        limit = self._learning.job.optimizer.clip_norm
        assert limit is not None
        if self._norm is None:
            self._norm = Norm(rank.slots, rank.buckets, self._share.step.comm)
        self._norm.clip(limit)

    def load_counts(self, told: Sequence[float]) -> None:
        self.borrow()
        self._buffers.load_counts(told)

    def end_step(self, comm: Communicator, others_changed: bool) -> Iterator[None]:
        """Set the averaged statistics and shard 0's other buffers.

        Other ranks may borrow the model while this rank waits for a broadcast.
        """
        loss = statistics.fmean(self._flags.losses)
        self._learning.note_loss(*self._entered.popleft(), loss)
        self.borrow()
        for _ in self._buffers.end_step(comm, others_changed):
            self.borrow()
            yield
