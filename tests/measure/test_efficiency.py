"""Efficiency of small batches: fits that give back what made the times."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.measure.efficiency import efficiencies, fit_line
from syncline.workload import Layer, LayerTimes, Workload


def layer(kind, flops, rate, half, sizes, here):
    seconds = {b: (b + half) * flops / rate for b in sizes}
    others = tuple(LayerTimes(b, s, 2 * s) for b, s in seconds.items() if b != here)
    return Layer("", 4, seconds[here], 1.0, others, kind=kind, flops=flops)


def test_rates_and_halves_come_back_by_kind():
    sizes = (1, 4, 16)
    layers = (
        layer("conv", 100.0, 1000.0, 2.0, sizes, 4),
        layer("linear", 50.0, 500.0, 8.0, sizes, 4),
        layer("conv", 300.0, 1000.0, 2.0, sizes, 4),
        layer("norm", 0.0, 1.0, 0.0, sizes, 4),
    )
    conv, linear = efficiencies(Workload("x", layers, samples=4))
    assert (conv.kind, linear.kind) == ("conv", "linear")
    assert (conv.flops_per_s, conv.half_samples) == pytest.approx((1000.0, 2.0))
    assert (linear.flops_per_s, linear.half_samples) == pytest.approx((500.0, 8.0))
    assert conv.by_samples == pytest.approx({1: 1000 / 3, 4: 1000 * 4 / 6, 16: 1000 * 16 / 18})
    assert conv.residual == pytest.approx(0.0, abs=1e-9)


def test_one_batch_size_and_unknown_kinds_have_no_efficiency():
    alone = (layer("conv", 100.0, 1000.0, 2.0, (4,), 4), Layer("", 4, 1.0, 2.0))
    assert efficiencies(Workload("x", alone, samples=4)) == []


@given(st.dictionaries(st.integers(1, 4096), st.floats(1e-6, 10.0), min_size=2, max_size=8))
def test_no_fit_is_faster_than_nothing(seconds):
    slope_s, fixed_s = fit_line(seconds)
    assert slope_s > 0
    assert fixed_s >= 0
