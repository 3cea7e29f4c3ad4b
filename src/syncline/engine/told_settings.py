"""An optimizer's settings as plain numbers: for ranks that run it for others, and to compare.

A rank that only serves takes no steps of its own, so its scheduler does nothing: the workers tell
it their numbers. Settings that are not numbers, such as switches, are fixed when the optimizer is
made, and equal on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real

import torch

from syncline.contract import ParamGroups
from syncline.engine.refusals import refuse_settings_between_shards
from syncline.engine.share import Share

Numbers = float | tuple[float, ...]


def numbers_of(group: dict[str, object]) -> dict[str, Numbers]:
    """Return the settings of a group that a schedule may change: numbers, and tuples of them."""
    numbers: dict[str, Numbers] = {}
    for key, value in group.items():
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            numbers[key] = float(value)
        elif isinstance(value, tuple) and all(isinstance(one, Real) for one in value):
            numbers[key] = tuple(map(float, value))
        elif isinstance(value, Real) and not isinstance(value, bool):  # numpy's numbers too
            numbers[key] = float(value)
    return numbers


def flatten(settings: ParamGroups) -> list[float]:
    """Return all numbers of all groups, in one fixed order."""
    found: list[float] = []
    for group in settings:
        for _, value in sorted(numbers_of(group).items()):
            found += value if isinstance(value, tuple) else (value,)
    return found


def told_to_servers(share: Share, settings: ParamGroups, counts: Sequence[float]) -> list[float]:
    """Return the numbers this rank adds to the sum that tells servers; empty without servers.

    The first worker gives its settings and the buffers' `counts`, the others zeros.
    """
    if not share.is_served:
        return []
    told = [*flatten(settings), *counts]
    return told if share.tells else [0.0] * len(told)


def restore(settings: ParamGroups, numbers: Sequence[float]) -> ParamGroups:
    """Return settings with the numbers that `flatten` returned in their place."""
    left = iter(numbers)
    restored = []
    for group in settings:
        told: dict[str, object] = {}
        for key, value in sorted(numbers_of(group).items()):
            if isinstance(value, tuple):
                told[key] = tuple(next(left) for _ in value)
            else:
                told[key] = next(left)
        restored.append({**group, **told})
    return restored


class SettingsOfShards:
    """Refuses settings that a loop over batches changes between the shards of one step."""

    def __init__(self) -> None:
        self.first: list[float] = []
        """The numbers at the `step()` that ended the step's first shard; empty before it."""

    def compare(self, settings: ParamGroups) -> None:
        """Raise if the settings are not those of the first shard."""
        numbers = flatten(settings)
        self.first = self.first or numbers
        if numbers != self.first:
            raise refuse_settings_between_shards()
