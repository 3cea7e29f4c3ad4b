"""How much less efficient small batches are, by kind of layer, in a workload that was measured.

A kind's forward of b samples takes (b + h) / r * its FLOP per sample: at h samples it reaches half
of the rate r. Both are fitted by least squares of relative errors.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from syncline.device import Kind
from syncline.workload import Workload


class Efficiency(msgspec.Struct, frozen=True, kw_only=True):
    """What a kind of layer reaches in forward; in FLOP per second."""

    kind: Kind
    by_samples: dict[int, float]
    flops_per_s: float
    """Of many samples, by the fit."""
    half_samples: float
    """With so many samples, half of it."""
    residual: float
    """The largest relative error of the fit's times."""


def efficiencies(workload: Workload) -> list[Efficiency]:
    """Return what each kind of layer reaches whose operations were counted, at each batch size."""
    found = []
    for kind in dict.fromkeys(layer.kind for layer in workload.layers):
        flops, seconds = _forwards_of(workload, kind)
        if kind is not None and flops and len(seconds) > 1 and min(seconds.values()) > 0:
            found.append(_fitted(kind, flops, seconds))
    return found


def _forwards_of(workload: Workload, kind: Kind | None) -> tuple[float, dict[int, float]]:
    """Return a kind's FLOP per sample, and its seconds of forward by number of samples."""
    flops, seconds = 0.0, dict[int, float]()
    for layer in workload.layers:
        if layer.kind == kind and workload.samples is not None:
            flops += layer.flops or 0.0
            here = {one.samples: one.forward_s for one in layer.times}
            for size, forward_s in {**here, workload.samples: layer.forward_s}.items():
                seconds[size] = seconds.get(size, 0.0) + forward_s
    return flops, dict(sorted(seconds.items()))


def _fitted(kind: Kind, flops: float, seconds: Mapping[int, float]) -> Efficiency:
    per_sample_s, fixed_s = fit_line(seconds)
    errors = [abs((fixed_s + per_sample_s * b) / s - 1) for b, s in seconds.items()]
    return Efficiency(
        kind=kind,
        by_samples={size: size * flops / one for size, one in seconds.items()},
        flops_per_s=flops / per_sample_s,
        half_samples=fixed_s / per_sample_s,
        residual=max(errors),
    )


def fit_line(seconds: Mapping[int, float]) -> tuple[float, float]:
    """Return seconds per sample and fixed seconds; neither is below 0.

    >>> slope_s, fixed_s = fit_line({1: 3.0, 4: 9.0, 8: 17.0})
    >>> round(slope_s, 9), round(fixed_s, 9)
    (2.0, 1.0)
    """
    # The relative error of b samples in s seconds is fixed * x + slope * y - 1.
    points = [(1 / s, b / s) for b, s in seconds.items()]
    xx, xy, yy = (sum(one[i] * one[j] for one in points) for i, j in ((0, 0), (0, 1), (1, 1)))
    x, y = (sum(one[i] for one in points) for i in (0, 1))
    determinant = xx * yy - xy * xy
    fixed_s = (x * yy - y * xy) / determinant
    slope_s = (y * xx - x * xy) / determinant
    return (slope_s, fixed_s) if fixed_s >= 0 and slope_s > 0 else (y / yy, 0.0)
