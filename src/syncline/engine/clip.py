"""Clipping by the global norm or by value, equal for any number of ranks.

The norm is summed over fixed blocks of each parameter, in float64: a rank adds up the blocks of
its own strips, an all-reduce gives all blocks to all ranks, and each sums them in registration
order. For each block all ranks but one contribute zero, so the all-reduce is exact and the result
does not depend on which rank owns which block. The last digits may differ from torch's clipping.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from syncline.comm.base import Communicator, small_sum
from syncline.engine.bucket import Bucket, Slot, must_end_lending, pieces_of
from syncline.engine.layout import BLOCK_ELEMENTS

_TORCH_EPSILON = 1e-6
"""The number that torch's `clip_grad_norm_` adds to the norm before it divides."""


class Norm:
    """The norm of all gradients, once every bucket has been reduced. `comm` is the step group's."""

    def __init__(
        self, slots: Sequence[Slot], buckets: Sequence[Bucket], comm: Communicator
    ) -> None:
        firsts = [0, *accumulate(slot.num_blocks for slot in slots)]
        self._comm = comm
        self._ends_lending = must_end_lending(comm, buckets)
        self._squares = small_sum(comm, firsts[-1], torch.float64)
        self._counted: list[tuple[torch.Tensor, int]] = []
        """The gradient pieces this rank counts, each with the number of its first block."""
        self._scaled: list[torch.Tensor] = []
        """The gradients that this rank's optimizer reads: all, if every rank updates everything."""
        for bucket in buckets:
            gradient, position = bucket.summed, bucket.comm.position
            for piece in pieces_of(bucket, *bucket.gradient.cuts[position : position + 2]):
                at = firsts[piece.slot.number] + piece.first_block
                self._counted.append((gradient[piece.start : piece.stop], at))
            pieces = pieces_of(bucket, *bucket.owned)
            self._scaled += [gradient[piece.start : piece.stop] for piece in pieces]

    def clip(self, max_norm: float) -> torch.Tensor:
        """Scale this rank's gradients; return the norm before scaling. A collective."""
        with self._comm.traffic.task("clip", after="reduce"):
            return self._clip(max_norm)

    def _clip(self, max_norm: float) -> torch.Tensor:
        squares = self._squares.sums[0].mine
        # The last all_reduce lent this memory; later gathers have ended the lending.
        squares.zero_()
        for values, at in self._counted:
            sums = block_squares(values)
            squares[at : at + sums.numel()] = sums
        self._comm.all_reduce(self._squares)
        if self._ends_lending:
            self._comm.end_lending()
        norm = self._squares.result.sum().sqrt().to(torch.float32)
        scale = float(max_norm / (norm + _TORCH_EPSILON))
        if scale < 1.0:
            for values in self._scaled:
                values.mul_(scale)
        return norm


def clip_values(buckets: Sequence[Bucket], value: float) -> None:
    """Clamp each element of the summed gradients that this rank's optimizer reads."""
    for bucket in buckets:
        low, high = bucket.owned
        bucket.summed[low:high].clamp_(-value, value)


def block_squares(values: torch.Tensor) -> torch.Tensor:
    """Return the sum of squares of each block of a piece, in float64, the same for any cut."""
    parts = torch.view_as_real(values).view(-1) if values.is_complex() else values
    block = BLOCK_ELEMENTS * (2 if values.is_complex() else 1)
    whole = parts.numel() // block * block
    sums = []
    if whole:
        sums.append(_squares(parts[:whole].view(-1, block)).sum(dim=1))
    if whole < parts.numel():
        sums.append(_squares(parts[whole:]).sum().view(1))
    return torch.cat(sums)


def _squares(values: torch.Tensor) -> torch.Tensor:
    """Return the squares in float64, always in new memory: float64 gradients stay as they are."""
    return values.to(torch.float64, copy=True).square_()
