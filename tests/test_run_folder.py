"""The run folder: what a rank, a later rank and the command line find in it."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import pytest

from syncline.errors import SynclineError
from syncline.run_folder import (
    CHECKPOINTS,
    JOB,
    METRICS,
    SUMMARY,
    Metrics,
    Summary,
    finished,
    holds_a_run,
    is_finished,
    read_summary,
    remove_leftovers,
    remove_summary,
    write_summary,
)

SUMMARY_OF_A_RUN = Summary(
    steps=30,
    samples_per_s=100.0,
    step_s=0.0025,
    layout={"overlap": True, "bucket_bytes": 4096, "num_buckets": 2},
    sent_bytes=10.0,
    loss=0.25,
    test_loss=None,
    accuracy=None,
    exposed_communication=0.125,
    weights_sha256="ab",
    ranks=2,
    shards=4,
    communicator="network (tcp)",
    num_parameters=3,
    seconds=1.5,
    resumed_at=0,
    run_folder="runs/x",
)


def steps_in(folder):
    return [json.loads(line)["step"] for line in (folder / METRICS).read_text().splitlines()]


def test_metrics_of_steps_that_are_taken_again_are_dropped(tmp_path):
    path = tmp_path / METRICS
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st')
    Metrics(tmp_path).keep_until(2)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_a_later_rank_continues_the_metrics_of_a_lost_one(tmp_path):
    first, second = Metrics(tmp_path), Metrics(tmp_path)
    for step in (1, 2, 3):
        first.append({"step": step})
    for step in (2, 3, 4, 5):  # it is behind: the lost rank had already written two of these
        second.append({"step": step})
    assert steps_in(tmp_path) == [1, 2, 3, 4, 5]


def test_metrics_that_are_not_there_begin_with_the_first_step(tmp_path):
    metrics = Metrics(tmp_path)
    metrics.keep_until(0)
    assert not (tmp_path / METRICS).exists()
    metrics.append({"step": 1})
    assert steps_in(tmp_path) == [1]


def test_numbers_that_json_does_not_have_are_null_however_deep(tmp_path):
    spread = {"distance_to_consensus": float("nan"), "all": [1.0, float("inf"), (2.0,)]}
    summary = dataclasses.replace(SUMMARY_OF_A_RUN, loss=-float("inf"), strategy=spread)
    write_summary(tmp_path, summary)
    found = json.loads((tmp_path / SUMMARY).read_text(), parse_constant=pytest.fail)
    assert found["loss"] is None
    assert found["strategy"] == {"distance_to_consensus": None, "all": [1.0, None, [2.0]]}
    assert is_finished(tmp_path, 30)
    metrics = Metrics(tmp_path)
    metrics.append({"step": 1, "loss": float("nan"), "lr": 0.5})
    line = json.loads((tmp_path / METRICS).read_text(), parse_constant=pytest.fail)
    assert line == {"step": 1, "loss": None, "lr": 0.5}


def test_a_summary_with_nan_from_version_0_1_0_is_read(tmp_path):
    plain = SUMMARY_OF_A_RUN.to_json_dict() | {"loss": float("nan"), "gone": {1: "it died"}}
    (tmp_path / SUMMARY).write_text(json.dumps(plain))
    assert is_finished(tmp_path, 30)
    found = finished(tmp_path, 30)
    assert found == dataclasses.replace(SUMMARY_OF_A_RUN, loss=None, gone={1: "it died"})
    assert finished(tmp_path, 31) is None


def test_metrics_with_nan_from_version_0_1_0_are_kept(tmp_path):
    path = tmp_path / METRICS
    path.write_text('{"step": 1, "loss": 2.5}\n{"step": 2, "loss": NaN}\n{"step": 3, "loss": 2}\n')
    Metrics(tmp_path).keep_until(3)
    assert [json.loads(x, parse_constant=pytest.fail) for x in path.read_text().splitlines()] == [
        {"step": 1, "loss": 2.5},
        {"step": 2, "loss": None},
        {"step": 3, "loss": 2},
    ]


def test_a_line_that_was_cut_short_does_not_spoil_the_next(tmp_path):
    path = tmp_path / METRICS
    path.write_text('{"step": 1}\n{"st')
    metrics = Metrics(tmp_path)
    metrics.append({"step": 2})
    assert path.read_text().splitlines() == ['{"step": 1}', '{"st', '{"step": 2}']
    metrics.keep_until(2)
    assert steps_in(tmp_path) == [1, 2]


def test_the_summary_of_a_run_that_is_taken_again_is_removed(tmp_path):
    write_summary(tmp_path, SUMMARY_OF_A_RUN)
    remove_summary(tmp_path, 40)
    assert is_finished(tmp_path, 30)
    remove_summary(tmp_path, 30)
    assert not (tmp_path / SUMMARY).exists()


def test_half_written_files_of_the_dead_are_removed(tmp_path):
    own = tmp_path / CHECKPOINTS / "rank-1"
    own.mkdir(parents=True)
    dead = [
        tmp_path / ".job.toml.123.partial",
        tmp_path / CHECKPOINTS / ".step-00000003.safetensors.123.partial",
        own / ".step-00000003.safetensors.77.partial",
    ]
    others = [tmp_path / ".hidden", tmp_path / "notes.partial", own / "step-00000001.safetensors"]
    for path in (*dead, *others):
        path.touch()
    remove_leftovers(tmp_path)
    assert not any(path.exists() for path in dead)
    assert all(path.exists() for path in others)


@pytest.mark.parametrize("name", [JOB, METRICS, SUMMARY, CHECKPOINTS])
def test_a_folder_with_any_file_of_a_run_holds_one(tmp_path, name):
    assert not holds_a_run(tmp_path)
    (tmp_path / "notes.txt").touch()
    assert not holds_a_run(tmp_path)
    (tmp_path / name).touch()
    assert holds_a_run(tmp_path)


def test_a_summary_is_read_as_written_and_nan_becomes_none(tmp_path):
    summary = dataclasses.replace(SUMMARY_OF_A_RUN, loss=float("nan"))
    write_summary(tmp_path, summary)
    assert read_summary(tmp_path) == {**summary.to_json_dict(), "loss": None}


def test_a_run_is_finished_when_the_summary_has_its_number_of_steps(tmp_path):
    assert not is_finished(tmp_path, 30)
    write_summary(tmp_path, SUMMARY_OF_A_RUN)
    assert is_finished(tmp_path, 30)
    assert not is_finished(tmp_path, 40)
    (tmp_path / SUMMARY).write_text('{"steps": 3')
    assert not is_finished(tmp_path, 30)


def test_a_damaged_summary_is_named(tmp_path):
    (tmp_path / SUMMARY).write_text('{"steps": 3')
    with pytest.raises(SynclineError, match=r"summary\.json is missing or damaged"):
        read_summary(tmp_path)


def test_looking_at_a_run_folder_does_not_import_torch():
    code = "import sys, syncline.run_folder; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
