"""Cores that lanes share: hand-worked times."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.virtual.clock import Clock
from syncline.virtual.processors import Processors


def ends(cores, begins, threads=1, taken=()):
    """Return when each work ends; it begins at a time and lasts so long with cores of its own."""
    clock, found = Clock(), {}
    processors = Processors(clock, cores, threads)

    def work(number, begin_s, seconds):
        clock.sleep(begin_s)
        processors.compute(seconds)
        found[number] = clock.now_s

    for number, (begin_s, seconds) in enumerate(begins):
        clock.spawn(f"work {number}", work, number, begin_s, seconds)
    for time_s, core_s in taken:
        clock.at(time_s, processors.take, core_s)
    clock.run()
    return [found[number] for number in range(len(begins))]


def test_lanes_with_a_core_each_do_not_slow_one_another():
    assert ends(2, [(0, 1.0), (0, 2.0)]) == [1.0, 2.0]


def test_lanes_that_share_a_core_take_turns():
    # Until 2 both have half of it; the second one has 1 left, and then the whole core.
    assert ends(1, [(0, 1.0), (0, 2.0)]) == [2.0, 3.0]
    # The second one comes at 1, when the first has 1 left: until 3 each has half.
    assert ends(1, [(0, 2.0), (1, 1.0)]) == [3.0, 3.0]


def test_four_ranks_on_two_cores_take_twice_as_long():
    assert ends(2, [(0, 1.0)] * 4) == [2.0] * 4
    assert ends(4, [(0, 1.0)] * 4, threads=2) == [2.0] * 4


def test_a_comm_lane_takes_what_lanes_that_compute_lose():
    # Two lanes on two cores lose one for 0.5 s, half of that each.
    assert ends(2, [(0, 2.0)] * 2, taken=[(1, 0.5)]) == [2.25] * 2
    # One lane on two cores loses nothing; nor does a machine that does not compute.
    assert ends(2, [(0, 2.0)], taken=[(1, 0.5)]) == [2.0]
    assert ends(1, [(1, 1.0)], taken=[(0.5, 0.5)]) == [2.0]
    # Four on two cores run at half speed, so what they lose takes its own time of both cores.
    assert ends(2, [(0, 1.0)] * 4, taken=[(1, 0.5)]) == [2.25] * 4


@given(
    st.integers(1, 4),
    st.integers(1, 3),
    st.lists(st.tuples(st.floats(0, 3), st.floats(1e-6, 3)), min_size=1, max_size=6),
)
def test_nobody_is_faster_than_alone_and_cores_do_all_work(cores, threads, begins):
    found = ends(cores, begins, threads)
    for end_s, (begin_s, seconds) in zip(found, begins, strict=True):
        least_s = seconds * max(1.0, threads / cores)
        assert end_s >= begin_s + least_s - 1e-9
    core_s = sum(seconds * threads for _, seconds in begins)
    assert max(found) >= core_s / cores - 1e-9
    # From the last begin on cores are idle only if fewer lanes than cores are left.
    last_s, longest_s = max(begin_s for begin_s, _ in begins), max(one for _, one in begins)
    most_s = longest_s * max(1.0, threads / cores) + core_s / cores
    assert max(found) <= last_s + most_s + 1e-6


def test_rounding_leaves_no_work_behind():
    # 3 lanes on 2 cores, one after the other, 4000 times: thirds have no end in binary.
    clock, found = Clock(), []
    processors = Processors(clock, 2, 1)

    def work():
        for _ in range(4000):
            processors.compute(0.1)
        found.append(clock.now_s)

    for number in range(3):
        clock.spawn(f"work {number}", work)
    clock.run()
    assert found == [pytest.approx(600.0, rel=1e-9)] * 3
