"""Builds the buckets of a real model, once, when the first shard's gradients have come.

The layout must be the same on every rank, so rank 0 tells the others the facts that it depends on:
the order in which forward used the parameters, the number of cores, the first backward's times.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence, Set
from itertools import pairwise

import msgspec
import torch
from torch import nn
from torch.optim import Optimizer

from syncline.comm.base import Communicator, exchange_bytes
from syncline.comm.busy import BusyTime
from syncline.comm.control import Control
from syncline.contract import Plan, Strategy
from syncline.engine.bucket import Bucket, Slot, point_to, spans_of, view_of
from syncline.engine.buffer_homes import flat_buffers
from syncline.engine.early import EarlyUpdates
from syncline.engine.first_use import order_of
from syncline.engine.gradients import Gradients
from syncline.engine.lane import Lane
from syncline.engine.layout import Layout, cut, lay_out
from syncline.engine.memory import make_buckets, shapes_of
from syncline.engine.optimizer import OptimizerOnStrip, Reach, param_group_numbers
from syncline.engine.optimizer_trial import find_reach
from syncline.engine.share import Share
from syncline.engine.waiting import ThreadEvent


def start_from_rank_0(
    model: nn.Module, comm: Communicator, lane: Lane, held: Set[int] = frozenset()
) -> None:
    """Give every rank rank 0's parameters and buffers. Every rank calls it.

    Those in `held`, by id, have been given: the model has another optimizer as well.
    """
    root = comm.ranks.index(min(comm.ranks))
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            if id(tensor) not in held:
                lane.call(comm.broadcast, tensor.detach(), root)


class Facts(msgspec.Struct, frozen=True):
    """What a layout depends on besides the job."""

    order: tuple[int, ...]
    """Parameters that got a gradient, in their order of first use."""
    idle: tuple[int, ...]
    cores: int
    backward_s: tuple[tuple[str, float], ...]
    """Seconds by layer, if the plan needs them."""


def agree_on_facts(
    plan: Plan, comm: Communicator, gradients: Gradients, first_use: Sequence[int]
) -> Facts:
    """Return rank 0's facts. Every rank calls it, on the comm lane."""
    used = {slot.number for slot in gradients.slots if slot.fired}
    order, idle = order_of(first_use, used, len(gradients.slots))
    times = plan.times_for(lambda: tuple(_backward_s(gradients).items()))
    mine = Facts(tuple(order), tuple(idle), os.cpu_count() or 1, times)
    everybody = exchange_bytes(comm, msgspec.json.encode(mine))
    return msgspec.json.decode(everybody[comm.ranks.index(min(comm.ranks))], type=Facts)


def _backward_s(gradients: Gradients) -> dict[str, float]:
    """Return the seconds of backward by layer, from the first step's arrival times.

    It is not known when the first layer's backward began: that layer gets the second's time.
    """
    found: dict[str, float] = {}
    arrivals, slots = gradients.arrivals, gradients.slots
    for (_, before_s), (number, now_s) in pairwise(arrivals):
        layer = slots[number].name.rpartition(".")[0]
        found[layer] = found.get(layer, 0.0) + now_s - before_s
    if arrivals:
        first = slots[arrivals[0][0]].name.rpartition(".")[0]
        found.setdefault(first, next(iter(found.values()), 0.0))
    return found


def describe_settings(strategy: Strategy) -> list[str]:
    """Return a log line with a strategy's settings; none if it has no settings."""
    settings = msgspec.structs.asdict(strategy.settings)
    words = ", ".join(f"{name} {value}" for name, value in settings.items())
    return [f"{type(strategy).__name__.lower()}: {words}"] if words else []


class RealTiming:
    """Real time: the process's clock, events between threads, and the progress board."""

    now = staticmethod(time.perf_counter)
    event = ThreadEvent

    def __init__(self, control: Control | None, leaders_busy: BusyTime | None) -> None:
        self._leaders_busy = leaders_busy
        self.leaders_exposed_s = 0.0
        """How long compute has waited while a leader exchanged for this rank's group."""
        self.note: Callable[[str, int, int], None] = _note_nothing
        if control is not None:
            self.note = control.progress.write

    def waited_since(self, started: float) -> float:
        now = time.perf_counter()
        if self._leaders_busy is not None:
            self.leaders_exposed_s += self._leaders_busy.between_s(started, now)
        return now - started


