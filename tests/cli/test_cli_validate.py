"""`syncline validate` as a user calls it, on the machine that runs the tests."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from command import Started
from syncline.cluster_file import write_cluster
from syncline.presets import PRESETS

pytestmark = pytest.mark.processes
DIGITS = Path(__file__).parents[2] / "examples" / "digits.toml"


def validate(*arguments, status=0):
    started = Started("validate", str(DIGITS), *arguments)
    out, err = started.communicate(110.0)
    assert started.returncode == status, err
    return out if status == 0 else err


def test_every_figure_is_said_beforehand_and_measured(tmp_path):
    links = tmp_path / "links.toml"  # to measure them takes half a minute
    write_cluster(msgspec.structs.replace(PRESETS["10gbit"], cores=2), links)
    quick = ("--ranks", "2", "--seconds", "0.3", "--rounds", "1", "--links", str(links))
    found = json.loads(validate(*quick, "--json"))
    (row,) = found["rows"]
    assert row["ranks"] == 2
    figures = row["figures"]
    assert [*figures] == ["step_s", "samples_per_s", "exposed_communication", "sent_bytes"]
    # What is counted is right on any machine; what is timed depends on what else runs there.
    assert figures["sent_bytes"]["error"] == pytest.approx(0.0, abs=0.02)
    step = figures["step_s"]
    assert step["error"] == pytest.approx(step["predicted"] / step["measured"] - 1)
    low, high = row["interval_s"]
    assert low < step["predicted"] < high
    assert row["is_inside"] == (low <= step["measured"] <= high)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--ranks", "2,x"), "--ranks: got"),
        (("--ranks", "0"), "--ranks: got"),
        (("--set", "model.name=nothing"), "model.name: "),
        (("--ranks", "3", "--set", "data.batch=64", "--set", "strategy.shards=2"), "strategy"),
    ],
)
def test_mistakes_are_told_before_anything_is_measured(arguments, expected):
    said = validate(*arguments, status=2)
    assert expected in said
    assert "measuring" not in said
