"""Clipping by the global norm, equal for any number of ranks.

The norm is summed over fixed blocks of each parameter, in float64: a rank adds up the blocks of
its own strips, everybody learns all blocks, and the total is taken in registration order. Where
all ranks but one hold zero, a sum is exact, so who owns which block leaves no trace. The last
digits may differ from those of torch's own clipping.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from syncline.comm.base import Communicator, small_sum
from syncline.engine.bucket import BLOCK_ELEMENTS, Bucket, Slot, pieces_of


class Norm:
    """The norm of all gradients of a replica, once every bucket has been reduced."""

    def __init__(
        self, slots: Sequence[Slot], buckets: Sequence[Bucket], comm: Communicator
    ) -> None:
        counts = [-(-slot.num_elements // BLOCK_ELEMENTS) for slot in slots]
        firsts = [0, *accumulate(counts)]
        self._comm = comm
        self._squares = small_sum(comm, firsts[-1], torch.float64)
        self._mine: list[tuple[torch.Tensor, int]] = []
        """What this rank owns: a piece of gradient and the number of its first block."""
        for bucket in buckets:
            gradient = bucket.gradient.slots[0].mine
            low, high = bucket.gradient.cuts[comm.position : comm.position + 2]
            for piece in pieces_of(bucket, low, high):
                at = firsts[piece.slot.number] + piece.first_block
                self._mine.append((gradient[piece.start : piece.stop], at))

    def clip(self, max_norm: float) -> torch.Tensor:
        """Scale this rank's strips to the norm; return the norm before. A collective."""
        squares = self._squares.slots[0].mine
        # The last all_reduce lent this memory; the gathers after it have returned since.
        squares.zero_()
        for values, at in self._mine:
            sums = block_squares(values)
            squares[at : at + sums.numel()] = sums
        self._comm.all_reduce(self._squares)
        norm = self._squares.result.sum().sqrt().to(torch.float32)
        scale = float(max_norm / (norm + 1e-6))
        if scale < 1.0:
            for values, _ in self._mine:
                values.mul_(scale)
        return norm


def block_squares(values: torch.Tensor) -> torch.Tensor:
    """Sum the squares of each block of a piece, in float64, block by block the same for any cut."""
    whole = values.numel() // BLOCK_ELEMENTS * BLOCK_ELEMENTS
    sums = []
    if whole:
        sums.append(values[:whole].view(-1, BLOCK_ELEMENTS).double().square_().sum(dim=1))
    if whole < values.numel():
        sums.append(values[whole:].double().square_().sum().view(1))
    return torch.cat(sums)
