"""A data set of measured runs: packed, loaded, and refused if damaged."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import pytest
from benchmarks.dataset import MOST_BYTES, pack
from benchmarks.prediction import rows_of
from benchmarks.prediction_cases import all_cases
from benchmarks.prediction_folder import Folder

from simulated import trace_of
from syncline import workload
from syncline.cluster_file import write_cluster
from syncline.dataset import Case, Run, load
from syncline.errors import ConfigError
from syncline.presets import PRESETS

CASE = Case("1gbit", "even", 2, "gossip")
LAYERS = (workload.Layer("0", 400, 0.1, 0.2),)


@pytest.fixture
def folder(tmp_path):
    found = tmp_path / "measured"
    (found / "traces").mkdir(parents=True)
    runs = [Run(CASE, step_s, 10.0, 400.0, 0.1) for step_s in (0.1, 0.3, 0.2)]
    lines = [json.dumps(run) for run in runs]
    (found / "runs.jsonl").write_text("\n".join(lines) + "\n")
    write_cluster(PRESETS["10gbit"], found / "links.toml")
    (found / "latency.json").write_text('{"latency_s": 5e-5}')
    workload.write(workload.Workload("even", LAYERS), found / "even-1gbit.json")
    (found / "even-1gbit.toml").write_text("[model]\n")
    trace_of(tmp_path, "gossip", ranks=2, steps=2).write(
        found / "traces" / "1gbit-even-2-gossip.trace.gz"
    )
    (found / "notes.txt").write_text("not a part of it")
    return found


def test_what_was_packed_comes_back(folder, tmp_path):
    data = pack(folder)
    assert pack(folder) == data
    path = tmp_path / "found.tar.gz"
    path.write_bytes(data)
    found = load(path)
    assert "notes.txt" not in found.members
    assert found.cases == [CASE]
    assert (found.steps_s(CASE), found.step_s(CASE)) == ([0.1, 0.3, 0.2], 0.2)
    assert found.trace(CASE).header.strategy == "gossip"
    assert found.links().network == PRESETS["10gbit"].network
    assert found.latency_s() == 5e-5
    assert found.workload(CASE).layers == LAYERS
    assert found.job(CASE) == "[model]\n"
    found.unpack(tmp_path / "again")
    assert pack(tmp_path / "again") == data


def test_our_own_data_set_makes_the_table_of_predictions_again(tmp_path):
    (path,) = (Path(__file__).parents[1] / "datasets").glob("predictions-*.tar.gz")
    assert path.stat().st_size < MOST_BYTES
    found = load(path)
    assert len({*all_cases()} & {*found.cases}) >= 140
    case = Case("1gbit", "even", 2, "synchronous")
    assert found.trace(case).header.strategy == "synchronous"
    found.unpack(tmp_path)
    (row,) = rows_of(Folder(tmp_path), [one for one in all_cases() if one == case])
    assert row["measured_s"] == found.steps_s(case)
    assert row["predicted_s"] == pytest.approx(
        found.step_s(case), rel=0.05
    )  # see docs/prediction.md
    assert row["low_s"] < row["predicted_s"] < row["high_s"]


def test_damaged_archives_are_refused_in_one_line(folder, tmp_path):
    path = tmp_path / "found.tar.gz"
    data = pack(folder)
    for damaged in (b"", b"text", data[: len(data) // 2]):
        path.write_bytes(damaged)
        with pytest.raises(ConfigError, match=r"found.tar.gz: cannot be read \(.*but a data set"):
            load(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path / "nowhere")
    (folder / "links.toml").unlink()
    path.write_bytes(pack(folder))
    with pytest.raises(ConfigError, match=r"it holds no links.toml"):
        load(path).links()


def test_members_outside_of_the_archive_are_refused(tmp_path):
    for name in ("../outside", "/etc/passwd"):
        with tarfile.open(tmp_path / "found.tar.gz", "w:gz") as archive:
            archive.addfile(tarfile.TarInfo(name), io.BytesIO())
        with pytest.raises(ConfigError, match="it holds"):
            load(tmp_path / "found.tar.gz")
