"""Time to a target and spread, by curves made by hand; Student's intervals by published values."""

from __future__ import annotations

import pytest

from syncline.compare import winners
from syncline.compare.cell import Found, Point
from syncline.compare.curves import ends_at, interval_of, spread, t_value, time_to
from syncline.compare.tuning import best_of


def curve(*points):
    """Points of (time, accuracy), ten samples apart."""
    return tuple(
        Point(
            step=number,
            samples=10 * number,
            time_s=time_s,
            sent_bytes=None,
            loss=None,
            test_loss=None,
            accuracy=accuracy,
        )
        for number, (time_s, accuracy) in enumerate(points, start=1)
    )


def test_the_target_is_reached_on_the_line_between_two_evaluations():
    points = curve((1.0, 0.2), (3.0, 0.4), (4.0, 0.3), (6.0, 0.8))
    assert time_to(points, 0.3, "time_s") == pytest.approx(2.0)  # half way from 0.2 to 0.4
    assert time_to(points, 0.3, "samples") == pytest.approx(15.0)
    assert time_to(points, 0.4, "time_s") == 3.0
    assert time_to(points, 0.55, "time_s") == pytest.approx(5.0)  # it had fallen to 0.3 before
    assert time_to(points, 0.81, "time_s") is None
    assert time_to(points, 0.1, "time_s") == 1.0  # reached before the first evaluation
    assert time_to(points, 0.3, "sent_bytes") is None  # not known
    assert time_to((), 0.3, "time_s") is None


def test_an_accuracy_that_is_not_known_reaches_nothing():
    assert time_to(curve((1.0, None), (2.0, 0.5)), 0.4, "time_s") == 2.0


def test_spread_is_over_the_seeds_that_have_the_figure():
    found = spread({0: 1.0, 1: None, 2: 4.0})
    assert found == {
        "mean": 2.5,
        "least": 1.0,
        "most": 4.0,
        "seeds": {"0": 1.0, "1": None, "2": 4.0},
    }
    assert spread({0: None})["mean"] is None


def test_intervals_are_student_s():
    mean, low, high = interval_of([1.0, 2.0, 3.0])
    assert (mean, high - mean) == (2.0, pytest.approx(4.3027 / 3**0.5))
    assert low == pytest.approx(mean - (high - mean))
    assert interval_of([1.0]) is None
    # Published: 2.0003 at 60, 1.9840 at 100, 1.9600 without end; 2.0395 at 31.
    for freedom, value in ((31, 2.0395), (60, 2.0003), (100, 1.9840), (10**6, 1.9600)):
        assert t_value(freedom) == pytest.approx(value, abs=1e-4)


def test_runs_are_told_apart_by_their_differences_seed_by_seed():
    """Seeds differ a lot; within each seed the second is a tenth slower."""
    times = {"a": {0: 10.0, 1: 20.0, 2: 40.0}, "b": {0: 11.0, 1: 22.2, 2: 43.6}}
    found = winners.by_time(times)
    assert (found["first"], found["tied"], found["words"]) == ("a", [], "a")
    (other,) = found["others"]
    assert other["ratio"] == pytest.approx(1.1, rel=0.01)
    assert 1 < other["low"] < other["ratio"] < other["high"]


def test_runs_that_win_with_some_seeds_cannot_be_told_apart():
    times = {"a": {0: 10.0, 1: 20.0, 2: 30.0}, "b": {0: 11.0, 1: 19.0, 2: 33.0}}
    found = winners.by_time(times)
    assert (found["first"], found["tied"]) == ("a", ["b"])
    assert found["words"] == "cannot be told apart: a, b"


def test_who_misses_the_target_with_a_seed_is_behind_and_nobody_may_be_first():
    found = winners.by_time({"a": {0: 1.0, 1: None}, "b": {0: 5.0, 1: 5.0}})
    assert found["first"] == "b"
    assert found["others"][0]["why"] == "reached 1 of 2"
    found = winners.by_time({"a": {0: 1.0, 1: None}})
    assert found["first"] is None
    assert found["words"] == "no strategy reached the target with all seeds"


def test_with_one_seed_nothing_can_be_told_apart():
    found = winners.by_time({"a": {0: 1.0}, "b": {0: 50.0}})
    assert found["tied"] == ["b"]
    assert found["others"][0]["why"] == "one seed: no spread"


def test_equal_runs_are_tied_and_accuracy_is_better_when_higher():
    found = winners.by_accuracy(
        {
            "a": {0: 0.8, 1: 0.81, 2: 0.8},
            "b": {0: 0.8, 1: 0.81, 2: 0.8},
            "c": {0: 0.7, 1: 0.71, 2: 0.7},
        }
    )
    assert (found["first"], found["tied"]) == ("a", ["b"])
    assert found["others"][1]["difference"] == pytest.approx(-0.1)
    assert found["others"][1]["high"] < 0


def test_a_search_takes_who_is_first_at_the_target_or_else_the_most_accurate():
    late = Found(points=curve((1.0, 0.1), (9.0, 0.9)))
    early = Found(points=curve((1.0, 0.1), (5.0, 0.7)))
    failed = Found(failed="rank 1 is gone")
    assert best_of([failed, late, early], 0.6) == 2
    assert best_of([failed, late, early], 0.8) == 1
    assert best_of([failed, late, early], 0.95) == 1
    assert best_of([early, early, failed], None) == 0
    assert ends_at(failed, "accuracy") is None
