"""Blocks: what each rank of a group sends to each other one in an `all_to_all`. Pure functions.

Every call looks up what depends on its blocks, so a `Blocks` keeps its hash.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import torch

Tensors = Sequence[torch.Tensor]
"""A tensor for each position."""


@dataclass(frozen=True)
class Blocks:
    """What each position sends to each other one: gives[i] * takes[j] bytes from i to j.

    >>> Blocks(gives=(8, 0, 4), takes=(1, 2, 3)).sent_by(0)  # 8 * 2 to one, 8 * 3 to the other
    40
    """

    gives: tuple[int, ...]
    takes: tuple[int, ...]
    label: int = field(default=0, repr=False)
    """Tells exchanges of the same sizes apart: ranks that bring different ones all raise."""

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.gives, self.takes, self.label))

    @cached_property
    def all_takes(self) -> int:
        return sum(self.takes)

    @cached_property
    def checksum(self) -> int:
        """A number that tells these blocks from others, the same on all ranks."""
        return zlib.crc32(repr((self.gives, self.takes, self.label)).encode())

    def sent_by(self, position: int) -> int:
        """Return how many bytes a position sends to the others."""
        return self.gives[position] * (self.all_takes - self.takes[position])

    @cached_property
    def num_bytes(self) -> int:
        """How many bytes all positions together send to others."""
        return sum(map(self.sent_by, range(len(self.gives))))


@lru_cache(maxsize=256)
def blocks_among(blocks: Blocks, positions: tuple[int, ...]) -> Blocks:
    """Return what some positions send to each other, in the order given.

    >>> blocks_among(Blocks((8, 0, 4), (1, 2, 3)), (2, 0))
    Blocks(gives=(4, 8), takes=(3, 1))
    """
    gives, takes = blocks.gives, blocks.takes
    return Blocks(
        tuple(gives[at] for at in positions), tuple(takes[at] for at in positions), blocks.label
    )


def is_one_tensor(sends: Tensors, position: int) -> bool:
    """Say whether a rank sends the same tensor object to all others."""
    first = a_peer_s(sends, position)
    return all([one is first for at, one in enumerate(sends) if at != position])


def a_peer_s(tensors: Tensors, position: int) -> torch.Tensor:
    """Return the tensor of any other position; all have one dtype."""
    return tensors[position - 1]


def check_blocks(
    sends: Tensors, receives: Tensors, blocks: Blocks, position: int, size: int
) -> None:
    """Refuse tensors that are not of the blocks' sizes, not contiguous or of several dtypes."""
    gives, takes = blocks.gives, blocks.takes
    lengths = len(sends), len(receives), len(gives), len(takes)
    assert lengths == (size,) * 4, f"tensors or blocks for {lengths} positions, not for {size}"
    dtype = a_peer_s(sends, position).dtype
    for at, (send, receive) in enumerate(zip(sends, receives, strict=True)):
        if at == position:
            continue
        for tensor, num_bytes in (
            (send, gives[position] * takes[at]),
            (receive, gives[at] * takes[position]),
        ):
            assert tensor.is_contiguous(), f"position {at}: {tuple(tensor.shape)} with gaps"
            assert tensor.dtype == dtype, f"position {at}: {tensor.dtype}, others {dtype}"
            assert tensor.numel() * tensor.itemsize == num_bytes, (
                f"position {at}: {tensor.numel() * tensor.itemsize} bytes, not {num_bytes}"
            )
