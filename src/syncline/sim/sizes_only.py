"""What a rank sends besides gradients, in a simulation of sizes without arithmetic."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from syncline.comm.base import Communicator, Partials, allocate_sums, small_sum
from syncline.engine.bucket import Slot
from syncline.engine.buffers import sum_type
from syncline.engine.clip import num_blocks
from syncline.engine.share import Part


class SizesOnly:
    """The sizes of norm layers' statistics and of a norm's squares, as `StepBuffers`."""

    def __init__(self, step: Part, slots: Sequence[Slot], num_statistics: int, clips: bool) -> None:
        """`step` is the rank's part in the step group's sums."""
        self._comm = step.comm
        self.statistics: Partials | None = None
        if num_statistics:
            size = (num_statistics, sum_type(torch.float32, step.spread.shards))
            self.statistics = allocate_sums(step.comm, *size, step.spread, 1.0)
        self._squares: Partials | None = None
        if clips:
            blocks = sum(num_blocks(slot) for slot in slots)
            self._squares = small_sum(step.comm, blocks, torch.float64)

    def clip(self) -> None:
        """Exchange as many bytes as clipping does. Runs on the comm lane."""
        assert self._squares is not None
        self._comm.all_reduce(self._squares)

    def end_step(self, comm: Communicator, others_changed: bool) -> Iterable[None]:
        return ()

    def load_counts(self, told: Sequence[float]) -> None:
        pass
