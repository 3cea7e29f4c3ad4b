"""Sizes of parameters, and the rules that say where buckets end. Pure values and functions."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec


class Size(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One trained parameter: what plans and layouts need to know of it."""

    name: str
    number: int
    """Its place in registration order."""
    num_elements: int
    element_bytes: int = 4
    dtype: str = "float32"
    is_used: bool = True
    """Whether it gets a gradient in the first step."""
    rows: int = 0
    """Of a linear layer's parameter: the layer's output features, by which it can be split over
    ranks. 0: it cannot be split."""
    follows: str = ""
    """The linear layer whose divided output it could take: only functions of each element by itself
    lie between."""

    @property
    def layer(self) -> str:
        """The module that owns it."""
        return self.name.rpartition(".")[0]

    @property
    def size_bytes(self) -> int:
        return self.num_elements * self.element_bytes


Times = tuple[tuple[str, float], ...]
"""Seconds by layer."""


class BucketRule(Protocol):
    """Says which parameters share a bucket."""

    @property
    def needs_times(self) -> bool:
        """Whether the rule needs to know how long each layer's backward takes."""

    @property
    def times(self) -> Times | None:
        """Those times, if the rule has them already."""

    def split(
        self, sizes: Sequence[Size], bucket_bytes: int, backward_s: Mapping[str, float]
    ) -> list[list[Size]]:
        """Split parameters, in their order of use, into buckets.

        `backward_s` has seconds by layer; it is empty unless the rule needs times.
        """


@dataclass(frozen=True)
class BySize:
    """Fill a bucket until the next parameter would exceed `bucket_bytes`."""

    needs_times = False
    times = None

    def split(
        self, sizes: Sequence[Size], bucket_bytes: int, backward_s: Mapping[str, float]
    ) -> list[list[Size]]:
        buckets: list[list[Size]] = []
        used_bytes = 0
        for size in sizes:
            is_full = used_bytes + size.size_bytes > bucket_bytes
            if not buckets or is_full or buckets[-1][0].dtype != size.dtype:
                buckets.append([])
                used_bytes = 0
            buckets[-1].append(size)
            used_bytes += aligned_elements(size) * size.element_bytes
        return buckets


BY_SIZE = BySize()


@dataclass(frozen=True)
class InOne:
    """Put everything into one bucket, or into one for each type."""

    needs_times = False
    times = None

    def split(
        self, sizes: Sequence[Size], bucket_bytes: int, backward_s: Mapping[str, float]
    ) -> list[list[Size]]:
        by_type: dict[str, list[Size]] = {}
        for size in sizes:
            by_type.setdefault(size.dtype, []).append(size)
        return list(by_type.values())


@dataclass(frozen=True)
class ByLayer:
    """Make a bucket of each layer's parameters."""

    needs_times = False
    times = None

    def split(
        self, sizes: Sequence[Size], bucket_bytes: int, backward_s: Mapping[str, float]
    ) -> list[list[Size]]:
        return [list(of_layer) for _, of_layer in itertools.groupby(sizes, lambda s: s.layer)]


ALIGN_BYTES = 128
"""Parameters begin at multiples of this. Measured: the bits of an update depend on alignment below
128 bytes for bfloat16, below 64 for float32."""


def aligned_elements(size: Size) -> int:
    """Return how many elements a parameter takes up in its bucket."""
    align = ALIGN_BYTES // size.element_bytes
    return -(-size.num_elements // align) * align
