"""`Replica`, which `distribute` returns: a model on one rank, and the parts of the engine for it.

The compute lane is the user's thread. Autograd's hooks put gradients into the buckets' flat memory
(`gradients.py`) and give complete buckets to the comm lane, last layers first. `optimizer.step()`
gives it the updates, first layers first, and returns (`steps.py`). Forward waits only for a bucket
that it is about to read (`waiting.py`).

Note: when buckets are built. The order in which forward uses parameters is not known before the
first forward. So parameters stay in torch's memory for the first shard of the first step; when its
gradients are complete, all ranks build buckets in rank 0's order.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Iterator, Sequence
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
from syncline.engine.compute import ComputeLane
from syncline.engine.early import EarlyUpdates, why_not_early
from syncline.engine.guards import Guards
from syncline.engine.lane import Lane
from syncline.engine.layout import Layout, Wishes, choose
from syncline.engine.optimizer_state import OptimizerState
from syncline.engine.parameters import GradientTaken, Guarded, become
from syncline.engine.recording import hook_moments
from syncline.engine.refusals import find_parameters, refuse_claimed, refuse_detached
from syncline.engine.share import Share, make_plan, world_of
from syncline.engine.state import State
from syncline.engine.steps import Steps
from syncline.engine.torch_calls import forget
from syncline.engine.whole import WholeRun, load_values
from syncline.errors import UsageError
from syncline.perf.trace import Recorder

log = logging.getLogger("syncline")

_driven: weakref.WeakSet[Strategy] = weakref.WeakSet()
"""Strategy objects in use: each keeps the state of one model."""
_replicas: weakref.WeakSet[Replica] = weakref.WeakSet()
"""Replicas that are not detached."""


class Replica:
    """A model and its optimizer, spread over ranks by a strategy. Made by `distribute`."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        strategy: Strategy,
        comm: Communicator,
        control: Control | None,
        lane: Lane,
        *,
        shards: int | None = None,
        bucket_bytes: int | None = None,
        overlap: bool | None = None,
        accumulate: int = 1,
        private_parameters: bool = False,
        early: bool = True,
        total_steps: int | None = None,
        check_every: int | None = None,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.strategy = strategy
        self.comm = comm
        self.saved = Saved()
        """The checkpoint's state for the strategy; may be set until the first step."""
        self._control = control
        self._lane = lane
        self._private = private_parameters
        self._recorder: Recorder | None = None
        self._moment_handles: list[Any] = []
        self.is_detached = False
        found = find_parameters(model, optimizer, accumulate)
        refuse_claimed(found.slots, optimizer, _replicas)
        self.slots = found.slots
        sizes = [slot.size() for slot in self.slots]
        self.shards = shards or strategy.settings.num_workers(comm.size)
        self.plan = plan = make_plan(strategy, world_of(comm), sizes, self.shards)
        if strategy in _driven:
            raise UsageError(
                "this strategy object drives another model already, and keeps state for it. Make "
                "one for each distribute()."
            )
        _driven.add(strategy)
        self._laid_out = LaidOutModel(model, optimizer, self.slots, total_steps)
        total_bytes = sum(size.size_bytes for size in sizes)
        self.overlap, self.bucket_bytes = choose(total_bytes, plan, Wishes(overlap, bucket_bytes))
        with comm.traffic.apart():
            self._share = share = lane.call(Share, plan, comm)
            lane.call(compare_models, model, comm)
            start_from_rank_0(model, comm, lane)
        self.my_shards = share.mine
        why_not = why_not_early(
            optimizer, plan, share.step.comm, overlap=self.overlap, private=private_parameters
        )
        self._early = EarlyUpdates(why_not if early else "early=False")
        self.buffers = Buffers(model, share.step.comm, share.step.spread)
        self._guards = Guards(
            *(model, found, optimizer, self.buffers, share.step.comm, plan),
            private=private_parameters,
            check_every=check_every,
        )
        self.run = WholeRun(model, share.rank, lane, control, strategy.settings)
        """Gathers the parameters that represent the run; keeps a rank while others need it."""
        self._compute = self.loop = ComputeLane(
            model,
            optimizer,
            strategy,
            self.slots,
            share,
            self.buffers,
            self._early,
            self._guards.outside,
            lane,
            control,
            overlap=self.overlap,
            build=self._build_once,
        )
        """Also `loop`: what a user's loop asks for, such as clipping."""
        self.tell_alike = self._compute.alike.tell
        self.state = OptimizerState(self._laid_out, comm, control, lane, self._compute)
        watched = self._guards.watch(self._root, self._compute, self.run, comm.size)
        self._handles = [*watched, *self.state.hook()]
        self._handles.append(optimizer.register_step_pre_hook(self._compute.before_step))
        _replicas.add(self)

    # Set-up.

    @property
    def _root(self) -> nn.Module:
        """The user's module, also if the model is its compiled form."""
        return getattr(self.model, "_orig_mod", self.model)

    def _build_once(self) -> None:
        with self.comm.traffic.apart():
            self._build()

    def _build(self) -> None:
        """Lay out buckets in the order of first use and start the strategy. Every rank calls it."""
        if self._recorder is not None:
            self._recorder.drop_open_task()
        if self.overlap or self.plan.answers_calls:
            self._lane.start_thread()
        self._lane.drain()
        may_lose = self.strategy.settings.may_lose(self.comm.size)
        if may_lose and self._control is not None and len(self._control.place.leaders) == 1:
            self._control.tolerate(may_lose)
        self._lane.call(self._lay_out)
        whole = self._lane.call(self.strategy.start, self._laid_out, self.comm, self.saved)
        assert (whole is not None) == self.has_own, "a Whole goes with a plan whose ranks differ"
        self.run.begin(whole, self.buckets)
        for bucket in self.buckets:
            bucket.step = self.step_number
        for slot in self.slots:
            become(slot.parameter, GradientTaken if slot.fired else Parameter)
            slot.expected = max(slot.expected, slot.fired)
        self.state.begin(self.buckets, whole)
        self.run.open()
        if not self.overlap:
            self._compute.take_off()
            for slot in self.slots:
                become(slot.parameter, Guarded)
        for line in self.describe():
            log.info("%s", line)

    def _lay_out(self) -> None:
        """Make the buckets and the `Steps` that drives them. Runs on the comm lane."""
        compute, share = self._compute, self._share
        if not self.plan.keeps_own:
            self._guards.agreement.compare_first(self.comm)
        self.buffers.lay_out(share.step.comm, share.step.spread)
        first_use = compute.waiting.first_use.order
        facts = agree_on_facts(self.plan, self.comm, compute.gradients, first_use)
        self._laid_out.lay_out(
            facts,
            self.plan,
            share,
            self.comm,
            self._early,
            overlap=self.overlap,
            bucket_bytes=self.bucket_bytes,
            private=self._private,
        )
        self._flags = compute.make_flags()
        steps = Steps(
            self.strategy,
            share.step.comm,
            self._lane,
            RealTiming(self._control),
            self.layout,
            self.buckets,
            self._flags,
            self.buffers,
            self._early,
            frozenset(facts.idle),
            self._guards.agreement,
        )
        steps.recorder = self._recorder
        compute.begin(steps, self.buckets)

    @property
    def buckets(self) -> Sequence[Bucket]:
        """The buckets in their order of first use; empty before the first step."""
        return self._laid_out.buckets

    @property
    def layout(self) -> Layout:
        """How the parameters lie in buckets. Known after the first backward."""
        return self._laid_out.layout

    def describe(self) -> list[str]:
        """Return log lines that say what was chosen."""
        how = "overlapped on the comm lane" if self.overlap else "inline in optimizer.step()"
        lines = [
            f"{self.comm.size} rank{'s' if self.comm.size > 1 else ''}, {self.shards} shards, "
            f"{self.comm.name}; exchange {how}",
            self._laid_out.describe(self.bucket_bytes),
        ]
        lines += describe_settings(self.strategy)
        if self._share.step.comm.num_machines > 1:
            lines.append(self._early.describe())
        return lines

    @property
    def recorder(self) -> Recorder | None:
        """The recorder of this rank's tasks. Set it to begin recording, to None to stop.

        The compute lane's tasks are recorded from the next forward on, and only if the exchange is
        overlapped: inline there are no hooks that tell one bucket from the next.
        """
        return self._recorder

    @recorder.setter
    def recorder(self, recorder: Recorder | None) -> None:
        for handle in self._moment_handles:
            handle.remove()
        self._moment_handles = []
        self._recorder = recorder
        self._compute.gradients.recorder = self._compute.waiting.recorder = recorder
        if self._compute.steps is not None:
            self._compute.steps.recorder = recorder
        if recorder is not None and self.overlap:
            self._moment_handles = hook_moments(self.model, recorder)

    @property
    def waited_s(self) -> float:
        """Time the compute lane has spent waiting for the comm lane: exposed communication."""
        return 0.0 if self._compute.steps is None else self._compute.steps.waited_s

    @waited_s.setter
    def waited_s(self, seconds: float) -> None:
        if self._compute.steps is not None:
            self._compute.steps.waited_s = seconds

    # Shards.

    def begin_shard(self, shard: int, *, is_flat: bool = False) -> None:
        """Say which shard the next batch belongs to; `is_flat`: `step()` comes after each batch."""
        if self.is_detached:
            raise refuse_detached()
        if len(self.my_shards) > 1:
            self._guards.outside.begin_shard(is_first=shard == self.my_shards[0])
        self._compute.gradients.begin_shard(shard, self._share.rank, is_flat=is_flat)

    def tell_loss(self, loss: float) -> None:
        """Send this shard's loss with the step's flags: `losses` then has those of all shards."""
        self._compute.gradients.tell_loss(loss)

    @property
    def losses(self) -> list[float]:
        """The losses told in the last step, by shard. Known when the next forward has begun."""
        return self._flags.losses

    # Steps.

    @property
    def step_number(self) -> int:
        """How many steps this rank has taken."""
        return self._compute.step_number

    @step_number.setter
    def step_number(self, number: int) -> None:
        assert self._compute.steps is None, "the buckets count steps by now"
        self._compute.step_number = number

    def synchronize(self) -> None:
        """Wait until every parameter and buffer is up to date."""
        self._compute.synchronize()

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale the step's gradients so that their global norm is at most `max_norm`; return it.

        The norm is summed over fixed blocks: it is equal for any number of ranks.
        """
        return self._compute.clip_grad_norm_(max_norm)

    def discard_gradients(self) -> None:
        """Drop this step's gradients. Call it on every rank, or on none."""
        self._compute.discard_gradients()

    # Loading and saving.

    def load_own(self, values: dict[str, torch.Tensor]) -> None:
        """Load this rank's own parameters and buffers, before the first step."""
        load_values(self.model, values)
        self.buffers.begin_step()
        self._guards.outside.note()

    def load_optimizer_state(self, state: State) -> None:
        """Load the whole state, by parameter name; each rank keeps its strips. No collective."""
        self.state.load(state)

    def optimizer_state(self, *, is_wanted: bool = True) -> State:
        """Return the whole optimizer state by parameter name. Every rank calls it.

        It may be empty on a rank that does not want it.
        """
        self.synchronize()
        with self.comm.traffic.apart():
            return self.state.gather(is_wanted=is_wanted)

    # The parameters that represent the run.

    @property
    def has_own(self) -> bool:
        """Whether ranks hold different parameters: a rank's own do not represent the run."""
        return self.plan.keeps_own or self.plan.answers_calls

    @contextlib.contextmanager
    def whole(self, *, is_wanted: bool = True) -> Iterator[None]:
        """Put the parameters that represent the run into the model for the block.

        They are this rank's own, unless ranks hold different ones. Every rank calls it at the same
        step; ranks that do not want the values still help others to get them.
        """
        self.synchronize()
        if self.run.whole is None:
            with self.comm.traffic.apart():
                yield
            return
        gradients = self._compute.gradients
        if gradients.num_closed or any(slot.is_taken for slot in self.slots):
            raise UsageError(
                "whole() came between backward() and step(), when gradients are on their way. "
                "Call it after step()."
            )
        with self.comm.traffic.apart(), self.run.in_model(is_wanted=is_wanted):
            if self.my_shards:
                self.run.tell_who_left()
            yield

    def warn_of_own(self) -> None:
        """Warn, once, when a script saves this rank's own parameters instead of the run's."""
        if self.has_own and self.comm.size > 1:
            self._handles.append(self.run.warn_of_own(self._root))

    # Serving.

    @property
    def is_served(self) -> bool:
        """Whether ranks that compute nothing take part in every step of the others."""
        return self._share.is_served

    def serve(self) -> None:
        """Begin to serve the other ranks, on a rank that has no shards."""
        if self._compute.steps is None:
            with torch.no_grad():
                self._build_once()

    def serve_step(self, clip_norm: float | None = None) -> None:
        """Take part in a step of the other ranks, if they need this rank in every step.

        `clip_norm` is given if the others clip their gradients in this step.
        """
        self.serve()
        if self.is_served:
            self._compute.serve_step(clip_norm)

    def serve_to_the_end(self) -> None:
        """Serve until every rank that computes has left."""
        self.serve()
        self.run.serve()
        self.run.check_workers()

    def detach(self) -> None:
        """Give model and optimizer back to plain training, each rank with the whole state.

        Every rank calls it. Afterwards the model may be cast, changed and distributed again.
        """
        self.synchronize()
        forget(self._compute)
        with self.comm.traffic.apart():
            self.state.give_back()
        _replicas.discard(self)
        self.is_detached = True
        self._guards.release()
        self.recorder = None
        self.state.close()
        for handle in self._handles:
            handle.remove()
        self._compute.take_off()
        for slot in self.slots:
            become(slot.parameter, Parameter)
            slot.parameter.data = slot.parameter.detach().clone(memory_format=torch.preserve_format)
