"""Das et al. 2016: the constants, the rule for groups by hand, and the documented predictions."""

from __future__ import annotations

from pathlib import Path
from statistics import NormalDist

import pytest
from benchmarks.constants import Constant
from benchmarks.das_constants import CD_DNN_BATCHES, CONSTANTS, FDR, ROWS, Row
from benchmarks.das_model import VALUES, AsPublished, groups_of, slowest_of, step_s

from benchmarks import das
from syncline.sim.interval import MODEL
from syncline.strategies import Hybrid

DOCUMENT = Path(__file__).parents[2] / "docs" / "das.md"
SMALL = Row("small", "vgg-a", (3, 32, 32), 10, FDR, 8, 64, 1.0)
CD_DNN, AWS = ROWS[3], ROWS[4]


def test_every_constant_has_a_range_and_a_source_and_every_machine_its_constants():
    for constant in CONSTANTS.values():
        assert constant.low <= constant.value <= constant.high
        assert constant.low < constant.high
        assert constant.source
    assert {name for row in ROWS for name in row.machine[4:]} < set(CONSTANTS)
    assert max(CD_DNN_BATCHES) == CONSTANTS["cd_dnn_batch"].value


def test_a_constant_lies_in_its_range():
    with pytest.raises(AssertionError):
        Constant(3.0, 1.0, 2.0, "assumed", "nothing")
    assert Constant(1.5, 1.0, 2.0, "assumed", "a guess").at(0.25) == 1.25


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_the_number_of_groups_has_the_fewest_bytes(row):
    """A rank gives activations to its group twice, and its share of weights across twice."""
    layers = {
        "vgg-a": [(25088, 4096), (4096, 4096), (4096, 1000)],
        "overfeat-fast": [(36864, 3072), (3072, 4096), (4096, 1000)],
        "cd-dnn": [(429, 2048), *[(2048, 2048)] * 6, (2048, 9304)],
    }[row.network]
    batch, nodes = row.batch or 1024, row.nodes
    sent = {}
    for groups in (one for one in range(1, nodes + 1) if nodes % one == 0):
        size = nodes // groups
        inside = sum(2 * into * batch / groups * (size - 1) / size for into, _ in layers)
        across = sum(2 * into * out / size * (groups - 1) / groups for into, out in layers)
        sent[groups] = inside + across
    assert groups_of(row, VALUES) == min(sent, key=lambda one: sent[one])


@pytest.mark.parametrize("strategy", das.ORDERS.values())
@pytest.mark.parametrize("groups", [1, 2, 8])
def test_one_rank_stands_for_all_in_groups_too(groups, strategy):
    one = step_s(SMALL, VALUES, groups, strategy=strategy)
    assert one == pytest.approx(
        step_s(SMALL, VALUES, groups, strategy=strategy, all_ranks=True), rel=1e-3
    )


def test_the_slower_of_two_nodes():
    """Of two lognormal factors with mean 1 the larger has the mean 2 Phi(sigma / sqrt 2)."""
    assert slowest_of(1, 0.3) == pytest.approx(1.0)
    assert slowest_of(2, 0.3) == pytest.approx(2 * NormalDist().cdf(0.3 / 2**0.5), rel=1e-4)


def test_a_fast_network_is_as_good_as_free_communication():
    fast = SMALL._replace(machine=FDR._replace(nominal_bytes_per_s=1e18))
    values = {**VALUES, "fdr_latency_s": 0.0}
    free = das.free_speed_up(fast, values, 8)
    assert das.speed_up(fast, values, 8) == pytest.approx(free, rel=0.01)
    assert das.speed_up(SMALL, VALUES, 8) < free


def test_draws_are_the_same_each_time():
    first, second = (das.draws_of(2, AsPublished, [CD_DNN]) for _ in range(2))
    assert first == second
    assert first[0] != first[1]


def test_a_goal_is_missed_as_soon_as_one_row_is_too_far_off():
    row = {"predicted_error": 0.1, "is_inside": True, "widest": 0.2, "data_parallel_share": 0.5}
    goals = das.goals_of([row] * 5)
    assert all(goal["is_met"] for goal in goals.values())
    goals = das.goals_of([*[row] * 4, row | {"predicted_error": -0.26, "is_inside": False}])
    missed = [name for name, goal in goals.items() if not goal["is_met"]]
    assert missed == ["largest error", "published results outside the interval"]


def test_an_interval_holds_what_the_simulator_may_be_off_and_what_is_rounded():
    rows = [{} for _ in ROWS]
    same = [[row.published for row in ROWS]] * 3
    das.add_intervals(rows, same, [*same, *same])
    for row, known in zip(rows, ROWS, strict=True):
        assert row["predicted"] == known.published
        assert row["high"] == pytest.approx(known.published * (1 + MODEL))
        assert row["low"] == pytest.approx(known.published / (1 + MODEL))
        assert row["widest"] == pytest.approx(MODEL)
    for factor, is_inside in ((0.94, True), (0.92, False), (1.063, True), (1.09, False)):
        moved = [[one * factor for one in same[0]]] * 3
        das.add_intervals(rows, moved, moved)
        assert [row["is_inside"] for row in rows[:3]] == [is_inside] * 3
    das.add_intervals(rows, same, moved)  # what is possible lies above the median: no wider below
    assert rows[0]["low"] == pytest.approx(ROWS[0].published / (1 + MODEL))


@pytest.mark.parametrize("row", [CD_DNN, AWS], ids=lambda row: row.name)
def test_documented_predictions_are_those_of_a_run(row):
    lines = DOCUMENT.read_text().splitlines()
    documented = next(line for line in lines if line.startswith(f"| {row.name} |"))
    cells = [cell.strip().split()[0] for cell in documented.split("|")[2:-1]]
    paper, own = (das.predict(row, strategy) for strategy in (AsPublished, Hybrid))
    expected = (f"{row.published:g}", f"{paper['at_values']:.1f}", f"{own['at_values']:.1f}")
    assert (cells[0], cells[3], cells[6]) == expected


def test_draws_below_one_are_refused(capsys):
    with pytest.raises(SystemExit):
        das.read_arguments(["--draws", "0"])
    assert "--draws: got 0, but intervals need draws. Use 1 or more." in capsys.readouterr().err
