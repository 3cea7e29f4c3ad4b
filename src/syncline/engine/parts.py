"""The parts of the engine for one model on one rank: made, joined, and given their buckets.

Note: when buckets are built. The order in which forward uses parameters is not known before the
first forward. So parameters stay in torch's memory for the first shard of the first step; when its
gradients are complete, all ranks build buckets in rank 0's order.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import Parameter
from torch.optim import Optimizer

from syncline.comm.base import Communicator
from syncline.comm.control import Control
from syncline.contract import Saved, Strategy
from syncline.engine.agreement import compare_models
from syncline.engine.bucket import Bucket
from syncline.engine.buffers import Buffers
from syncline.engine.build import (
    LaidOutModel,
    RealTiming,
    agree_on_facts,
    describe_settings,
    start_from_rank_0,
)
from syncline.engine.compiled import CompiledForward, compiled_in, keep_engine_out_of_graphs
from syncline.engine.compute import ComputeLane
from syncline.engine.early import EarlyUpdates, why_not_early
from syncline.engine.flags import Flags
from syncline.engine.guards import Guards
from syncline.engine.lane import Lane
from syncline.engine.layout import Wishes, choose
from syncline.engine.optimizer_state import OptimizerState
from syncline.engine.parameters import GradientTaken, Guarded, Watched, become
from syncline.engine.recording import hook_moments
from syncline.engine.refusals import find_parameters, refuse_claimed
from syncline.engine.same_batches import warn_of_same_batches
from syncline.engine.share import Share, make_plan, world_of
from syncline.engine.split_layers import (
    SplitLayers,
    describe_split,
    mark_linear_layers,
    refuse_split,
)
from syncline.engine.steps import Steps
from syncline.engine.torch_calls import forget
from syncline.engine.whole import WholeRun
from syncline.errors import UsageError
from syncline.perf.recorder import Recorder

log = logging.getLogger("syncline")

_driven: weakref.WeakSet[Strategy] = weakref.WeakSet()
"""Strategy objects in use: each keeps the state of one model."""
_attached: weakref.WeakSet[Parts] = weakref.WeakSet()
"""The parts of models that are distributed and not detached."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What `distribute` and the trainer may choose. See `syncline.distribute`."""

    shards: int | None = None
    bucket_bytes: int | None = None
    overlap: bool | None = None
    accumulate: int = 1
    private_parameters: bool = False
    early: bool = True
    total_steps: int | None = None
    """How many steps the run has; None if that is not known, as in a user's own loop."""
    check_every: int | None = None


def _held() -> set[int]:
    """Return the ids of parameters and buffers that are distributed already."""
    parameters = {id(slot.parameter) for one in _attached for slot in one.slots}
    homes = (home for one in _attached for home in one.buffers.homes)
    return parameters | {id(home.value()) for home in homes}


