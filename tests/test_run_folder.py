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
    holds_a_run,
    is_finished,
    read_summary,
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
