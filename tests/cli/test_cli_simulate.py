"""`syncline simulate` as a user calls it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from command import Started
from syncline.perf.trace import Trace

DIGITS = Path(__file__).parents[2] / "examples" / "digits.toml"


def simulate(*arguments, status=0):
    started = Started("simulate", str(DIGITS), *arguments)
    out, err = started.communicate()
    assert started.returncode == status, err
    return out if status == 0 else err


def test_a_table_says_what_is_compared_with_what_and_the_trace_is_written(tmp_path):
    path = tmp_path / "trace"
    slow = 'cluster.faults=[{rank=1, step=2, kind="slow", factor=5.0}]'
    shown = simulate("--ranks", "8", "--machines", "2", "--trace", str(path), "--set", slow)
    assert "cnn, synchronous, 8 ranks on 2 machines, simulated:" in shown
    for word in ("step", "one rank alone, the same batch", "speed-up", "exposed communication"):
        assert word in shown
    tasks = Trace.read(path).tasks
    assert {task.rank for task in tasks} == set(range(8))
    assert {task.step for task in tasks if task.kind == "reduce"} == set(range(10))


def test_what_hybrid_chooses_is_shown():
    sets = ("--ranks", "4", "--machines", "2", "--set", "strategy.name=hybrid")
    choice = json.loads(simulate(*sets, "--json"))["choice"]
    assert choice[0].startswith("hybrid, 4 groups: ")
    assert sum("(chosen)" in line for line in choice) == 1
    assert all(line in simulate(*sets) for line in choice)


def test_learning_reports_loss_accuracy_and_weights():
    found = json.loads(simulate("--ranks", "8", "--learn", "--json", "--set", "run.steps=21"))
    assert (found["ranks"], found["shards"], found["steps"]) == (8, 8, 21)
    assert 0 < found["loss"] < 3
    assert 0.1 < found["accuracy"] <= 1
    assert len(found["weights_sha256"]) == 64


def test_evaluations_make_a_curve_in_json_and_in_a_table():
    sets = ("--set", "run.steps=21", "--set", "run.evaluate_every=10")
    found = json.loads(simulate("--ranks", "4", "--learn", "--json", *sets))
    assert [point["step"] for point in found["curve"]] == [10, 20, 21]
    assert {"samples", "time_s", "total_sent_bytes", "test_loss"} < set(found["curve"][0])
    assert found["curve"][-1]["accuracy"] == found["accuracy"]
    assert "virtual s" in simulate("--ranks", "4", "--learn", *sets)


def test_a_written_workload_takes_the_place_of_model_and_data(tmp_path):
    path = str(tmp_path / "cnn.json")
    first = json.loads(simulate("--ranks", "4", "--json", "--write-workload", path))
    elsewhere = ("--set", "data.name=fashion-mnist", "--set", "data.path=nowhere")
    again = json.loads(simulate("--ranks", "4", "--json", "--workload", path, *elsewhere))
    assert first | {"wall_s": 0} == again | {"wall_s": 0}
    assert first["samples_per_s"] == pytest.approx(64 / first["step_s"], rel=0.01)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--ranks", "8", "--machines", "3"), "cluster.machines: got 3 with 8 ranks, but each"),
        (("--set", "cluster.preset=10gbits"), 'cluster.preset: got "10gbits", but'),
        (("--set", "cluster.rate=1e9"), "cluster.rate: "),
        (
            ("--set", 'cluster.faults=[{rank=9, step=1, kind="death"}]'),
            "cluster.faults[0].rank: got rank 9",
        ),
        (
            (
                *("--ranks", "4", "--set", "strategy.name=server", "--set", "strategy.shards=3"),
                *("--set", "data.batch=48", "--set", "strategy.server.servers=1"),
                *("--set", 'faults=[{rank=3, step=1, kind="death"}]'),
            ),
            "cluster.faults[0].rank: got rank 3, but it only serves and takes no steps",
        ),
        (("--trace", "/nowhere/trace"), "--trace: there is no folder /nowhere, but"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(arguments, expected):
    said = simulate(*arguments, status=2)
    assert said.startswith(f"syncline: {expected}"), said
    assert said.count("\n") == 1


@pytest.mark.parametrize("name", ["gossip", "elastic", "server"])
def test_a_death_is_told_where_ranks_part(name):
    sets = [f"strategy.name={name}", "strategy.shards=", 'faults=[{rank=1, step=3, kind="death"}]']
    arguments = [word for one in sets for word in ("--set", one)]
    said = simulate("--ranks", "4", *arguments, status=1 if name == "server" else 0)
    if name == "server":
        assert said == (
            "syncline: rank 1 is gone (died at step 3), and the others cannot go on: "
            "it held strips.\n"
        )
    else:
        assert "rank 1 died at step 3; the others went on without it" in said


def test_a_death_that_stops_a_synchronous_run_is_told_in_one_line():
    death = 'cluster.faults=[{rank=1, step=1, kind="death"}]'
    said = simulate("--ranks", "2", "--set", death, status=1)
    assert "waits for rank 1 (died at step 1)" in said
    assert said.count("\n") == 1