class Parts:
    """All objects that train one model on one rank."""

    flags: Flags
    """Made with the buckets, and so is `timing`."""
    timing: RealTiming

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        strategy: Strategy,
        comm: Communicator,
        control: Control | None,
        lane: Lane,
        options: Options,
    ) -> None:
        """Every rank calls it."""
        keep_engine_out_of_graphs()
        self.model = model
        self.optimizer = optimizer
        self.strategy = strategy
        self.comm = comm
        self.saved = Saved()
        """The checkpoint's state for the strategy; may be set until the first step."""
        self.recorder: Recorder | None = None
        self._moment_handles: list[Any] = []
        self._control = control
        self._lane = lane
        self._private = private = options.private_parameters
        found = find_parameters(model, optimizer, options.accumulate)
        refuse_claimed(found.slots, optimizer, _attached)
        self.slots = found.slots
        if strategy.settings.splits_layers:
            mark_linear_layers(model, self.slots, strategy.settings)
        sizes = [slot.size() for slot in self.slots]
        self.shards = options.shards or len(strategy.settings.workers(comm.machines))
        self.plan = plan = make_plan(strategy, world_of(comm), sizes, self.shards)
        if strategy in _driven:
            raise UsageError(
                "this strategy object drives another model already, and keeps state for it. Make "
                "one for each distribute()."
            )
        _driven.add(strategy)
        self.laid_out = LaidOutModel(model, optimizer, self.slots, options.total_steps)
        total_bytes = sum(size.size_bytes for size in sizes)
        wishes = Wishes(options.overlap, options.bucket_bytes)
        self.overlap, self.bucket_bytes = choose(total_bytes, plan, wishes)
        with comm.traffic.apart():
            self.share = share = lane.call(Share, plan, comm)
            lane.call(compare_models, model, comm)
            start_from_rank_0(model, comm, lane, _held())
        self.split = self._split(model)
        why_not = why_not_early(
            optimizer, plan, share.step.comm, overlap=self.overlap, private=private
        )
        self.early = EarlyUpdates(why_not if options.early else "early=False")
        self.buffers = Buffers(model, share.step.comm, share.step.spread, self._other_buffers)
        self.guards = Guards(
            *(model, found, optimizer, self.buffers, share.step.comm, plan),
            private=private,
            check_every=options.check_every,
        )
        self.run = WholeRun(model, share.rank, lane, control, plan)
        self.compute = ComputeLane(
            model,
            optimizer,
            strategy,
            self.slots,
            share,
            self.buffers,
            self.early,
            self.guards.outside,
            lane,
            control,
            overlap=self.overlap,
            build=self.build,
        )
        self.state = OptimizerState(self.laid_out, comm, control, lane, self.compute)
        refuse_load = (lambda: None) if self.split is None else self.split.refuse_load
        watch = (self.root, self.compute, self.run, comm.size, self._before_copy, refuse_load)
        watched = self.guards.watch(*watch)
        self.handles = [*watched, *self.state.hook()]
        """Of the hooks on the user's objects."""
        if self.split is not None:
            self.handles += self.split.hook()
            self.compute.checks.append(self.split.check_step)
            self.guards.agreement.take_loaded = self.split.take_loaded
        self.handles.append(optimizer.register_step_pre_hook(self.compute.before_step))
        for module in compiled_in(model):
            self.handles += CompiledForward(module, self.compute.synchronize).hook()
        _attached.add(self)

    def _split(self, model: nn.Module) -> SplitLayers | None:
        """Split the layers that the plan names; None if it names none."""
        split, comm = self.plan.split, self.share.activations
        if split is None or comm is None:
            return None
        refuse_split(model, self.laid_out.reach)
        self._lane.start_thread()
        return SplitLayers(model, self.slots, split, comm, self._lane)

    def _before_copy(self) -> None:
        self.compute.synchronize()
        if self.split is not None:
            self.split.check_whole()

    def with_whole_layers(self) -> AbstractContextManager[None]:
        """Give the model whole layers for a block, if some are split. Every rank calls it."""
        return nullcontext() if self.split is None else self.split.whole()

    def _other_buffers(self) -> list[Buffers]:
        """Return the buffers of other models, or of this one with another optimizer."""
        return [other.buffers for other in _attached if other is not self]

    @property
    def root(self) -> nn.Module:
        """The user's module, also if the model is its compiled form."""
        return getattr(self.model, "_orig_mod", self.model)

    @property
    def buckets(self) -> Sequence[Bucket]:
        """The buckets in their order of first use; empty before the first step."""
        return self.laid_out.buckets

    # Building.

    def build(self) -> None:
        """Lay out buckets in the order of first use and start the strategy, once.

        Every rank calls it.
        """
        with self.comm.traffic.apart():
            self._build()

    def _build(self) -> None:
        if self.recorder is not None:
            self.recorder.end_backward()
        if self.overlap or self.plan.answers_calls:
            self._lane.start_thread()
        self._lane.drain()
        may_lose = self.strategy.settings.may_lose(self.comm.size)
        if may_lose and self._control is not None and len(self._control.place.leaders) == 1:
            self._control.tolerate(may_lose)
        self._lane.call(self._lay_out)
        whole = self._lane.call(self.strategy.start, self.laid_out, self.comm, self.saved)
        has_own = self.plan.has_own
        assert (whole is not None) == has_own, "a Whole goes with a plan whose ranks differ"
        self.run.begin(whole, self.buckets)
        for bucket in self.buckets:
            bucket.step = self.compute.step_number
        for slot in self.slots:
            become(slot.parameter, GradientTaken if slot.fired else Watched)
            slot.expected = max(slot.expected, slot.fired)
        self.state.begin(self.buckets, whole)
        self.run.open()
        if not self.overlap:
            self.compute.take_off()
            for slot in self.slots:
                become(slot.parameter, Guarded)
        for line in self.describe():
            log.info("%s", line)

    def _lay_out(self) -> None:
        """Make the buckets and the `Steps` that drives them. Runs on the comm lane."""
        compute, share = self.compute, self.share
        if not self.plan.keeps_own:
            self.guards.agreement.compare_first(self.comm, share.families[0].comm)
        warn_of_same_batches(self.slots, self.comm, is_told=compute.gradients.is_told)
        self.buffers.lay_out(share.step.comm, share.step.spread)
        first_use = compute.waiting.first_use.order
        facts = agree_on_facts(self.plan, self.comm, compute.gradients, first_use)
        self.laid_out.lay_out(
            facts,
            self.plan,
            share,
            self.comm,
            self.early,
            overlap=self.overlap,
            bucket_bytes=self.bucket_bytes,
            private=self._private,
        )
        self.flags = compute.make_flags()
        self.timing = RealTiming(self._control, share.step.comm.leaders_busy)
        steps = Steps(
            self.strategy,
            share.step.comm,
            self._lane,
            self.timing,
            self.laid_out.layout,
            self.buckets,
            self.flags,
            self.buffers,
            self.early,
            frozenset(facts.idle),
            self.guards.agreement,
        )
        steps.recorder = self.recorder
        compute.begin(steps, self.buckets)

    def describe(self) -> list[str]:
        """Return log lines that say what was chosen."""
        how = "overlapped on the comm lane" if self.overlap else "inline in optimizer.step()"
        lines = [
            f"{self.comm.size} rank{'s' if self.comm.size > 1 else ''}, {self.shards} shards, "
            f"{self.comm.name}; exchange {how}",
            self.laid_out.describe(self.bucket_bytes),
        ]
        lines += describe_settings(self.strategy)
        if self.plan.split is not None:
            lines.append(describe_split(self.plan.split))
        if self.share.step.comm.num_machines > 1:
            lines.append(self.early.describe())
        return lines

    # Recording.

    def record(self, recorder: Recorder | None) -> None:
        """Record this rank's tasks from now on; with None no more. Every rank calls it."""
        self._lane.drain()  # so that all ranks begin to count exchanges at the same one
        for handle in self._moment_handles:
            handle.remove()
        self._moment_handles = []
        self.recorder = self.comm.traffic.recorder = recorder
        compute = self.compute
        compute.gradients.recorder = compute.waiting.recorder = recorder
        if self.split is not None:
            self.split.activations.recorder = recorder
        if compute.steps is not None:
            compute.steps.recorder = recorder
        if recorder is not None:
            self._moment_handles = hook_moments(
                self.model, recorder, lambda: self.overlap and bool(self.buckets)
            )

    # The end.

    def detach(self) -> None:
        """Take every hook off the user's objects; give them parameters and state of their own.

        Every rank calls it, with parameters that are up to date.
        """
        if self.split is not None:
            self.split.check_step()
        forget(self.compute)
        with self.comm.traffic.apart():
            self.state.give_back()
            if self.split is not None:
                self.split.make_whole()
        _attached.discard(self)
        self.guards.release()
        if self.recorder is not None:
            self.record(None)
        self.state.close()
        for handle in self.handles:
            handle.remove()
        self.compute.take_off()
        for slot in self.slots:
            become(slot.parameter, Parameter)
            slot.parameter.data = slot.parameter.detach().clone(memory_format=torch.preserve_format)
