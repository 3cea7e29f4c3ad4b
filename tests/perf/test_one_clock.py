"""Offsets between clocks, from barriers: hand-worked, and right within the error they state."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.perf.clocks import SAME_CLOCK_S, Moment, OneClock, Rounds, compare


def test_two_machines_by_hand():
    # The second clock shows 10 s more. In the first round rank 1 comes last, and rank 0 hears of
    # it after 1 s; in the second it is the other way round, after 3 s.
    first = Rounds((0.0, 7.0), (6.0, 7.0))
    second = Rounds((15.0, 15.0), (15.0, 20.0))
    found = compare([first, second], [(0,), (1,)])
    # Rank 0 left at 6 when rank 1 had come at 15: add at most -9. Rank 1 left at 20 when rank 0 had
    # come at 7: add at least -13.
    assert found.offsets_s == (0.0, -11.0)
    assert found.error_s == pytest.approx(2.0 + SAME_CLOCK_S)
    assert found.latency_s == pytest.approx(2.0)
    assert found.at_s == (7.0, 20.0)


def test_ranks_of_one_machine_read_one_clock():
    found = compare([Rounds((0.0,), (2.0,)), Rounds((1.0,), (1.5,))], [(0, 1)])
    assert (found.offsets_s, found.error_s, found.latency_s) == ((0.0, 0.0), SAME_CLOCK_S, 0.0)


def test_an_offset_on_one_machine_is_found():
    apart = [Rounds((0.0,), (0.1,)), Rounds((100.0,), (100.1,))]
    found = compare(apart, [(0, 1)])
    assert found.offsets_s == (0.0, pytest.approx(-100.0))
    assert found.error_s == pytest.approx(0.1 + SAME_CLOCK_S)


@given(
    st.lists(st.floats(-100, 100), min_size=2, max_size=5),
    st.integers(1, 20),
    st.integers(0, 2**32 - 1),
)
def test_the_true_offset_lies_within_the_error(true_s, num_rounds, seed):
    random = np.random.default_rng(seed)
    came = np.cumsum(random.exponential(1.0, (num_rounds, len(true_s))), axis=0)
    came += 10.0 * np.arange(num_rounds)[:, None]
    left = came.max(axis=1, keepdims=True) + random.exponential(0.1, came.shape)
    rounds = [
        Rounds(tuple(came[:, rank] + own), tuple(left[:, rank] + own))
        for rank, own in enumerate(true_s)
    ]
    found = compare(rounds, [(rank,) for rank in range(len(true_s))])
    for rank, own in enumerate(true_s):
        for other, others in enumerate(true_s):
            expected = others - own
            apart_s = found.offsets_s[rank] - found.offsets_s[other]
            assert abs(apart_s - expected) <= found.error_s + 1e-9


def test_clocks_that_drift_are_followed():
    first = Moment((0.0, 100.0), (0.0, -100.0), 0.5, 0.1)
    last = Moment((10.0, 120.0), (0.0, -110.0), 0.2, 0.3)
    clock = OneClock(first, last, zero_s=1.0)
    assert [clock.time_s(1, at) for at in (100.0, 110.0, 120.0)] == [-1.0, 4.0, 9.0]
    assert clock.time_s(0, 5.0) == 4.0
    facts = clock.facts()
    assert (facts.error_s, facts.latency_s) == (0.5, 0.1)
    assert facts.offsets_s == ((0.0, 0.0), (-100.0, -110.0))
