"""Updates taken early: while backward still computes, before `step()` has asked for them.

Where backward leaves gaps on the wire, new parameters of the last layers could fill them, but they
wait for `step()`. So the update is made as soon as a bucket's gradient is summed, with the settings
that the optimizer has then, into memory that nobody reads yet; forward and backward go on with
`bucket.in_use`. In nearly every loop `step()` then finds nothing changed, and all that is left is a
copy. If anything did change on any rank (clipped gradients, another learning rate, a parameter
without gradient), all ranks learn it from the step's flags, undo, and update once more.

Whether there are gaps is measured in every step, and the ranks decide by their mean. Only the later
half of the buckets is worth it: their gathers are the last to be needed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from syncline.bucket import Bucket
from syncline.comm.base import Communicator, Strips
from syncline.update import leaves_gradients, snapshot

log = logging.getLogger("syncline")

LEAST_GAP = 0.1

Hyper = list[dict[str, Any]]


def why_not_early(
    optimizer: Optimizer, comm: Communicator, *, overlap: bool, private: bool
) -> str | None:
    """Find out whether early updates pay and can be undone; if not, say why."""
    settings = [value for group in snapshot(optimizer) for value in group.values()]
    if comm.num_machines == 1:
        return "there is no wire to fill"
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

    def __init__(self, why_not: str | None) -> None:
        self.why_not = why_not
        """None as long as updates are taken early."""
        self.spoilt_by: str | None = None
        """What has changed on this rank since this step's updates were taken."""
        self._hyper: Hyper | None = None
        self._is_wanted = False
        self._began_s: float | None = None
        self._reduce_s_per_byte: float | None = None

    def prepare(self, buckets: Sequence[Bucket], comm: Communicator) -> None:
        """Give the later half of the buckets memory of their own to read from."""
        if self.why_not is None:
            for bucket in buckets[len(buckets) // 2 :]:
                memory = comm.allocate(bucket.num_elements, bucket.dtype)
                bucket.in_use = Strips(memory, bucket.parameters.cuts)

    def takes(self, bucket: Bucket) -> bool:
        return self._is_wanted and self.why_not is None and bucket.in_use is not None

    def begin_reduces(self) -> None:
        """Note, on the compute lane, when this step's first gradient is ready."""
        if self._began_s is None:
            self._began_s = time.perf_counter()

    def note_reduce(self, size_bytes: int, took_s: float) -> None:
        """Take note of how fast the wire is when it has nothing else to do."""
        per_byte = took_s / size_bytes
        if self._reduce_s_per_byte is None or per_byte < self._reduce_s_per_byte:
            self._reduce_s_per_byte = per_byte

    def gap(self, size_bytes: int) -> float:
        """Return which part of backward's time the wire has nothing to reduce, on entering step."""
        if self._began_s is None or self._reduce_s_per_byte is None:
            return 0.0
        backward_s = time.perf_counter() - self._began_s
        return max(0.0, 1.0 - self._reduce_s_per_byte * size_bytes / backward_s)

    def decide(self, gap: float) -> None:
        """Take the next step's updates early, or not: every rank calls it with the same number."""
        self._is_wanted = gap > LEAST_GAP

    def hyper(self, optimizer: Optimizer) -> Hyper:
        """Return the settings for this step's early updates: those of the first of them."""
        if self._hyper is None:
            self._hyper = snapshot(optimizer)
        return self._hyper

    def check(self, hyper: Hyper) -> None:
        """Compare with the settings on entering `step()`."""
        if self._hyper is not None and self._hyper != hyper:
            self.spoil("the optimizer's settings changed between backward and step()")

    def spoil(self, reason: str) -> None:
        """Say, on the compute lane, that this step's early updates do not hold."""
        if self.why_not is None:
            self.spoilt_by = self.spoilt_by or reason

    def begin_step(self) -> None:
        self.spoilt_by = self._hyper = self._began_s = self._reduce_s_per_byte = None

    def stop(self, reason: str) -> None:
        """Take no more updates early: what spoilt one step is likely to spoil the next."""
        if self.why_not is None:
            self.why_not = reason
            log.info("updates are no longer taken early: %s", reason)

    def undo(self, bucket: Bucket, position: int) -> None:
        """Put a bucket's parameters and optimizer state back to before its early update."""
        if bucket.is_early:
            assert bucket.in_use is not None
            bucket.update.undo()
            bucket.parameters.mine(position).copy_(bucket.in_use.mine(position))
            bucket.is_early = False
