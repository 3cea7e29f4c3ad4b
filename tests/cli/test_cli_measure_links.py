"""`syncline measure links` as a user calls it, and `simulate` with what it wrote."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from command import Started
from syncline.cli.measure_links import fastest_device
from syncline.cluster_file import read_cluster

DIGITS = Path(__file__).parents[2] / "examples" / "digits.toml"


def syncline(*arguments, cwd, status=0):
    started = Started(*arguments, cwd=cwd)
    out, err = started.communicate()
    assert started.returncode == status, err
    return out if status == 0 else err


@pytest.mark.processes
def test_two_ranks_are_measured_and_a_job_is_simulated_on_what_was_found(tmp_path):
    few = ("--ranks", "2", "--rounds", "3", "--sizes", "1024,262144,4194304")
    found = json.loads(syncline("measure", "links", *few, "--json", cwd=tmp_path))
    facts = read_cluster(tmp_path / "this-machine.toml")
    assert found["name"] == facts.name == "this-machine"
    kinds = {
        (one.what, one.size_bytes, one.machines, one.ranks_per_machine): one.median_s
        for one in facts.measured
    }
    assert len(kinds) == 3 * 3 * 2
    assert kinds["reduce_scatter", 4194304, 1, 2] > kinds["reduce_scatter", 1024, 1, 2]
    assert kinds["reduce_scatter", 4194304, 2, 1] > kinds["reduce_scatter", 1024, 2, 1]
    for link in (facts.inside, facts.network):
        assert link.latency_s is not None
        assert link.rate_bytes_per_s is not None
        assert link.nominal_bytes_per_s is not None
        assert 1e6 < link.rate_bytes_per_s.value <= link.nominal_bytes_per_s.value
    assert os.listdir(tmp_path) == ["this-machine.toml"]
    run = ("simulate", str(DIGITS), "--ranks", "2", "--cluster", "this-machine", "--json")
    inside = json.loads(syncline(*run, "--machines", "1", cwd=tmp_path))
    across = json.loads(syncline(*run, cwd=tmp_path))
    assert inside["machines"] == 1
    assert across["machines"] == 2
    assert inside["step_s"] != across["step_s"]


@pytest.mark.processes
def test_ctrl_c_ends_all_ranks_and_leaves_nothing(tmp_path):
    started = Started("measure", "links", "--rounds", "1000", cwd=tmp_path)
    time.sleep(2.0)
    os.kill(started.pid, signal.SIGINT)
    assert started.wait(20.0) == 130
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("--ranks", "1"), "--ranks: got 1, but a link is between two ranks. Use 2,"),
        (("--rounds", "2"), "--rounds: got 2, but quartiles need three rounds at least. Use 15."),
        (("--sizes", "64,x"), '--sizes: got "x", but sizes are multiples of 64 bytes'),
        (("--sizes", "65"), '--sizes: got "65", but sizes are multiples of 64 bytes'),
        (("--out", "/nowhere/x"), "--out: there is no folder /nowhere, but"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line(arguments, line, tmp_path):
    said = syncline("measure", "links", *arguments, cwd=tmp_path, status=2)
    assert said.startswith(f"syncline: {line}")
    assert said.count("\n") == 1


def test_presets_are_listed_without_a_job(tmp_path):
    shown = syncline("simulate", "--list-clusters", cwd=tmp_path)
    for name in ("1gbit", "k80-10gbe", "h100", "lab"):
        assert name in shown


def test_a_preset_on_the_command_line_wins_over_the_jobs_and_a_setting_over_it(tmp_path):
    run = ("simulate", str(DIGITS), "--ranks", "4", "--json", "--set", "strategy.shards=4")
    chosen = (*run, "--set", "cluster.preset=100gbit", "--cluster", "k80-10gbe")
    both, preset = (
        json.loads(syncline(*one, cwd=tmp_path))
        for one in (chosen, (*run, "--set", "cluster.preset=k80-10gbe"))
    )
    assert both | {"wall_s": 0} == preset | {"wall_s": 0}
    assert both["machines"] == 2
    slower = json.loads(syncline(*chosen, "--set", "cluster.latency_s=1", cwd=tmp_path))
    assert slower["step_s"] > 1.0


def test_the_fastest_device_that_says_its_rate_is_the_limit(tmp_path):
    for name, speed in (("eth0", "1000\n"), ("eth1", "10000\n"), ("lo", ""), ("tap", "-1\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "speed").write_text(speed)
    (tmp_path / "bonding_masters").write_text("")
    assert fastest_device(tmp_path) == (1.25e9, "the fastest network device here (eth1) has")
    assert fastest_device(tmp_path / "eth0") is None
