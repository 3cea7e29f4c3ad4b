"""`syncline measure layers` as a user calls it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from command import Started
from syncline import workload
from syncline.cli.measured_ranks import Counters

DIGITS = Path(__file__).parents[2] / "examples" / "digits.toml"


def syncline(*arguments, status=0):
    started = Started(*arguments)
    out, err = started.communicate()
    assert started.returncode == status, err
    return out if status == 0 else err


def measure(*arguments, status=0):
    return syncline("measure", "layers", str(DIGITS), *arguments, status=status)


def test_layers_are_measured_and_simulated_at_other_batch_sizes_too(tmp_path):
    path = str(tmp_path / "cnn.json")
    found = json.loads(measure("--seconds", "0", "--samples", "2,4", "--json", "--out", path))
    assert [one["samples"] for one in found["totals"]] == [2, 4, 8]
    assert found["rounds"] == 5
    assert {one["kind"] for one in found["efficiencies"]} == {"conv", "linear"}
    read = workload.read(path)
    assert [layer.name for layer in read.layers] == ["c1", "norm_c1", "c2", "norm_c2", "f1", "f2"]
    assert all(layer.forward_s > 0 for layer in read.layers)
    assert read.update_s > 0
    for ranks, shards in ((1, 8), (2, 16)):
        words = ("--ranks", str(ranks), "--set", f"strategy.shards={shards}", "--json")
        outcome = json.loads(syncline("simulate", str(DIGITS), "--workload", path, *words))
        here = read.for_samples(64 // shards)
        alone_s = shards * (here.forward_s + here.backward_s + here.read_of(64 // shards))
        assert outcome["alone_s"] == pytest.approx(alone_s + read.update_s)


def test_a_table_of_what_several_processes_took_at_the_same_time():
    shown = measure("--seconds", "0", "--samples", "8", "--ranks", "2")
    for word in ("c1", "conv", "samples", "update: ", "2 ranks at once", "GFLOP/s"):
        assert (word in shown) == (word != "GFLOP/s")  # one batch size shows no efficiency


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--samples", "1,two"), "--samples: got '1,two', but this is a list of whole numbers"),
        (("--samples", "0"), "--samples: got '0', but this is a list of whole numbers, 1 or more."),
        (("--samples", "4096", "--ranks", "2"), "--samples: got 4096, but digits has "),
        (("--out", "/nowhere/x.json"), "--out: there is no folder /nowhere, but"),
        (("--ranks", "0"), "--ranks: got 0, but"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(arguments, expected):
    said = measure(*arguments, status=2)
    assert said.startswith(f"syncline: {expected}"), said
    assert said.count("\n") == 1


def test_rank_0_says_whether_all_go_on():
    counters = Counters(1)
    assert [counters.tell(0, one) for one in (1, 0, 1)] == [1, 0, 1]
    assert counters.get(0) == 6
