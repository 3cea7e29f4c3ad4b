"""`syncline train` with many ranks, and with ranks that never get going. Real training."""

from __future__ import annotations

import functools
import json
import os
import signal
import time
from pathlib import Path

import pytest

import syncline.cli.train
from command import Started
from training import are_gone, ranks_of, train_forked

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]

JOB = """
[model]
name = "mlp"
[data]
name = "digits"
batch = 64
[optimizer]
lr = 0.05
[run]
steps = 4
meet_s = 3.0
silent_s = 2.0
"""


@pytest.fixture
def job(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text(JOB)
    return path


def start(job, *sets, ranks, first=None):
    words = [word for one in sets for word in ("--set", one)]
    where = ("--ranks", str(ranks), "--out", str(job.parent / "run"), "--json")
    return Started("train", str(job), *where, *words, traced=False, first=first)


def freeze_rank_1():
    """Let rank 1 stop before it joins the job, as a process that is frozen at its start."""
    work = syncline.cli.train.work

    def frozen(*arguments, **settings):
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGSTOP)
        return work(*arguments, **settings)

    syncline.cli.train.work = frozen


@pytest.mark.slow
def test_a_rank_frozen_before_the_meeting_does_not_hold_up_the_end(job):
    started = start(job, "strategy.name=gossip", ranks=2, first=freeze_rank_1)
    _, said = started.communicate(timeout=50)
    assert started.returncode == 1
    assert "rank 0: rank 0 waited 3 s for rank 1, which never came." in said
    assert "syncline: stopping rank 1: still running 10 s after the first end\n" in said


@pytest.mark.slow
def test_a_frozen_server_does_not_hold_up_the_end(job):
    def be_impatient():
        launch = syncline.cli.train.launch
        syncline.cli.train.launch = functools.partial(launch, frozen_s=2.0)

    sets = ("strategy.name=server", "strategy.server.servers=1", "run.steps=100000")
    started = start(job, *sets, ranks=2, first=be_impatient)
    metrics = job.parent / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 40
    while not (metrics.exists() and metrics.read_bytes().count(b"\n") > 3):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    ranks = ranks_of(started)
    os.kill(ranks[1], signal.SIGSTOP)
    _, said = started.communicate(timeout=50)
    assert started.returncode == 1
    assert "rank 1 is silent for" in said
    assert "syncline: stopping rank 1: frozen for 2 s, and others ended\n" in said
    assert are_gone(ranks)


@pytest.mark.slow
def test_sixteen_ranks_start_and_train(job, tmp_path):
    many = start(job, "strategy.shards=16", "run.meet_s=100", "run.silent_s=20", ranks=16)
    out, said = many.communicate(timeout=100)
    assert many.returncode == 0, said
    one = train_forked(job, tmp_path / "one", "strategy.shards=16")
    assert json.loads(out)["weights_sha256"] == one["weights_sha256"]
    assert Path(tmp_path / "run" / "summary.json").exists()