def _note_nothing(phase: str, bucket: int, step: int) -> None:
    """Do nothing: a world of one has no progress board."""


class LaidOutModel:
    """A model's parameters in buckets: what a strategy sees of it (`contract.Model`)."""

    layout: Layout

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        slots: Sequence[Slot],
        total_steps: int | None = None,
    ) -> None:
        self.slots = slots
        self.total_steps = total_steps
        self.buckets: Sequence[Bucket] = ()
        """Empty until they are built."""
        self.reach = find_reach(optimizer)
        self._model = model
        self.optimizer = optimizer
        self._param_group_of = param_group_numbers(optimizer)

    def lay_out(
        self,
        facts: Facts,
        plan: Plan,
        share: Share,
        comm: Communicator,
        early: EarlyUpdates,
        *,
        overlap: bool,
        bucket_bytes: int,
        private: bool,
    ) -> None:
        """Put parameters and gradients into flat memory. Every rank calls it, on the comm lane."""
        self.reach = find_reach(self.optimizer)  # again: the model may have been cast since
        order = [self.slots[number].size() for number in facts.order]
        idle = [self.slots[number].size(is_used=False) for number in facts.idle]
        self.layout = lay_out(
            (*order, *idle),
            plan,
            shapes_of(plan, share),
            overlap=overlap,
            bucket_bytes=bucket_bytes,
            cores=facts.cores,
            inside_parameters=self.reach is not Reach.PARAMETER,
            backward_s=facts.backward_s,
            place=share.place,
        )
        self.buckets = make_buckets(self.layout, plan, share, comm, self.slots, RealTiming.event)
        used = [bucket for bucket in self.buckets if bucket.slots[0].number not in facts.idle]
        early.prepare(used, share.step.comm)
        for bucket in self.buckets:
            memory = bucket.parameters.memory
            for slot in bucket.slots:
                # Where the memory is common, all ranks of the machine write the same values.
                view_of(memory.mine, slot).copy_(slot.parameter.detach())
            if bucket.has_copy:
                bucket.in_use.memory.mine.copy_(memory.mine)
        comm.barrier()
        for bucket in self.buckets:
            if private and comm.size > 1 and bucket.family.updates == "strips":
                # Peers read strips of `parameters`; nobody else may read what the user changes.
                bucket.copy_for_user()
                bucket.is_private = True
            for slot in bucket.slots:
                point_to(bucket.in_use.memory.mine, slot)
            mine = (bucket.parameters.memory.mine, bucket.summed)
            bucket.optimizer = self.optimizer_of(bucket, *mine, *bucket.owned)

    def optimizer_of(
        self, bucket: Bucket, parameters: torch.Tensor, gradient: torch.Tensor, low: int, high: int
    ) -> OptimizerOnStrip:
        """Return the user's optimizer for elements `low` to `high` of memory like a bucket's."""
        memory = (parameters, gradient)
        return OptimizerOnStrip(
            self.optimizer, bucket, memory, low, high, self.reach, self._group_number
        )

    def cut(self, bucket: Bucket, owns: Sequence[bool]) -> tuple[int, ...]:
        """Cut a bucket into strips that the optimizer can update one by one."""
        inside = self.reach is not Reach.PARAMETER
        spans = spans_of(bucket)
        return cut(spans, bucket.num_elements, tuple(owns), inside_parameters=inside)

    def flat_buffers(self) -> torch.Tensor:
        """Return a flat copy of all floating-point buffers."""
        return flat_buffers(self._model)

    def describe(self, bucket_bytes: int) -> str:
        """Return a log line that says how the parameters lie in buckets."""
        total = sum(bucket.size_bytes for bucket in self.buckets)
        count = len(self.buckets)
        largest = max((bucket.size_bytes for bucket in self.buckets), default=0)
        return (
            f"{total / 1e6:.1f} MB of parameters in {count} bucket{'s' if count > 1 else ''}, "
            f"the largest {largest / 1e6:.1f} MB (bucket_bytes {bucket_bytes}); "
            f"optimizer updates {self.reach.value}"
        )

    def _group_number(self, slot: Slot) -> int:
        return self._param_group_of[id(slot.parameter)]
