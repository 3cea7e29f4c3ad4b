"""`syncline explain`: what it prints, and what it takes."""

from __future__ import annotations

import json

import pytest

from simulated import trace_of
from syncline.cli.explain import explain, find_trace
from syncline.errors import ConfigError
from syncline.perf.breakdown import PARTS


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run folder with a trace."""
    folder = tmp_path_factory.mktemp("explained")
    trace_of(folder, "synchronous", "cluster.slow_ranks.1=2.0").write(folder / "run.trace.gz")
    return folder


def test_a_run_is_explained_in_words(folder, capsys):
    explain(folder, perfetto=None, as_json=False, debug=False)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "synchronous, 4 ranks on 4 machines, 4 steps, simulated"
    assert any(line.startswith("  waiting for slower ranks") for line in lines)
    (together,) = [line for line in lines if line.startswith("  together")]
    assert together.endswith("100.0%")
    assert any(line.startswith("critical path, ") for line in lines)
    assert any(line.startswith("what binds: ") for line in lines)
    assert any(line.startswith("  no slow ranks") for line in lines)


def test_all_numbers_have_stable_keys(folder, capsys):
    explain(folder / "run.trace.gz", perfetto=None, as_json=True, debug=False)
    found = json.loads(capsys.readouterr().out)
    assert [*found] == [
        *("strategy", "clock", "ranks", "machines", "steps", "tasks", "step_s", "samples_per_s"),
        *("parts_s", "exposed_s", "buckets", "by_rank", "path", "what_if", "unknown_s", "rough"),
    ]
    assert [*found["parts_s"]] == [*PARTS]
    assert sum(found["parts_s"].values()) == pytest.approx(found["step_s"])
    assert found["path"]["length_s"] == pytest.approx(
        sum(one["end_s"] - one["start_s"] for one in found["path"]["pieces"])
    )
    assert {*found["what_if"][0]} == {"edit", "step_s", "gain", "is_rough"}
    assert next(iter(found["path"]["compute_ranks"])) == "1"


def test_a_folder_holds_one_trace(folder, tmp_path):
    assert find_trace(folder) == folder / "run.trace.gz"
    for name in ("a.trace", "b.trace"):
        (tmp_path / name).touch()
    with pytest.raises(ConfigError, match=r"this folder holds 2 traces \(a.trace, b.trace\), but"):
        find_trace(tmp_path)
