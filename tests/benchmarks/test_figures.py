"""The benchmark's arithmetic: which rounds count, goals, the rule of speed; plain numbers only."""

from __future__ import annotations

import doctest
import importlib

import pytest
from benchmarks.arms import Arm
from benchmarks.figures import ArmResult, Comparison, choose_best
from benchmarks.goals import GOALS, check_goals, check_rule, rule_of_speed


def comparison(workload="gpt", num_ranks=2, **step_s):
    results = [ArmResult(Arm(method), step_s=times) for method, times in step_s.items()]
    return Comparison(workload, num_ranks, False, results)


@pytest.mark.parametrize("name", ["counting", "figures", "goals", "wire"])
def test_examples_in_docstrings_hold(name):
    failures, tried = doctest.testmod(importlib.import_module(f"benchmarks.{name}"))
    assert (failures, tried > 0) == (0, True)


def test_the_arm_of_a_method_is_chosen_by_its_selection_rounds_alone():
    slow = ArmResult(Arm("ddp", 1), step_s=[0.1], selection_s=[3.0, 2.0])
    fast = ArmResult(Arm("ddp", 5), step_s=[9.0], selection_s=[1.0, 2.0])
    broken = ArmResult(Arm("ddp", 25), selection_s=[0.5], failure="it died")
    single = ArmResult(Arm("syncline"))
    assert choose_best([slow, fast, broken, single]) == [fast, single]


def test_an_arm_that_was_not_chosen_is_in_no_ratio():
    chosen = ArmResult(Arm("ddp", 5), step_s=[2.0, 4.0], selection_s=[1.0])
    left = ArmResult(Arm("ddp", 1), selection_s=[0.001])
    syncline = ArmResult(Arm("syncline"), step_s=[1.0, 2.0])
    found = Comparison("mlp", 2, False, [left, chosen, syncline])
    assert found.speed("syncline", "ddp").median == 2.0
    arms = {arm["name"]: arm for arm in found.to_json_dict()["arms"]}
    assert "speed_against_best_ddp" not in arms["ddp 1 MB"]
    assert arms["syncline"]["speed_against_best_ddp"]["median"] == 2.0


def test_every_measured_workload_has_a_goal_of_quartiles():
    ddp_s = [0.90, 0.95, 0.97, 0.98, 0.99]  # Syncline takes 1 s: the upper quartile is 0.98
    met = comparison("gpt", 2, syncline=[1.0] * 5, ddp=ddp_s)
    missed = comparison("gpt", 4, syncline=[1.0] * 5, ddp=[0.97] * 5)
    elsewhere = comparison("gpt", 3, syncline=[1.0] * 5, ddp=[0.5] * 5)
    rows = check_goals([met, missed, elsewhere])[len(GOALS) :]
    assert [(row["num_ranks"], row["figure"], row["is_met"]) for row in rows] == [
        (2, "upper quartile of speed", True),
        (4, "upper quartile of speed", False),
    ]


@pytest.mark.parametrize(
    ("this_s", "control_s", "is_met"),
    [
        (1.019, 1.0, True),
        (1.03, 1.0, False),
        (1.03, 1.02, True),  # the same code is behind by 2 %, too
        (1.03, 0.97, False),  # a control that is ahead gives nothing away
    ],
)
def test_the_rule_of_speed_allows_two_percent_beyond_the_control(this_s, control_s, is_met):
    row = rule_of_speed("mlp", [this_s] * 3, [1.0] * 3, [control_s] * 3)
    assert row["is_met"] is is_met
    assert row["ratio"] == pytest.approx(1 / this_s)
    assert row["control"] == pytest.approx(1 / control_s)


def test_ratios_are_paired_before_they_are_summarised():
    # The machine is ten times slower in the second round, for all arms.
    row = rule_of_speed("mlp", [1.0, 10.0, 1.0], [1.1, 11.0, 1.1], [1.1, 11.0, 1.1])
    assert row["ratio_quartiles"] == pytest.approx([1.1, 1.1])
    assert row["control_quartiles"] == pytest.approx([1.0, 1.0])


def test_the_rule_is_not_met_if_an_arm_failed():
    (row,) = check_rule([comparison(syncline=[1.0], other=[1.0])])
    assert row == {"case": "gpt, 2 ranks", "ratio": None, "control": None, "is_met": False}
