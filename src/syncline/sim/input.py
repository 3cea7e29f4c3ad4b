"""Input in virtual time: loaded in line, or ahead of use by a thread or by workers.

As in a real run (`syncline/input.py`): when a rank takes a batch, as many more are asked for as may
be ahead of use; workers are asked in turn, and each loads one batch at a time.
"""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True)
class Loading:
    """How each rank loads its batches; a prefetch of 0 is in line."""

    input_s: float = 0.0
    """Seconds to load one shard's batch."""
    workers: int = 0
    prefetch: int = 0

    def step_alone_s(self, shards: int, compute_s: float, update_s: float, steps: int) -> float:
        """Return the mean time of a step of one rank that loads and computes all shards alone.

        Counted from the end of the first step, as samples a second are.
        """
        if not self.input_s:
            return shards * compute_s + update_s
        batches, now_s, ends_s = VirtualInput(self), 0.0, []
        for _ in range(steps):
            for _ in range(shards):
                now_s += batches.take(now_s) + compute_s
            now_s += update_s
            ends_s.append(now_s)
        return (ends_s[-1] - ends_s[0]) / (steps - 1) if steps > 1 else now_s


class VirtualInput:
    """The batches of one rank, in the order of use."""

    def __init__(self, loading: Loading) -> None:
        self._loading = loading
        loaders = max(1, loading.workers)
        self._free_s = [0.0] * loaders
        """When each worker has loaded what it was asked for."""
        self._next_loader = itertools.cycle(range(loaders))
        self._ready_s: deque[float] = deque()
        """When each batch is loaded that was asked for and not taken."""

    def take(self, now_s: float) -> float:
        """Take the next batch; return how many seconds the rank waits for it."""
        while len(self._ready_s) <= self._loading.prefetch:
            loader = next(self._next_loader)
            self._free_s[loader] = max(now_s, self._free_s[loader]) + self._loading.input_s
            self._ready_s.append(self._free_s[loader])
        return max(0.0, self._ready_s.popleft() - now_s)
