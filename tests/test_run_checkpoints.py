"""A resumed run: rank 0 chooses the checkpoint, and all ranks read the same or none starts."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil

import pytest

from ranks import RankError, collect, run_ranks, start_ranks
from syncline import checkpoint
from syncline.config import parse_job
from syncline.report.progress import SilentProgress
from syncline.run_checkpoints import RunCheckpoints
from syncline.run_folder import own_checkpoints
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


# -- ranks' own checkpoints ------------------------------------------------------------------------

LOCAL = JOB.replace("shards = 4", 'name = "local"\nlocal = { period = 3 }')


def note_what_is_there(out):
    """Train with `local`; return what the folder holds whenever the run's checkpoint is written."""
    found = []
    save = RunCheckpoints.save

    def noting(self, replica, step, *, is_wanted):
        own = [checkpoint.path_of(own_checkpoints(out, rank), step).exists() for rank in (0, 1)]
        found.append([step, *own, len((out / "metrics.jsonl").read_text().splitlines())])
        save(self, replica, step, is_wanted=is_wanted)

    RunCheckpoints.save = noting
    return train(parse_job(LOCAL), out, False, SilentProgress()).to_json_dict(), found


@pytest.fixture(scope="module")
def local_run(tmp_path_factory):
    out = tmp_path_factory.mktemp("local") / "run"
    return out, *run_ranks(2, lambda: note_what_is_there(out))[0]


def test_a_checkpoint_is_written_after_all_that_a_resumed_run_needs_besides(local_run):
    assert local_run[2] == [[step, True, True, step] for step in (2, 4, 6, 8)]


def test_ranks_go_on_with_their_own_checkpoints_and_with_no_others(local_run, tmp_path):
    out, whole, _ = local_run
    run = tmp_path / "run"
    shutil.copytree(out, run)
    job = tmp_path / "job.toml"
    job.write_text(LOCAL)
    # As if it had been killed while the checkpoint of step 8 was written.
    checkpoint.path_of(run / "checkpoints", 8).unlink()
    (run / "summary.json").unlink()
    mine = [checkpoint.path_of(own_checkpoints(run, rank), 6) for rank in (0, 1)]
    wrong = {
        f"{mine[1]}: it holds step 6 of rank 0 alone, but step 6 of rank 1 alone belongs": mine[0],
        f"{mine[1]}: it holds step 8 of rank 1": checkpoint.path_of(mine[1].parent, 8),
        f"{mine[1]}: it holds step 6 of the run": checkpoint.path_of(run / "checkpoints", 6),
    }
    right = mine[1].read_bytes()
    for line, file in wrong.items():
        mine[1].write_bytes(file.read_bytes())
        with pytest.raises(RankError, match=re.escape(line)):
            train_forked(job, run, ranks=2, resume=True)
    mine[1].write_bytes(right)
    found = train_forked(job, run, ranks=2, resume=True)
    assert (found["resumed_at"], found["weights_sha256"]) == (6, whole["weights_sha256"])


def test_a_rank_s_own_checkpoint_in_the_place_of_the_run_s_is_refused(local_run, tmp_path):
    shutil.copytree(local_run[0], tmp_path / "run")
    (tmp_path / "job.toml").write_text(LOCAL)
    path = checkpoint.path_of(tmp_path / "run" / "checkpoints", 8)
    shutil.copy(checkpoint.path_of(own_checkpoints(tmp_path / "run", 1), 8), path)
    with pytest.raises(RankError, match="it holds step 8 of rank 1 alone, but step 8 of the run"):
        train_forked(tmp_path / "job.toml", tmp_path / "run", ranks=2, resume=True)


@pytest.mark.parametrize("text", ["[1, 2]", "7", "null", "[" * 100_000, "of another run"])
def test_a_summary_that_is_not_this_run_s_is_written_again(text, runs, tmp_path):
    shutil.copytree(runs[0] / "whole", tmp_path / "run")
    path = tmp_path / "run" / "summary.json"
    if text == "of another run":
        text = json.dumps(runs[1] | {"weights_sha256": "0" * 64})
    path.write_text(text)
    found = train_forked(runs[0] / "job.toml", tmp_path / "run", ranks=2, resume=True)
    assert found["weights_sha256"] == runs[1]["weights_sha256"]
    assert json.loads(path.read_text())["weights_sha256"] == runs[1]["weights_sha256"]
