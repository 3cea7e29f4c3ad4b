"""Ranks in groups: leaders that speak for a group, and layers that a group has split."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from syncline.comm.tree import shard_range

Group = tuple[int, ...]
"""A group of the world's ranks, in ascending order."""


@dataclass(frozen=True)
class Leaders:
    """Ranks that speak for groups of ranks: of all ranks, only they send to other groups."""

    groups: tuple[Group, ...]
    """All ranks of the world, in disjoint groups, in the order of their leaders."""
    ranks: tuple[int, ...]
    """The leader of each group: one of its ranks."""

    def __post_init__(self) -> None:
        if list(self.ranks) != sorted(self.ranks) or len(self.ranks) != len(self.groups):
            raise ValueError(f"leaders {self.ranks} of {self.groups} are not in order")
        if not all(rank in group for rank, group in zip(self.ranks, self.groups, strict=True)):
            raise ValueError(f"leaders {self.ranks} are not of their groups {self.groups}")


@dataclass(frozen=True)
class SplitLayer:
    """A linear layer whose output features the ranks of a group divide among them."""

    name: str
    weight: int
    """The number of its weight."""
    bias: int | None
    in_features: int
    out_features: int
    follows: str
    """The layer before it, which left its input divided by features; "": divided by samples."""
    gives_features: bool
    """Whether its output stays divided by features, for the layer after it."""

    @property
    def takes_features(self) -> bool:
        """Whether its input is divided by features; else by samples."""
        return bool(self.follows)

    @property
    def parameters(self) -> tuple[int, ...]:
        return (self.weight,) if self.bias is None else (self.weight, self.bias)


@dataclass(frozen=True)
class Split:
    """Layers that groups of ranks have split: each rank of a group holds some of the rows."""

    groups: tuple[Group, ...]
    """All ranks of the world in groups of equal size, which exchange activations."""
    layers: tuple[SplitLayer, ...]
    """In the order of registration."""

    @property
    def size(self) -> int:
        """How many ranks a group has."""
        return len(self.groups[0])

    @cached_property
    def numbers(self) -> frozenset[int]:
        """The parameters of the split layers."""
        return frozenset(number for layer in self.layers for number in layer.parameters)

    def group_of(self, rank: int) -> Group:
        return next(group for group in self.groups if rank in group)

    def place_of(self, rank: int) -> int:
        """Return a rank's place in its group: which of the rows it holds."""
        return self.group_of(rank).index(rank)

    def rows(self, num_rows: int, place: int) -> range:
        """Return the rows that a rank in this place of its group holds, of so many."""
        return range(*shard_range(num_rows, self.size, place))
