"""One clock for all ranks, from meetings that no rank leaves before all have come.

Each rank notes, by its own clock, when it came to a barrier and when it left it. Nobody left before
everybody had come, so for each pair of ranks a barrier bounds how far their clocks are apart, from
both sides. Of many barriers the tightest bounds are kept. Nothing is assumed about how long a
message takes in which direction.

Ranks of one machine read one kernel's clock, and have the same offset, unless the bounds say
otherwise (a time namespace): then each rank counts as a machine.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from syncline.perf.trace import Clocks

SAME_CLOCK_S = 1e-6
"""The error between ranks that read one clock: how finely it is read and written."""


class Rounds(msgspec.Struct, frozen=True):
    """Barriers, as one rank saw them: when it came to each, and when it left."""

    came_s: tuple[float, ...]
    left_s: tuple[float, ...]


class Moment(msgspec.Struct, frozen=True):
    """What makes all ranks' clocks that of the first machine, at one time of each clock."""

    at_s: tuple[float, ...]
    offsets_s: tuple[float, ...]
    error_s: float
    latency_s: float


def compare(rounds: Sequence[Rounds], machines: Sequence[Sequence[int]]) -> Moment:
    """Return what to add to each rank's clock. `rounds` are by rank."""
    came = np.array([one.came_s for one in rounds])
    left = np.array([one.left_s for one in rounds])
    at_s = tuple(float(one) for one in left[:, -1])
    # least[i, j]: rank i's clock when it left, less rank j's when it came. What has to be added to
    # j's clock to get i's is at most that.
    least = np.array([np.min(left[i] - came, axis=1) for i in range(len(rounds))])
    groups = [list(machine) for machine in machines]
    if any(least[np.ix_(group, group)].min() < 0 for group in groups):
        groups = [[rank] for group in groups for rank in group]
    bounds = np.array([[least[np.ix_(one, other)].min() for other in groups] for one in groups])
    np.fill_diagonal(bounds, 0.0)
    for via in range(len(groups)):  # a bound through a third machine may be tighter
        bounds = np.minimum(bounds, bounds[:, [via]] + bounds[[via], :])
    # The offset of machine m lies between -bounds[m, 0] and bounds[0, m].
    middle = (bounds[0] - bounds[:, 0]) / 2
    offsets = np.zeros(len(rounds))
    for number, group in enumerate(groups):
        offsets[group] = middle[number]
    # Between two machines i and j, what brings j's clock to i's lies within their own bounds.
    apart = middle[None, :] - middle[:, None]
    error_s = SAME_CLOCK_S + float(np.maximum(bounds - apart, bounds.T + apart).max())
    widths = (bounds + bounds.T)[~np.eye(len(groups), dtype=bool)]
    latency_s = float(widths.min() / 2) if widths.size else 0.0
    return Moment(at_s, tuple(float(one) for one in offsets), error_s, latency_s)


class OneClock:
    """Turns a rank's times into those of one clock, which begins at 0."""

    def __init__(self, first: Moment, last: Moment, zero_s: float = 0.0) -> None:
        self._first, self._last = first, last
        self._zero_s = zero_s

    def time_s(self, rank: int, seconds: float) -> float:
        """Return the common time; clocks may drift, so offsets change evenly in between."""
        first, last = self._first, self._last
        start_s, end_s = first.at_s[rank], last.at_s[rank]
        share = (seconds - start_s) / (end_s - start_s) if end_s > start_s else 0.0
        before, after = first.offsets_s[rank], last.offsets_s[rank]
        return seconds + before + (after - before) * share - self._zero_s

    def facts(self) -> Clocks:
        """Return what a trace says of its clock."""
        first, last = self._first, self._last
        return Clocks(
            offsets_s=tuple(zip(first.offsets_s, last.offsets_s, strict=True)),
            error_s=max(first.error_s, last.error_s),
            latency_s=min(first.latency_s, last.latency_s),
        )
