"""Flags: one small sum in which ranks tell each other facts in every step, and its layout."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from syncline.comm.base import Communicator, Partials, small_sum
from syncline.contract import ParamGroups

_NUM_EXTRA = 5
"""How many numbers lie between those of the parameters and the losses: see `encode`."""


class Told(NamedTuple):
    """What all ranks of a step group told, summed."""

    without: frozenset[int]
    """Parameters for which no rank has a gradient."""
    has_changed_buffers: bool
    is_early_invalid: bool
    """Whether some rank must undo the updates that were taken early."""
    has_changed_parameters: bool
    """Whether some rank's parameters were changed outside the optimizer: loaded, or in place."""
    step_s: float
    """The time since the last step was entered, summed over ranks."""
    is_alike: bool
    """Whether all ranks have told the same through `Alike`."""
    settings: list[float]
    """What ranks that only serve cannot know: the numbers of the optimizer's settings, and how many
    batches norm layers have seen. Empty if all ranks compute."""


def encode(
    has_gradient: Sequence[bool],
    *,
    has_changed_buffers: bool,
    is_early_invalid: bool,
    step_s: float,
    losses: Sequence[float],
    alike: float = 0.0,
    settings: Sequence[float] = (),
    has_changed_parameters: bool = False,
) -> list[float]:
    """Return one rank's numbers in the order of the sum.

    `losses` has a place for each shard of the step group, zero for shards of other ranks. `alike`
    is what `Alike.take` returned. One rank gives the `settings`, the others zeros.
    """
    return [
        *map(float, has_gradient),
        float(has_changed_buffers),
        float(is_early_invalid),
        float(has_changed_parameters),
        step_s,
        alike,
        *losses,
        *settings,
    ]


class Alike:
    """What this rank did since the last step, as one number: the step is refused if ranks differ.

    It is for what every rank must do alike, such as to load optimizer state or to set the
    learning rate.
    """

    def __init__(self, num_ranks: int) -> None:
        # So that float32 holds the sum over all ranks exactly.
        self._limit = max(1, (1 << 24) // num_ranks - 1)
        self._told: dict[str, int] = {}
        self._settings: ParamGroups | None = None
        """The optimizer's settings that were told last."""

    def tell(self, what: str, fingerprint: int) -> None:
        """Note what was done; of the same thing the last counts."""
        self._told[what] = fingerprint

    def take(self, settings: ParamGroups | None = None) -> float:
        """Return the number for the next step's flags: 0 if nothing was told or has changed.

        `settings` are the optimizer's, unless a rank that only serves has others by right.
        """
        if settings is not None and settings != self._settings:
            self._settings = settings
            self.tell("settings", zlib.crc32(repr(list(map(_exact, settings))).encode()))
        if not self._told:
            return 0.0
        told, self._told = sorted(self._told.items()), {}
        return 1.0 + zlib.crc32(repr(told).encode()) % self._limit


def _exact(group: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return a group's settings with all digits of a learning rate that is a tensor."""
    pairs = sorted(group.items())
    return [(k, v.tolist() if isinstance(v, torch.Tensor) else v) for k, v in pairs]


_NONE = frozenset[int]()


class Flags:
    """The sum of all ranks' flags, in memory of the step group."""

    def __init__(
        self, comm: Communicator, num_parameters: int, num_losses: int, num_settings: int = 0
    ) -> None:
        self._num_parameters = num_parameters
        self._num_losses = num_losses
        self._num_settings = num_settings
        self._num_ranks = comm.size
        self._alike = 0.0
        num_elements = num_parameters + _NUM_EXTRA + num_losses + num_settings
        # Settings are Python floats: float64 keeps all their bits.
        dtype = torch.float64 if num_settings else torch.float32
        self.partials: Partials = small_sum(comm, num_elements, dtype)
        mine = self.partials.sums[0].mine
        self._view = None if mine.is_meta else mine.numpy()
        self._sum = None if mine.is_meta else self.partials.result.numpy()

    def write(self, values: Sequence[float]) -> None:
        """Write this rank's numbers, as `encode` returned them."""
        if self._view is not None:
            self._view[:] = values
            self._alike = values[self._num_parameters + _NUM_EXTRA - 1]

    def read(self) -> Told:
        """Return what all ranks told, after the sum."""
        assert self._sum is not None
        found = self._sum.tolist()
        told = found[: self._num_parameters + _NUM_EXTRA]
        *has_gradient, has_changed, spoilt, is_outside, step_s, alike = told
        without = _NONE
        if not all(has_gradient):
            without = frozenset(number for number, has in enumerate(has_gradient) if not has)
        settings = found[-self._num_settings :] if self._num_settings else []
        is_alike = alike == self._num_ranks * self._alike
        return Told(
            without, has_changed > 0, spoilt > 0, is_outside > 0, step_s, is_alike, settings
        )

    @property
    def losses(self) -> list[float]:
        """The losses of the last step, by shard of the step group."""
        first = self._num_parameters + _NUM_EXTRA
        return self.partials.result[first : first + self._num_losses].tolist()
