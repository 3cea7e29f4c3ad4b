"""Updates taken early: while backward still computes, before `step()` has asked for them.

Where backward leaves gaps on the wire, new parameters of the last layers could fill them, but they
wait for `step()`. So the update is made as soon as a bucket's gradient is summed, with the settings
that the optimizer has then, into memory that nobody reads yet; forward and backward go on with
`bucket.in_use`. In nearly every loop `step()` then finds nothing changed, and all that is left is a
copy. If anything did change on any rank (clipped gradients, another learning rate, a parameter
without gradient), all ranks learn it from the step's flags, undo, and update once more.

Whether it pays depends on compute, wire and processors, so it is tried: some steps late, some
early, twice, and the ranks choose by the time that all of them took. Only the later half of the
buckets is worth it: their gathers are the last to be needed.
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
from syncline.engine.bucket import Bucket, view_of
from syncline.engine.optimizer import leaves_gradients, snapshot

log = logging.getLogger("syncline")

BLOCK_STEPS = 4
"""Steps in a block. The first still waits for gathers of the block before, and is not timed."""
NUM_BLOCKS = 4
"""Late and early twice, so that a slow moment of the machine does not decide."""
LEAST_GAIN = 0.99
"""Early updates are kept if a step takes at most this share of its time: they cost memory."""


def why_not_early(
    optimizer: Optimizer, plan: Plan, comm: Communicator, *, overlap: bool, private: bool
) -> str | None:
    """Find out whether early updates pay and can be undone; if not, say why.

    `comm` is the step group's.
    """
    settings = [value for group in snapshot(optimizer) for value in group.values()]
    if comm.num_machines == 1:
        return "there is no wire to fill"
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
    """Which buckets are updated early, and whether this step's early updates hold."""

    def __init__(self, why_not: str | None, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self.why_not = why_not
        """None as long as updates are, or may be, taken early."""
        self.spoilt_by: str | None = None
        """What has changed on this rank since this step's updates were taken."""
        self._settings: ParamGroups | None = None
        self._is_wanted = False
        self._num_tried = 0
        self._times_s: dict[bool, list[float]] = {False: [], True: []}
        self._entered_s = 0.0

    def describe(self) -> str:
        """Say whether updates are taken early, for people."""
        if self.why_not is not None:
            return f"updates are not taken early: {self.why_not}"
        return "half of the updates are taken early if that turns out to pay"

    def prepare(self, buckets: Sequence[Bucket], comm: Communicator) -> None:
        """Give the later half of the buckets memory of their own to read from."""
        if self.why_not is None:
            for bucket in buckets[len(buckets) // 2 :]:
                memory = comm.allocate(bucket.num_elements, bucket.dtype)
                bucket.in_use = Strips(memory, bucket.parameters.cuts)
                bucket.has_copy = True
                # A gather that may take long holds up no other bucket's hooks.
                bucket.gather_channel = NUM_CHANNELS + bucket.index

    def takes(self, bucket: Bucket) -> bool:
        return self._is_wanted and self.why_not is None and bucket.has_copy

    def give_back(self, bucket: Bucket) -> None:
        """Let forward and backward read a bucket's exchanged memory again, as if never early."""
        bucket.in_use = bucket.parameters
        bucket.has_copy = False
        for slot in bucket.slots:
            slot.parameter.data = view_of(bucket.parameters.memory.mine, slot)

    def step_s(self) -> float:
        """Return the time since the last call, on entering `step()`."""
        before, self._entered_s = self._entered_s, self._now()
        return self._entered_s - before

    def decide(self, step_s: float) -> None:
        """Learn how long a step took, all ranks together; choose how to take the next.

        Every rank calls it with the same number, so all choose alike.
        """
        if self.why_not is not None or self._num_tried == NUM_BLOCKS * BLOCK_STEPS:
            return
        if self._num_tried % BLOCK_STEPS:  # the first of a block still has the last one's gathers
            self._times_s[self._is_wanted].append(step_s)
        self._num_tried += 1
        block = self._num_tried // BLOCK_STEPS
        if block < NUM_BLOCKS:
            self._is_wanted = block % 2 == 1
            return
        late, early = (statistics.median(self._times_s[choice]) for choice in (False, True))
        self._is_wanted = early < LEAST_GAIN * late
        found = f"a step takes {early / late:.3f} of its time then"
        if self._is_wanted:
            log.info("updates are taken early: %s", found)
        else:
            self.stop(found)

    def settings(self, optimizer: Optimizer) -> ParamGroups:
        """Return the settings for this step's early updates: those of the first of them."""
        if self._settings is None:
            self._settings = snapshot(optimizer)
        return self._settings

    def check(self, settings: ParamGroups) -> None:
        """Compare with the settings on entering `step()`."""
        if self._settings is not None and self._settings != settings:
            self.spoil("the optimizer's settings changed between backward and step()")

    def spoil(self, reason: str) -> None:
        """Say, on the compute lane, that this step's early updates do not hold."""
        if self.why_not is None:
            self.spoilt_by = self.spoilt_by or reason

    def begin_step(self) -> None:
        self.spoilt_by = self._settings = None

    def stop(self, reason: str) -> None:
        """Take no more updates early: what spoilt one step is likely to spoil the next.

        From here on `give_back` may run on the compute lane, when it next waits for a bucket.
        """
        if self.why_not is None:
            self.why_not = reason
            log.info("updates are no longer taken early: %s", reason)

    def undo(self, bucket: Bucket) -> None:
        """Put a bucket's parameters and optimizer state back to before its early update."""
        if bucket.is_early:
            assert bucket.has_copy
            position = bucket.comm.position
            bucket.optimizer.undo()
            bucket.parameters.mine(position).copy_(bucket.in_use.mine(position))
            bucket.is_early = False
