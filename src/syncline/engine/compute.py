"""The compute lane's half of a step: the user's thread, from backward to the next forward.

Gradients are taken from autograd (`gradients.py`), complete buckets are given to the comm lane
(`steps.py`), and uses of parameters wait for them (`waiting.py`). This module calls these in order:
in `optimizer.step()`, in clipping and in dropping gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from syncline.comm.control import Control
from syncline.contract import ParamGroups, Strategy
from syncline.engine.bucket import Bucket, Slot
from syncline.engine.buffers import Buffers
from syncline.engine.buffers_in_flight import BuffersInFlight
from syncline.engine.changes import ChangesOutside
from syncline.engine.clip import Norm, clip_values
from syncline.engine.early import EarlyUpdates
from syncline.engine.flags import Alike, Flags, encode
from syncline.engine.gradients import Gradients
from syncline.engine.lane import Lane
from syncline.engine.memory import open_shard
from syncline.engine.optimizer import idle_copy, snapshot
from syncline.engine.optimizer_trial import counter_of
from syncline.engine.parameters import Guarded, Watched, become, put_grad, raw_grad
from syncline.engine.refusals import (
    refuse_gradient_after_clipping,
    refuse_incomplete_step,
    refuse_schedule_before_step,
    refuse_steps_of_server,
)
from syncline.engine.share import Share
from syncline.engine.steps import Steps
from syncline.engine.told_settings import SettingsOfShards, told_to_servers
from syncline.engine.waiting import Waiting
from syncline.engine.zeroing import Zeroing

T = TypeVar("T")


class ComputeLane:
    """One rank's compute lane."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        strategy: Strategy,
        slots: Sequence[Slot],
        share: Share,
        buffers: Buffers,
        early: EarlyUpdates,
        outside: ChangesOutside,
        lane: Lane,
        control: Control | None,
        *,
        overlap: bool,
        build: Callable[[], None],
    ) -> None:
        """`build` lays out the buckets when the first shard's gradients are complete."""
        self.step_number = 0
        self.checks: list[Callable[[], None]] = []
        """Called before every step; each raises if the step must be refused."""
        self.before_flags: Callable[[int], None] | None = None
        """Called with the step's number when its gradients are complete."""
        self.alike = Alike(share.step.comm.size)
        """What the ranks must have done alike when the next step comes."""
        self._optimizer, self._strategy = optimizer, strategy
        self._idle_optimizer, self._count = idle_copy(optimizer), counter_of(optimizer)
        self._of_shards = SettingsOfShards()
        self._slots, self._share = slots, share
        self._last_shard = share.mine[-1] if share.mine else 0
        self._buffers = buffers
        self._early, self._outside = early, outside
        self._lane, self._control = lane, control
        self.overlap = overlap
        self._steps: Steps | None = None
        self._norm: Norm | None = None
        self._last_norm = torch.tensor(float("nan"))
        self._no_grad = torch.no_grad()  # made once: making it costs more than entering it
        self.gradients = Gradients(
            slots, share, buffers, build=build, wait=self._wait, complete=self.send_ready
        )
        self._handles = list(self.gradients.hook())
        self.spent = self.gradients.spent
        self._zeroing = Zeroing(self.gradients, self._discard_on_all_ranks)
        in_flight = BuffersInFlight(buffers, lane)
        self.waiting = Waiting(model, slots, early, self.spent, in_flight)
        lane.wake_on_failure(self._wake)

    @property
    def steps(self) -> Steps | None:
        """The comm lane's half; None before the first step."""
        return self._steps

    @property
    def _built(self) -> Steps:
        assert self._steps is not None
        return self._steps

    def begin(self, steps: Steps, buckets: Sequence[Bucket]) -> None:
        """Begin to take steps, once the buckets are built."""
        self._steps, self._buckets = steps, buckets
        if self._share.mine:
            open_shard(buckets, self.gradients.shard)
        self.gradients.begin(buckets, sends_in_backward=self.overlap)
        self.waiting.begin(steps, buckets)

    def make_flags(self) -> Flags:
        """Return newly allocated flags. Every rank calls it."""
        step, num_told = self._share.step, len(self._told_to_servers(snapshot(self._optimizer)))
        return Flags(step.comm, len(self._slots), len(step.shards), num_told)

    def take_off(self) -> None:
        """Remove the hooks from parameters and modules.

        Without overlap they are not needed: parameters are up to date when `step()` returns, and
        `step()` takes the gradients.
        """
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.waiting.take_off()

    # Step.

    def before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Run the step in place of the optimizer's own, which then has nothing to do."""
        closure = kwargs.get("closure") or (args[1] if len(args) > 1 else None)
        instead: dict[str, Any] = {}
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            instead["closure"] = lambda: loss
        self._lane.check()
        if self.spent.is_on:
            self.spent.refuse_step()
        gradients = self.gradients
        for check in self.checks:
            check()
        self._outside.check(ends_step=gradients.shard == self._last_shard)
        if gradients.is_sent and any(raw_grad(slot.parameter) is not None for slot in self._slots):
            raise refuse_gradient_after_clipping()
        if gradients.shard != self._last_shard:
            self._of_shards.compare(snapshot(self._optimizer))
            with self._no_grad:
                gradients.end_shard_by_step()
            self._outside.raise_versions(ends_step=False)
            return (self._idle_optimizer,), instead
        with self._no_grad:
            settings = snapshot(self._optimizer)
            if self._of_shards.first:
                self._of_shards.compare(settings)
            if self.overlap:
                self._finish_backward()
                self._early.check(settings)
                gradients.end_last_buffers()
                self._built.enter(self.step_number, self._new_flags(settings), settings)
                self.waiting.leave()
            else:
                self._close_backward()
                gradients.end_last_buffers()
                flags = self._new_flags(settings)
                self._built.exchange_inline(self.step_number, flags, settings)
                if self._outside.has_changed:
                    self.waiting.give_back_loaded()
            self._count(settings)
            self._begin_next_step()
        self._outside.raise_versions()
        return (self._idle_optimizer,), instead

    def has_entered(self, number: int) -> bool:
        """Say, on any thread, whether this rank has entered a step, or is in its `step()`."""
        gradients, mine = self.gradients, self._share.mine
        is_closed = bool(mine) and gradients.is_closed and gradients.shard == mine[-1]
        return self.step_number > number or (self.step_number == number and is_closed)

    def _close_backward(self) -> None:
        """Close the last shard; refuse to end a step before all of this rank's shards are done."""
        mine, shard = self._share.mine, self.gradients.shard
        if not mine:
            raise refuse_steps_of_server(self._share.rank)
        if shard != mine[-1]:
            raise refuse_incomplete_step(self._share.plan, shard - mine[0] + 1, len(mine))
        self.gradients.close_shard()

    def _finish_backward(self) -> None:
        """Close the last shard and send every bucket that is not on its way yet."""
        if self.gradients.is_sent:
            return
        self._close_backward()
        self.send_ready()
        self.gradients.end()

    def send_ready(self) -> None:
        """Give the comm lane the buckets that are complete."""
        self._built.send_ready(lambda: self._early.settings(self._optimizer))

    def _new_flags(self, settings: ParamGroups) -> list[float]:
        if self.before_flags is not None:
            self.before_flags(self.step_number)
        has_gradient = [slot.has_gradient for slot in self._slots]
        self.gradients.had_gradient = has_gradient
        return encode(
            has_gradient,
            has_changed_buffers=self._buffers.has_changed_others,
            is_early_invalid=self._early.invalid_because is not None,
            has_changed_parameters=self._outside.has_changed,
            step_s=self._early.step_s(),
            losses=self.gradients.losses,
            alike=self.alike.take(None if self._share.is_served else settings),
            settings=self._told_to_servers(settings) if self._share.is_served else (),
        )

    def _told_to_servers(self, settings: ParamGroups) -> list[float]:
        return told_to_servers(self._share, settings, self._buffers.counts())

    def _begin_next_step(self) -> None:
        self.step_number += 1
        self._of_shards.first = []
        if self._control is not None:
            self._control.progress.step = self.step_number
        self._early.begin_step()
        self.gradients.begin_step()

    def serve_step(self, clip_norm: float | None) -> None:
        """Take part in a step of the other ranks, on a rank that computes nothing."""
        with self._no_grad:
            settings = snapshot(self._optimizer)
            for bucket in self._buckets:
                bucket.untaken = 0
            if self.overlap or clip_norm is not None:
                self.send_ready()
            if clip_norm is not None:
                self._lane.call(self._clip, clip_norm)
            flags = self._new_flags(settings)
            if self.overlap:
                self._built.enter(self.step_number, flags, settings)
                self.waiting.synchronize()
            else:
                self._built.exchange_inline(self.step_number, flags, settings)
            self._begin_next_step()
        self._outside.raise_versions()

    # What a loop asks between steps.

    @property
    def step_ended(self) -> bool:
        """Whether the last `optimizer.step()` ended a step, not only a shard of it."""
        return not 0 < self.gradients.num_closed < len(self._share.mine)

    def may_advance_schedule(self) -> bool:
        """Say whether a scheduler may go on: not in the middle of a step."""
        if self.gradients.is_between:
            return False
        if self.gradients.is_told and not self.step_ended:
            raise refuse_schedule_before_step()
        return True

    def zero_grad(self, *, set_to_none: bool) -> None:
        """Drop the gradients that have come since the last `step()`."""
        self._zeroing.zero_grad(set_to_none=set_to_none)

    # Waiting.

    def _wait(self, bucket: Bucket) -> None:
        self.waiting.wait(bucket)

    def _wake(self) -> None:
        if self._steps is not None:
            self._steps.wake()

    def synchronize(self) -> None:
        """Wait until every parameter and buffer is up to date."""
        self._lane.check()
        self.waiting.synchronize()

    def settle(self, reason: str) -> None:
        """Wait for the last step, and undo early updates of the next; `reason` is logged."""
        self.synchronize()
        if self._early.why_not is None and self._steps is not None and self._steps.has_sent:
            self._lane.drain()
            self._early.invalidate(reason)
            for bucket in self._buckets:
                self._early.undo(bucket)

    # Clipping and dropping.

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale the step's gradients so that their global norm is at most `max_norm`.

        Before the last shard it does nothing, and returns the last step's norm.
        """
        if self.gradients.shard == self._last_shard:
            self._last_norm = self._on_summed(self._clip, max_norm)
        return self._last_norm

    def clip_grad_value_(self, value: float) -> None:
        """Clamp each element of the step's summed gradients; before the last shard do nothing."""
        if self.gradients.shard == self._last_shard:
            self._on_summed(lambda: clip_values(self._buckets, value))

    def _on_summed(self, change: Callable[..., T], *args: Any) -> T:
        """Change the summed gradients on the comm lane, once all of them have come."""
        if self.spent.is_on:
            self.spent.refuse_step()
        with torch.no_grad():
            self._finish_backward()
        self._early.invalidate("gradients are clipped")
        started = self._built.end_backward()
        found = self._lane.call(change, *args)
        self._built.end_clip(started)
        return found

    def _clip(self, max_norm: float) -> torch.Tensor:
        if self._norm is None:
            self._norm = Norm(self._slots, self._buckets, self._share.step.comm)
        return self._norm.clip(max_norm)

    def discard_gradients(self) -> None:
        """Drop this step's gradients, and what its forward passes wrote into buffers.

        Every rank calls it.
        """
        self._discard_on_all_ranks()
        self._buffers.begin_shard()  # as on all ranks: no shard of this step counts

    def _discard_on_all_ranks(self) -> None:
        with torch.no_grad():
            self._finish_backward()
        # Peers may still be adding up what this rank sent; they drop the sum as well.
        self._lane.drain()
        self.settle("gradients were dropped")
        for bucket in self._buckets:
            self._lane.call(self._strategy.discard, bucket)
        self._built.discard()
        self.step_number -= 1
        self._begin_next_step()
        self.gradients.had_gradient = ()
        self.spent.end()
        for slot in self._slots:
            put_grad(slot.parameter, None)  # inline it may have come after clipping
            become(slot.parameter, Watched if self.overlap else Guarded)
