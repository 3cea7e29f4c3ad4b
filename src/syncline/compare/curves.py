"""What curves say: when a target is reached, how figures spread over seeds, what differs for sure.

No torch here.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from syncline.compare.cell import Found, Point

SURE = 0.95
"""How sure an interval is."""


def time_to(points: Sequence[Point], target: float, what: str) -> float | None:
    """Return `what`, such as "time_s", when the accuracy first reaches a target; None if never.

    Between two evaluations it is taken from the straight line.
    """
    before: Point | None = None
    for point in points:
        if point.accuracy is not None and point.accuracy >= target:
            now = getattr(point, what)
            if before is None or before.accuracy is None or now is None:
                return None if now is None else float(now)
            then = getattr(before, what)
            if then is None:
                return float(now)
            part = (target - before.accuracy) / (point.accuracy - before.accuracy)
            return float(then + (now - then) * part)
        before = point
    return None


def ends_at(found: Found, what: str) -> float | None:
    """Return a figure of the last point; None if the run failed."""
    value = getattr(found.points[-1], what) if found.points else None
    return None if value is None else float(value)


def spread(by_seed: Mapping[int, float | None]) -> dict[str, Any]:
    """Return mean, least and most of a figure over the seeds that have it."""
    there = [one for one in by_seed.values() if one is not None]
    return {
        "mean": statistics.fmean(there) if there else None,
        "least": min(there, default=None),
        "most": max(there, default=None),
        "seeds": {str(seed): one for seed, one in by_seed.items()},
    }


class Interval(NamedTuple):
    """The mean of differences, and where it lies with a certainty of `SURE`."""

    mean: float
    low: float
    high: float


def interval_of(differences: Sequence[float]) -> Interval | None:
    """Return Student's interval of a mean; None for fewer than two differences.

    >>> found = interval_of([1.0, 2.0, 3.0])
    >>> [round(one, 3) for one in found]
    [2.0, -0.484, 4.484]
    """
    if len(differences) < 2:
        return None
    mean = statistics.fmean(differences)
    half = t_value(len(differences) - 1) * statistics.stdev(differences)
    half /= math.sqrt(len(differences))
    return Interval(mean, mean - half, mean + half)


def t_value(freedom: int) -> float:
    """Return the two-sided 95 % point of Student's distribution.

    Published values up to 30 degrees of freedom; above, Cornish and Fisher's expansion, which is
    right to four digits there.

    >>> t_value(2), round(t_value(60), 3)
    (4.3027, 2.0)
    """
    if freedom <= len(_T):
        return _T[freedom - 1]
    z = statistics.NormalDist().inv_cdf((1 + SURE) / 2)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    return z + first / freedom + second / freedom**2


_T = (
    *(12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281),
    *(2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860),
    *(2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423),
)
