"""Early updates: made during backward, before `optimizer.step()` is called.

During backward the network is sometimes idle. It could then gather new parameters of the last
layers, but these normally wait for `step()`. So a bucket is updated as soon as its gradient is
summed, with the optimizer's settings at that moment, into memory that forward and backward do not
read: they read `bucket.in_use`. In nearly every loop nothing has changed when `step()` comes, and
only a copy is left to do. If anything did change on any rank (clipped gradients, another learning
rate, a parameter without gradient), all ranks learn it from the step's flags, undo the early
updates, and update again.

Whether this saves time depends on compute, network and processors, so there is a trial: some steps
late, some early, twice; the ranks choose by the total time of all ranks. Only the later half of the
buckets is updated early: forward needs these last, so their gathers may take long.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch.optim import Optimizer

from syncline.comm.base import Communicator, Strips
from syncline.comm.hub import NUM_CHANNELS
from syncline.contract import ParamGroups, Plan
from syncline.engine.bucket import Bucket
from syncline.engine.optimizer import snapshot
from syncline.engine.optimizer_trial import leaves_gradients

log = logging.getLogger("syncline")

BLOCK_STEPS = 4
"""Steps in a block. The first still waits for gathers of the last block, and is not timed."""
NUM_BLOCKS = 4
"""Late and early twice, so that a slow moment of the machine does not decide."""
LEAST_GAIN = 0.99
"""Early updates cost memory: keep them only if a step takes less than this share of its time."""


def why_not_early(
    optimizer: Optimizer, plan: Plan, comm: Communicator, *, overlap: bool, private: bool
) -> str | None:
    """Return why early updates cannot save time or cannot be undone; None if they can.

    `comm` is the step group's.
    """
    settings = [value for group in snapshot(optimizer) for value in group.values()]
    if comm.num_machines == 1:
        return "all ranks are on one machine"
    if any(family.updates == "each" for family in plan.families):
        return "every rank updates all parameters, so there is nothing to gather"
    if len(plan.families) > 1:
        return "not all parameters are gathered among the same ranks"
    if not overlap:
        return "the exchange is not overlapped"
    if comm.size > comm.num_machines:
        return "ranks of a machine share one copy of the parameters"
    if comm.num_channels == 1:
        return f"messages on {comm.name} cannot overtake each other"
    if private:
        return "private parameters may be changed outside the optimizer"
    if any(isinstance(value, torch.Tensor) for value in settings):
        return "the optimizer's settings are tensors, which may change in place"
    if not leaves_gradients(optimizer):
        return "the optimizer changes gradients"
    return None


class EarlyUpdates:
    """Which buckets are updated early, and whether this step's early updates are valid."""

    def __init__(self, why_not: str | None, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self.why_not = why_not
        """Why updates are not taken early; None while they are, or may be."""
        self.invalid_because: str | None = None
        """What has changed on this rank since this step's early updates; None if nothing."""
        self._settings: ParamGroups | None = None
        self._is_wanted = False
        self._num_tried = 0
        self._times_s: dict[bool, list[float]] = {False: [], True: []}
        self._entered_s = 0.0

    def describe(self) -> str:
        """Return a line that says whether updates are taken early."""
        if self.why_not is not None:
            return f"updates are not taken early: {self.why_not}"
        return "half of the updates are taken early if a trial shows that this saves time"

    def prepare(self, buckets: Sequence[Bucket], comm: Communicator) -> None:
        """Give the later half of the buckets separate memory for forward to read."""
        if self.why_not is None:
            for bucket in buckets[len(buckets) // 2 :]:
                memory = comm.allocate(bucket.num_elements, bucket.dtype)
                bucket.in_use = Strips(memory, bucket.parameters.cuts)
                bucket.has_copy = True
                # A channel of its own: this gather may take long and must not delay other buckets.
                bucket.gather_channel = NUM_CHANNELS + bucket.index

    def takes(self, bucket: Bucket) -> bool:
        return self._is_wanted and self.why_not is None and bucket.has_copy

    def step_s(self) -> float:
        """Return the time since the last call, on entering `step()`."""
        before, self._entered_s = self._entered_s, self._now()
        return self._entered_s - before

    def decide(self, step_s: float) -> None:
        """Note how long a step took, summed over ranks; choose whether the next is taken early.

        Every rank calls it with the same number, so all choose the same.
        """
        if self.why_not is not None or self._num_tried == NUM_BLOCKS * BLOCK_STEPS:
            return
        if self._num_tried % BLOCK_STEPS:  # the first still waits for the last block's gathers
            self._times_s[self._is_wanted].append(step_s)
        self._num_tried += 1
        block = self._num_tried // BLOCK_STEPS
        if block < NUM_BLOCKS:
            self._is_wanted = block % 2 == 1
            return
        late, early = (statistics.median(self._times_s[choice]) for choice in (False, True))
        self._is_wanted = early < LEAST_GAIN * late
        found = f"a step takes {early / late:.3f} times as long as without"
        if self._is_wanted:
            log.info("updates are taken early: %s", found)
        else:
            self.stop(found)

    def settings(self, optimizer: Optimizer) -> ParamGroups:
        """Return the settings for this step's early updates: those at the first of them."""
        if self._settings is None:
            self._settings = snapshot(optimizer)
        return self._settings

    def check(self, settings: ParamGroups) -> None:
        """Compare with the settings on entering `step()`."""
        if self._settings is not None and self._settings != settings:
            self.invalidate("the optimizer's settings changed between backward and step()")

    def invalidate(self, reason: str) -> None:
        """Mark this step's early updates as invalid, on the compute lane."""
        if self.why_not is None:
            self.invalid_because = self.invalid_because or reason

    def begin_step(self) -> None:
        self.invalid_because = self._settings = None

    def stop(self, reason: str) -> None:
        """Take no more updates early: the next step is likely to be invalid for the same reason.

        From here on the compute lane gives copies back, when it next waits for a bucket.
        """
        if self.why_not is None:
            self.why_not = reason
            log.info("updates are no longer taken early: %s", reason)

    def undo(self, bucket: Bucket) -> None:
        """Restore a bucket's parameters and optimizer state from before its early update."""
        if bucket.is_early:
            assert bucket.has_copy
            position = bucket.comm.position
            bucket.optimizer.undo()
            bucket.parameters.mine(position).copy_(bucket.in_use.mine(position))
            bucket.is_early = False
