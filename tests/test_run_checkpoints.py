"""A resumed run: rank 0 chooses the checkpoint, and all ranks read the same or none starts."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil

import pytest

from ranks import collect, run_ranks, start_ranks
from syncline import checkpoint
from syncline.config import parse_job
from syncline.report.progress import SilentProgress
from syncline.train import train
from training import MLP_ON_DIGITS, train_forked

pytestmark = pytest.mark.processes

JOB = f"""\
{MLP_ON_DIGITS}
[run]
ranks = 2
steps = 8
checkpoint_every = 2
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run of eight steps, and one of four that eight are to be made of."""
    folder = tmp_path_factory.mktemp("runs")
    job = folder / "job.toml"
    job.write_text(JOB)
    whole = train_forked(job, folder / "whole", ranks=2)
    train_forked(job, folder / "half", "run.steps=4", ranks=2)
    return folder, whole


@pytest.fixture
def copies(runs, tmp_path):
    """What the two ranks see: the half run, each in a copy of its own."""
    for name in ("rank-0", "rank-1"):
        shutil.copytree(runs[0] / "half", tmp_path / name)
    return tmp_path


def resume(copies):
    job = parse_job(JOB)

    def work():
        out = copies / f"rank-{os.environ['RANK']}"
        return train(job, out, True, SilentProgress()).to_json_dict()

    return work


def newest(copies, rank):
    return checkpoint.path_of(copies / f"rank-{rank}" / "checkpoints", 4)


def refusals(copies):
    """Resume; every rank must refuse. Return rank 0's line: each names its own folder."""
    answers = collect(*start_ranks(2, resume(copies)))
    assert [answer["kind"] for answer in answers] == ["CheckpointError"] * 2, answers
    assert not any("\n" in answer["text"] for answer in answers)
    return answers[0]["text"]


def test_ranks_that_see_the_same_resume(runs, copies):
    results = run_ranks(2, resume(copies))
    assert {result["weights_sha256"] for result in results} == {runs[1]["weights_sha256"]}


def test_a_rank_whose_newest_checkpoint_is_older_refuses_with_all_others(copies):
    newest(copies, 1).unlink()
    line = refusals(copies)
    digest = checkpoint.load(newest(copies, 0)).digest[:16]
    assert f"rank 0 resumes from step 4 with digest {digest}, but rank 1 does not: " in line
    assert f"{newest(copies, 1)}: cannot be read (no such file or directory)" in line


def test_a_rank_that_reads_other_weights_refuses_with_all_others(copies):
    path = newest(copies, 1)
    saved = checkpoint.load(path)
    changed = {name: value + 1 for name, value in saved.model.items()}
    checkpoint.save(path.parent, dataclasses.replace(saved, model=changed))
    line = refusals(copies)
    for rank in (0, 1):
        assert checkpoint.load(newest(copies, rank)).digest[:16] in line


def test_all_follow_rank_0_also_one_that_sees_a_newer_checkpoint(runs, copies):
    path = newest(copies, 1)
    saved = dataclasses.replace(checkpoint.load(path), step=6)
    checkpoint.save(path.parent, saved, spared=[path])
    results = run_ranks(2, resume(copies))
    assert {result["resumed_at"] for result in results} == {4}
    assert {result["weights_sha256"] for result in results} == {runs[1]["weights_sha256"]}


def test_the_result_of_a_finished_run_comes_back_on_every_rank(runs, tmp_path):
    for name in ("rank-0", "rank-1"):
        shutil.copytree(runs[0] / "whole", tmp_path / name)
    (tmp_path / "rank-1" / "summary.json").unlink()  # it may be on another machine
    results = run_ranks(2, resume(tmp_path))
    assert results == [json.loads(json.dumps(runs[1]))] * 2
