"""The figures of `benchmarks/prediction.py`, by hand."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
from benchmarks.prediction_cases import Case, all_cases, network
from benchmarks.prediction_figures import figures, missed, order_of
from benchmarks.prediction_plot import plot

from syncline.cli.train import check_names
from syncline.config import parse_job


def row(strategy, measured, predicted, low=0.0, high=100.0, ranks=2):
    case = ["1gbit", "even", ranks, strategy]
    return {
        **{"case": case, "measured_s": measured, "predicted_s": predicted},
        **{"low_s": low, "high_s": high, "free_s": 1.0, "in_turn_s": 2.0},
    }


def test_figures_are_those_of_medians():
    rows = [
        row("server", [1.0, 2.0, 3.0], 2.2, low=1.9, high=2.5),
        row("gossip", [4.0], 3.2, low=3.0, high=3.4),
    ]
    found = figures(rows)
    assert found["mean_error"] == pytest.approx((0.1 + 0.2) / 2)
    assert found["coverage"] == 0.5
    assert found["most_half_width"] == pytest.approx(0.3 / 2.2)
    assert found["null"]["free_s"] == pytest.approx((0.5 + 0.75) / 2)
    assert (found["order"], found["pairs"]) == (1.0, 1)
    assert "mean_error" in missed(found)
    assert "order" not in missed(found)


def test_pairs_within_the_spread_and_of_other_places_do_not_count():
    rows = [
        row("server", [1.0, 2.0], 2.0),
        row("gossip", [1.9, 3.0], 1.0),
        row("local", [5.0], 1.5),
        row("elastic", [9.0], 0.1, ranks=4),
    ]
    assert order_of(rows) == (2, 1)  # local is slower than both, and predicted between them


def test_the_plot_has_a_mark_for_each_case_and_is_well_formed():
    rows = [row("server", [0.1, 0.2], 0.18), row("gossip", [4.0], 3.2)]
    root = ElementTree.fromstring(plot(rows))
    titles = [one.text for one in root.iter("{http://www.w3.org/2000/svg}title")]
    assert titles == ["1gbit/even/2/server", "1gbit/even/2/gossip", "1gbit"]


def test_every_case_is_a_job_that_can_run():
    cases = all_cases()
    assert len(cases) == len({case.key for case in cases})
    for case in cases:
        job = parse_job(network(case.network, case.rate).job, sets=case.sets(10))
        check_names(job.resolved(case.ranks, [[rank] for rank in range(case.ranks)]))
    assert Case("", "mlp", 4, "gossip").is_crowded
    assert not Case("1gbit", "even", 8, "gossip").is_crowded
