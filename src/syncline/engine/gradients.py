"""Moves gradients from autograd into the buckets' flat memory, shard by shard.

Note: when a gradient is complete. Autograd may deliver more than one gradient for a parameter in
a shard: several backward passes, reentrant checkpointing. The first step shows how many; later
steps take a gradient, and send its bucket, when that many have come, or at `step()`. A gradient
that comes after its bucket was sent is refused, never dropped (decision 2).

Note: flat loops. A rank with several shards a step gets a batch for each. `begin_shard` begins the
next one; so does a `step()` before the last, which only ends its shard (decision 18). Shards that
get no gradient before another is begun are passed: a loop may run through all shards for another
model, or without a gradient, and come back to the first.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.nn import Parameter

from syncline.engine.bucket import Bucket, Slot, add_gradient
from syncline.engine.buffers import Buffers, Kept
from syncline.engine.late_gradients import take_late
from syncline.engine.memory import open_shard
from syncline.engine.parameters import (
    BetweenShards,
    GradientTaken,
    Guarded,
    InFlight,
    UsedUp,
    Watched,
    become,
    raw_grad,
    take_grad,
    waiting_grad,
)
from syncline.engine.refusals import (
    check_gradient,
    check_shard_order,
    refuse_gradient_after_clipping,
    refuse_mixed_loop,
    refuse_other_gradient,
    refuse_second_step,
)
from syncline.engine.share import Share
from syncline.engine.spent import Spent
from syncline.perf.recorder import Recorder


class Gradients:
    """The compute lane's half of backward on one rank."""

    def __init__(
        self,
        slots: Sequence[Slot],
        share: Share,
        buffers: Buffers,
        *,
        build: Callable[[], None],
        wait: Callable[[Bucket], None],
        complete: Callable[[], None],
    ) -> None:
        """`build` lays out buckets, once, when the first shard's gradients are complete; `wait`
        waits until a bucket may be written; `complete` sends the complete buckets."""
        self.slots, self.mine = slots, share.mine
        self._order, self._step_leaves = share.step.shards, share.step.leaves
        self._buffers = buffers
        self._build, self._wait, self._complete = build, wait, complete
        self.buckets: Sequence[Bucket] = ()
        """Empty until they are built."""
        self.recorder: Recorder | None = None
        self.sends_in_backward = self.is_sent = False
        """Whether all of this step's buckets are on their way."""
        self._untold = [math.nan if shard in self.mine else 0.0 for shard in self._order]
        self.losses = self._untold.copy()
        """The losses given to `tell_loss`, by shard of the step group; 0 on other ranks."""
        self.arrivals: list[tuple[int, float]] = []
        """Until buckets are built: the parameters whose gradient came, in order, and when."""
        self.shard = self.mine[0] if self.mine else 0
        self.is_closed = False
        """Whether all gradients of the current shard were taken."""
        self.had_gradient: Sequence[bool] = ()
        """Which parameters had a gradient in the last step; empty once they were zeroed."""
        self.spent = Spent(slot.parameter for slot in slots)
        self.num_closed = 0
        """How many of this rank's shards of the current step are done."""
        self._is_flat = False
        """Whether a `step()` ended a shard of this step."""
        self.is_told = False
        """Whether the loop says which shard a batch belongs to."""
        self.is_between = False
        """Whether a `step()` ended a shard, not the step, and the next batch has not come."""
        self._kept: dict[int, Kept] = {}
        """The buffers after shards that were begun and got no gradient, by shard."""

    def begin(self, buckets: Sequence[Bucket], *, sends_in_backward: bool) -> None:
        """Take gradients into buckets from now on; send them during backward, or at `step()`."""
        self.buckets, self.sends_in_backward = buckets, sends_in_backward

    def hook(self) -> Iterator[Any]:
        """Hook every parameter, to take gradients when they come; yield the handles."""
        for slot in self.slots:
            yield slot.parameter.register_post_accumulate_grad_hook(self._make_hook(slot.number))

    def _make_hook(self, number: int) -> Callable[[torch.Tensor], None]:
        mine = weakref.ref(self)  # Python cannot collect a cycle through what torch holds

        def gradient_arrived(parameter: torch.Tensor) -> None:
            if (self := mine()) is None:
                return
            slot = self.slots[number]
            if self.spent.is_on:
                self.spent.has_late = True  # zero_grad() will drop it
                return
            if self.is_sent:
                raise refuse_gradient_after_clipping()
            if slot.is_taken:
                raise refuse_other_gradient(slot.name, slot.fired + 1)
            if self._kept and self.buckets:
                self._close_passed()
            slot.fired += 1
            check_gradient(slot, raw_grad(parameter))
            is_whole = slot.fired >= slot.expected
            if not self.buckets:
                self.arrivals.append((number, time.perf_counter()))
            elif is_whole:
                self._take(slot, take_grad(parameter))
            become(slot.parameter, GradientTaken)
            if is_whole and self.sends_in_backward and self.shard == self.mine[-1]:
                self._complete()

        return gradient_arrived

    def _take(self, slot: Slot, gradient: torch.Tensor | None) -> None:
        """Move a gradient into flat memory and add it to the rank's partial sums."""
        bucket = slot.bucket
        assert bucket is not None
        if bucket.is_in_flight:
            # No forward has read this bucket since the last step, so nothing has waited for its
            # update, which may still be reading the gradient.
            self._wait(bucket)
        add_gradient(slot, bucket.leaf, gradient, bucket.scale)
        slot.is_taken = True
        bucket.untaken -= 1
        if self.recorder is not None and self.sends_in_backward and not bucket.untaken:
            self.recorder.leave(bucket.index, bucket.step)

    # Shards.

    def begin_shard(self, shard: int, rank: int, *, is_flat: bool = False) -> None:
        """Begin a shard: the next forward and backward belong to it.

        `is_flat` says that the loop is over batches, and calls `step()` after each.
        """
        self.is_told = True
        if self.is_between:
            self._end_pause()
        if shard == self.shard and shard in self.mine and not self.is_closed:
            if shard == self.mine[0] and len(self.mine) > 1:
                self._keep_start()
            return
        with torch.no_grad():
            if shard in self.mine and not self.has_gradient():
                self._pass_to(shard)
                return
            check_shard_order(shard, self.mine, self.shard, rank)
            if is_flat or self._is_flat:
                raise refuse_mixed_loop(shard - self.mine[0], len(self.mine))
            self.close_shard()
            self._open_next(shard)

    def has_gradient(self) -> bool:
        """Say whether any shard of this step has a gradient, or was ended by `step()`.

        Gradients that came after the last step do not count: `zero_grad()` will drop them.
        """
        if self.num_closed or self.is_sent:
            return True
        came = (slot.fired or waiting_grad(slot.parameter) is not None for slot in self.slots)
        return not self.spent.is_on and any(came)

    def wait_for_buffers(self) -> None:
        """Wait until the last step has set the buffers: before its first bucket is ready."""
        if self.buckets and self.buckets[0].is_in_flight:
            self._wait(self.buckets[0])

    def _pass_to(self, shard: int) -> None:
        """Go to a shard of a step that has no gradient yet, forwards or backwards."""
        self.wait_for_buffers()
        self._kept[self.shard] = self._buffers.keep()
        self.shard = shard
        self._restore_buffers(shard)
        open_shard(self.buckets, shard)

    def end_later_pass(self) -> None:
        """Drop what forward wrote into buffers in a pass over the shards after the step's own.

        Each shard has written other values, and no step averages them.
        """
        if self.has_gradient():
            return
        self.wait_for_buffers()
        self._kept = {}
        self.shard = self.mine[0]
        with torch.no_grad():
            self._buffers.begin_shard()
        open_shard(self.buckets, self.shard)

    def _restore_buffers(self, shard: int) -> None:
        kept = self._kept.pop(shard, None)
        if kept is None:
            self._buffers.begin_shard()
        else:
            self._buffers.load(kept)

    def _close_passed(self) -> None:
        """Close the shards before the current one, which got no gradient."""
        for shard in sorted(shard for shard in self._kept if shard < self.shard):
            for bucket in self.buckets:
                if bucket.is_in_flight:
                    self._wait(bucket)
                for slot in bucket.slots:
                    add_gradient(slot, bucket.part.leaves[shard], None, bucket.scale)
            self._end_buffers(shard, self._kept.pop(shard))
            self.num_closed += 1

    def _end_buffers(self, shard: int, kept: Kept | None = None) -> None:
        self._buffers.end_shard(self._order.index(shard), self._step_leaves[shard], kept)

    def _keep_start(self) -> None:
        """Let every shard of the step start from buffers that the user has changed since the last.

        Only the first shard would do so by itself.
        """
        self.wait_for_buffers()
        if self._buffers.has_changed and not any(slot.fired for slot in self.slots):
            with torch.no_grad():
                self._buffers.begin_step()

    def close_shard(self) -> None:
        """Take this shard's gradients that are still in `.grad`."""
        if self.is_closed:
            return
        if not self.buckets:
            self._build()
        if self._kept:
            self._close_passed()
        late = [slot for slot in self.slots if not slot.is_taken]
        if late:
            take_late(late, self._take)
        for slot in self.slots:
            if slot.fired:
                slot.has_gradient = True
                if slot.fired > slot.expected:
                    slot.expected = slot.fired
        if self.shard != self.mine[-1]:
            self._end_buffers(self.shard)
        self.num_closed += 1
        self.is_closed = True  # last, so that the next step() refuses a bad gradient again

    def end_last_buffers(self) -> None:
        """Take the last shard's buffers: at `step()`, since forward may run after clipping."""
        self._end_buffers(self.mine[-1])
        self._buffers.leave()

    def end_shard_by_step(self) -> None:
        """Close the current shard, which is not the step's last, and begin the next."""
        if self.is_between and self.is_told:
            raise refuse_second_step()
        if self.num_closed and not self._is_flat:
            raise refuse_mixed_loop(self.num_closed, len(self.mine))
        if any(shard < self.shard for shard in self._kept):
            raise refuse_mixed_loop(self.shard - self.mine[0], len(self.mine))
        self.close_shard()
        self._is_flat = True
        if any(slot.fired for slot in self.slots):
            self.spent.begin()
        self._open_next(self.mine[self.mine.index(self.shard) + 1])
        self.is_between = True
        for slot in self.slots:
            become(slot.parameter, BetweenShards if self.is_told else self._idle_class(slot))

    def _end_pause(self) -> None:
        """Let forward read parameters again: the next batch of the step has come."""
        self.is_between = False
        for slot in self.slots:
            if type(slot.parameter) is BetweenShards:
                become(slot.parameter, self._idle_class(slot))

    def _idle_class(self, slot: Slot) -> type[Parameter]:
        """Return the class of a parameter whose gradient of this shard has not come."""
        if slot.bucket is not None and slot.bucket.is_in_flight:
            return InFlight
        if self.buckets and not self.sends_in_backward:
            return Guarded
        return UsedUp if self.spent.is_on else Watched

    def _open_next(self, shard: int) -> None:
        self.open_shard(shard)
        self._restore_buffers(shard)

    def open_shard(self, shard: int) -> None:
        """Expect the gradients of a shard."""
        self.shard = shard
        self.is_closed = False
        for slot in self.slots:
            slot.fired = 0
            slot.is_taken = False
        open_shard(self.buckets, shard)

    def end(self) -> None:
        """Note that all gradients of this step were taken: `.grad` has no part in it any more."""
        self.is_sent = True
        for slot in () if self.sends_in_backward else self.slots:
            become(slot.parameter, GradientTaken)

    def begin_step(self) -> None:
        """Expect the gradients of the next step."""
        for slot in self.slots if self.is_sent and not self.sends_in_backward else ():
            become(slot.parameter, Guarded)
        self.is_sent = self.is_between = self._is_flat = False
        self.num_closed = 0
        self.losses = self._untold.copy()
        if self.spent.zeros:
            self.spent.zeros.clear()
        if self._kept:
            self._kept = {}
        if self.mine:
            self.open_shard(self.mine[0])
        for slot in self.slots:
            slot.has_gradient = False
        if True in self.had_gradient:  # else plain PyTorch's `.grad` is None
            self.spent.begin()

    def tell_loss(self, loss: float) -> None:
        """Send the current shard's loss with the step's flags."""
        self.losses[self._order.index(self.shard)] = loss
