"""Moves gradients from autograd into the buckets' flat memory, shard by shard.

Note: when a gradient is complete. Autograd may deliver more than one gradient for a parameter in
a shard: several backward passes, reentrant checkpointing. The first step shows how many; later
steps take a gradient, and send its bucket, when that many have come, or at `step()`. A gradient
that comes after its bucket was sent is refused, never dropped (decision 2).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from syncline.engine.bucket import Bucket, Slot, add_gradient
from syncline.engine.buffers import Buffers
from syncline.engine.memory import open_shard
from syncline.engine.parameters import GradientTaken, become, put_grad, raw_grad, take_grad
from syncline.engine.refusals import check_gradient, check_shard_order, refuse_other_gradient
from syncline.engine.share import Share
from syncline.errors import UsageError
from syncline.perf.trace import Recorder


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
        self.slots = slots
        self.mine = share.mine
        self._order = share.step.shards
        self._step_leaves = share.step.leaves
        self._buffers = buffers
        self._build = build
        self._wait = wait
        self._complete = complete
        self.buckets: Sequence[Bucket] = ()
        """Empty until they are built."""
        self.sends_in_backward = False
        self.recorder: Recorder | None = None
        self.is_sent = False
        """Whether all of this step's buckets are on their way."""
        self.losses = [0.0] * len(self._order)
        """The losses given to `tell_loss`, by shard of the step group."""
        self.arrivals: list[tuple[int, float]] = []
        """Until buckets are built: the parameters whose gradient came, in order, and when."""
        self.shard = self.mine[0] if self.mine else 0
        self.is_closed = False
        """Whether all gradients of the current shard were taken."""

    def begin(self, buckets: Sequence[Bucket], *, sends_in_backward: bool) -> None:
        """Take gradients into buckets from now on; send them during backward, or at `step()`."""
        self.buckets, self.sends_in_backward = buckets, sends_in_backward

    def hook(self) -> Iterator[Any]:
        """Hook every parameter, to take gradients when they come; yield the handles."""
        for slot in self.slots:
            yield slot.parameter.register_post_accumulate_grad_hook(self._make_hook(slot))

    def _make_hook(self, slot: Slot) -> Callable[[torch.Tensor], None]:
        def gradient_arrived(parameter: torch.Tensor) -> None:
            if slot.is_taken or self.is_sent:
                raise refuse_other_gradient(slot.name, slot.fired + 1)
            slot.fired += 1
            gradient = raw_grad(parameter)
            assert gradient is not None
            check_gradient(slot, gradient)
            if slot.fired >= slot.expected and self.buckets:
                self._take(slot, take_grad(parameter))
                become(slot.parameter, GradientTaken)
                if self.sends_in_backward and self.shard == self.mine[-1]:
                    self._complete()
            else:
                if not self.buckets:
                    self.arrivals.append((slot.number, time.perf_counter()))
                become(slot.parameter, GradientTaken)

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
        if self.recorder is not None and not bucket.untaken:
            self.recorder.leave(bucket.index, bucket.step)

    def begin_shard(self, shard: int, rank: int) -> None:
        """Begin a shard: the next forward and backward belong to it."""
        if shard == self.shard and shard in self.mine and not self.is_closed:
            if shard == self.mine[0] and len(self.mine) > 1:
                self._keep_start()
            return
        check_shard_order(shard, self.mine, self.shard, rank)
        with torch.no_grad():
            self.close_shard()
            self.open_shard(shard)
            self._buffers.begin_shard()

    def _keep_start(self) -> None:
        """Let every shard of the step start from buffers that the user has changed since the last.

        Only the first shard would do so by itself.
        """
        if self.buckets and self.buckets[0].is_in_flight:
            self._wait(self.buckets[0])  # then the last step has set the buffers
        if self._buffers.has_changed and not any(slot.fired for slot in self.slots):
            with torch.no_grad():
                self._buffers.begin_step()

    def close_shard(self) -> None:
        """Take this shard's gradients that are still in `.grad`."""
        if self.is_closed:
            return
        if not self.buckets:
            self._build()
        for slot in self.slots:
            if not slot.is_taken:
                gradient = take_grad(slot.parameter)
                if gradient is not None and not slot.fired:
                    try:
                        check_gradient(slot, gradient)
                    except UsageError:
                        put_grad(slot.parameter, gradient)  # so that the next step() refuses it too
                        raise
                    slot.fired = 1
                self._take(slot, gradient)
            if slot.fired:
                slot.has_gradient = True
                if slot.fired > slot.expected:
                    slot.expected = slot.fired
        self._buffers.end_shard(self._order.index(self.shard), self._step_leaves[self.shard])
        self.is_closed = True  # last, so that the next step() refuses a bad gradient again

    def open_shard(self, shard: int) -> None:
        """Expect the gradients of a shard."""
        self.shard = shard
        self.is_closed = False
        for slot in self.slots:
            slot.fired = 0
            slot.is_taken = False
        open_shard(self.buckets, shard)

    def begin_step(self) -> None:
        """Expect the gradients of the next step."""
        self.is_sent = False
        if self.mine:
            self.open_shard(self.mine[0])
        for slot in self.slots:
            slot.has_gradient = False

    def tell_loss(self, loss: float) -> None:
        """Send the current shard's loss with the step's flags."""
        self.losses[self._order.index(self.shard)] = loss

    def backward_s(self) -> dict[str, float]:
        """Return the seconds of backward by layer, from the first step's arrival times.

        It is not known when the first layer's backward began: that layer gets the second's time.
        """
        found: dict[str, float] = {}
        for (_, before_s), (number, now_s) in zip(self.arrivals, self.arrivals[1:], strict=False):
            layer = self.slots[number].name.rpartition(".")[0]
            found[layer] = found.get(layer, 0.0) + now_s - before_s
        if self.arrivals:
            first = self.slots[self.arrivals[0][0]].name.rpartition(".")[0]
            found.setdefault(first, next(iter(found.values()), 0.0))
        return found
