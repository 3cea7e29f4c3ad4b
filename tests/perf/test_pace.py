"""The pace of a rank: what counts, and from when on."""

from __future__ import annotations

import pytest

from syncline.perf.pace import Pace


def pace_of(*ends: tuple[float, float]) -> Pace:
    """A pace after steps that ended at these times, with so many steps of all ranks by then."""
    pace = Pace(batch=10)
    for now_s, mean_steps in ends:
        pace.end_step(now_s, mean_steps)
    return pace


@pytest.mark.parametrize("ends", [[], [(5.0, 1.0)]])
def test_before_the_second_step_there_is_no_pace(ends):
    pace = pace_of(*ends)
    assert (pace.samples_per_s, pace.exposed(3.0), pace.median_step_s()) == (0.0, 0.0, None)


def test_time_counts_from_the_end_of_the_first_step():
    # The first step ends after 100 s of set-up; three more take 1, 2 and 5 s.
    pace = pace_of((100.0, 1.0), (101.0, 2.0), (103.0, 3.0), (108.0, 4.0))
    assert pace.samples_per_s == 3 * 10 / 8.0
    assert pace.exposed(waited_s=2.0) == 0.25
    assert pace.median_step_s() == 2.0


def test_steps_of_other_ranks_count_not_those_of_this_one():
    assert pace_of((0.0, 4.0), (1.0, 10.0)).samples_per_s == 60.0


def test_waiting_is_never_more_than_all_the_time():
    assert pace_of((0.0, 1.0), (1.0, 2.0)).exposed(waited_s=1.5) == 1.0


def test_when_a_rank_has_taken_all_its_steps_the_pace_of_all_is_no_longer_counted():
    pace = pace_of((0.0, 4.0), (1.0, 10.0))
    pace.end_step(5.0, 12.0, is_any_done=True)
    assert pace.samples_per_s == 60.0
    assert pace.median_step_s() == 2.5, "this rank's own steps go on"
    # If nothing else was seen, that is better than nothing.
    soon = pace_of((0.0, 4.0))
    soon.end_step(4.0, 8.0, is_any_done=True)
    assert soon.samples_per_s == 10.0


def test_the_samples_of_a_rank_alone_count_over_its_own_steps():
    assert pace_of((0.0, 4.0), (1.0, 10.0), (4.0, 30.0)).own_samples_per_s(6.0) == 3.0
    assert pace_of((5.0, 1.0)).own_samples_per_s(6.0) == 0.0
