"""Learning in virtual time: one model object, and the ranks' vectors that it is lent in turn.

The arithmetic is that of `replica.py` and `train.py` with the same functions on the same data, so
the weights are those of a real run, bit for bit.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable

import torch
from torch import nn
from torch.nn import functional

from syncline import checkpoint
from syncline.comm.base import Communicator, Partials
from syncline.config import Job
from syncline.engine.bucket import Bucket, Slot, add_gradient, view_of
from syncline.engine.buffers import Buffers, flat_buffers, load_flat_buffers
from syncline.engine.clip import Norm
from syncline.engine.update import Hyper, Reach, StripUpdate, find_reach, group_numbers, snapshot
from syncline.evaluation import evaluate as evaluate_parts
from syncline.loader import reseed
from syncline.recipe import Order, batch_of, build_model, build_optimizer, learning_rate, load_data
from syncline.sim.rank import VirtualRank


class Learning:
    """What all ranks have in common: the data, the model object and the first values."""

    def __init__(self, job: Job) -> None:
        """`job` is resolved."""
        torch.set_num_threads(job.run.threads)
        self.job = job
        self.data = load_data(job)
        assert job.strategy.shards is not None
        self.shards = job.strategy.shards
        self.order = Order(job, self.data)
        self.model = build_model(job, self.data)
        self.model.train()
        self.optimizer = build_optimizer(job.optimizer, self.model)
        self.reach = find_reach(self.optimizer)
        self._group_of = group_numbers(self.optimizer)
        self.parameters = dict(self.model.named_parameters())
        self.first = {name: value.detach().clone() for name, value in self.parameters.items()}
        self.first_buffers = [buffer.clone() for buffer in self.model.buffers()]
        self.losses: dict[int, float] = {}
        self.autograd_s = 0.0
        """Time spent in forward and backward."""
        self.lent_to: object = None

    @property
    def cuts_parameters(self) -> bool:
        return self.reach is not Reach.PARAMETER

    def group_of(self, slot: Slot) -> int:
        return self._group_of[id(slot.parameter)]

    def digest(self) -> str:
        return checkpoint.digest_of(self.model.state_dict())

    def evaluate(self) -> tuple[float | None, float | None]:
        """Test what the model holds now; the sums are those of a real run."""
        if self.data.test is None:
            return None, None
        results = evaluate_parts(self.model, self.data.test, None)
        loss, correct = torch.from_numpy(results).sum(dim=0).tolist()
        return loss / len(self.data.test), correct / len(self.data.test)


class RankLearner:
    """One rank's vectors, buffers and numbers of the present step."""

    def __init__(self, learning: Learning) -> None:
        self._learning = learning
        self._has_gradient: set[int] = set()
        self._norm: Norm | None = None

    @property
    def statistics(self) -> Partials | None:
        return self._buffers.statistics

    def lay_out(self, rank: VirtualRank, comm: Communicator) -> None:
        learning = self._learning
        self._told = [0.0] * len(rank.summed)
        views = []
        for bucket in rank.buckets:
            memory = bucket.parameters.memory
            for slot in bucket.slots:
                view = view_of(memory.mine, slot)
                if comm.position == 0 or not memory.is_common:
                    view.copy_(learning.first[slot.name])
                views.append((slot.parameter, view))
        buffers = list(learning.model.buffers())
        for buffer, first in zip(buffers, learning.first_buffers, strict=True):
            buffer.data = first.clone()
        self._buffers = Buffers(learning.model, comm, rank.spread, rank.num_slots)
        self._mine = [*views, *((buffer, buffer.data) for buffer in buffers)]
        learning.lent_to = None

    def update_of(
        self, bucket: Bucket, parameters: torch.Tensor, gradient: torch.Tensor, low: int, high: int
    ) -> StripUpdate:
        learning, memory = self._learning, (parameters, gradient)
        return StripUpdate(
            learning.optimizer, bucket, memory, low, high, learning.reach, learning.group_of
        )

    def flat_buffers(self) -> torch.Tensor:
        self.borrow()
        return flat_buffers(self._learning.model)

    def take_over(
        self, rank: VirtualRank, buckets: list[torch.Tensor], buffers: torch.Tensor
    ) -> None:
        """Put what stands for the run as a whole in this rank's place."""
        with torch.no_grad():
            for bucket, values in zip(rank.buckets, buckets, strict=True):
                bucket.parameters.memory.mine.copy_(values)
            load_flat_buffers(self.borrow(), buffers)

    def borrow(self) -> nn.Module:
        """Put this rank's vectors into the model object."""
        if self._learning.lent_to is not self:
            self._learning.lent_to = self
            for tensor, mine in self._mine:
                if tensor.data_ptr() != mine.data_ptr():
                    tensor.data = mine
        return self._learning.model

    def compute(self, rank: VirtualRank, step: int, shard: int) -> None:
        learning, model = self._learning, self.borrow()
        if shard != rank.my_shards[0]:
            with torch.no_grad():
                self._buffers.begin_shard()
        split = learning.data.train
        images, labels = batch_of(split, learning.order.indices(step, shard))
        reseed(learning.job.run.seed, step, shard)
        started = time.perf_counter()
        loss = functional.cross_entropy(model(images), labels)
        loss.backward()
        learning.autograd_s += time.perf_counter() - started
        order = shard - rank.summed[0]
        self._told[order] = loss.item()
        plan = rank.leaves[order]
        with torch.no_grad():
            for slot in rank.slots:
                gradient = slot.parameter.grad
                if gradient is not None:
                    self._has_gradient.add(slot.number)
                add_gradient(slot, plan, gradient, 1.0 / len(rank.summed))
                slot.parameter.grad = None
            self._buffers.end_shard(order, plan)

    def hyper(self, step: int) -> Hyper:
        learning = self._learning
        settings = learning.job.optimizer
        for group in learning.optimizer.param_groups:
            group["lr"] = learning_rate(settings, step, learning.order.total)
        return snapshot(learning.optimizer)

    def flags(self) -> list[float]:
        with_gradient, self._has_gradient = self._has_gradient, set()
        self.borrow()
        return [
            *(float(number in with_gradient) for number in range(len(self._learning.first))),
            float(self._buffers.has_changed_others),
            *self._told,
        ]

    def clip(self, rank: VirtualRank, comm: Communicator) -> None:
        limit = self._learning.job.optimizer.clip_norm
        if limit is not None:
            if self._norm is None:
                in_order = sorted(rank.slots, key=lambda slot: slot.number)
                self._norm = Norm(in_order, rank.buckets, comm)
            self._norm.clip(limit)

    def step_entered(
        self, rank: VirtualRank, comm: Communicator, step: int, flags: list[float]
    ) -> None:
        learning = self._learning
        *has_gradient, has_changed = flags[: -len(rank.summed)]
        without = {number for number, has in enumerate(has_gradient) if not has}
        for bucket in rank.buckets:
            bucket.update.leave_out(without)
        learning.losses[step] = statistics.fmean(flags[-len(rank.summed) :])
        self.borrow()
        # Others may borrow the model while this rank waits for a broadcast.
        for _ in self._buffers.end_step(comm, has_changed > 0):
            self.borrow()


def slots_of(learning: Learning, names: Iterable[str]) -> list[Slot]:
    """Make slots for one rank, in the order of the names; numbers follow registration."""
    number_of = {name: number for number, name in enumerate(learning.first)}
    return [Slot(name, learning.parameters[name], number_of[name]) for name in names]
