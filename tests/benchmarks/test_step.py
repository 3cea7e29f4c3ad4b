"""The workloads and the processes of the step benchmark, with two versions in one run."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import pytest
import torch
from benchmarks.arms import ARMS, WORKLOADS
from benchmarks.bytecodes import count
from benchmarks.channels import ArmFailed
from benchmarks.counting import counts_of
from benchmarks.ranks import Ranks
from benchmarks.step import read_job
from benchmarks.versions import THIS, TOP_FOLDER, Version, git
from benchmarks.worker import build_model, make_batch, make_optimizer
from checkout import needs_git

from benchmarks import worker
from command import Started
from worlds import untraced

BY_METHOD = {arm.method: arm for arm in ARMS}


def test_gpt_has_five_million_parameters_and_tied_weights():
    model = build_model(WORKLOADS["gpt"])
    assert model.scores.weight is model.tokens.weight
    block = 2 * 2 * 256 + 4 * 256**2 + (256 * 1024 + 1024) + (1024 * 256 + 256)
    expected = 8192 * 256 + 64 * 256 + 4 * block + 2 * 256
    assert sum(parameter.numel() for parameter in model.parameters()) == expected == 5_268_992
    x, y = make_batch(WORKLOADS["gpt"])
    assert x.dtype == torch.int64
    assert model(x).shape == (len(y), WORKLOADS["gpt"].classes)


def test_gpt_does_not_look_ahead():
    torch.manual_seed(0)
    model = build_model(WORKLOADS["gpt"])
    x = torch.randint(8192, (1, 64))
    changed = x.clone()
    changed[0, 40] += 1
    with torch.no_grad():
        before, after = model(x), model(changed)
    assert torch.equal(before[:40], after[:40])
    assert not torch.equal(before[40:], after[40:])


def test_only_gpt_has_adamw():
    kinds = {
        name: type(make_optimizer(torch.nn.Linear(1, 1), workload)).__name__
        for name, workload in WORKLOADS.items()
    }
    assert {name for name, kind in kinds.items() if kind != "SGD"} == {"gpt"}
    assert kinds["gpt"] == "AdamW"


def test_with_another_commit_the_rule_of_speed_is_measured_unless_told_otherwise():
    job = read_job(["--against", "HEAD"])
    assert (job.workloads, job.ranks) == (["mlp", "cd-dnn", "resnet-18"], [2, 4])
    assert job.methods == ["syncline"]
    assert read_job([]).workloads == list(WORKLOADS)


def test_counts_are_repeatable_and_count_python_calls():
    def inner():
        return 1

    def outer():
        return [inner() for _ in range(10)]

    first, second = counts_of(outer), counts_of(outer)
    assert first == second
    bytecodes, calls = first
    assert calls >= 11  # with the list's own frame 12, before Python 3.12
    assert bytecodes > 10 * counts_of(inner)[0]


@pytest.mark.processes
@pytest.mark.slow
def test_a_step_of_syncline_executes_more_than_a_plain_loop(monkeypatch):
    def fork(ranks, workload_name, arm, environment):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ranks._sockets.append(ours)
        words = (workload_name, arm.name, str(theirs.fileno()))
        settings = {"cwd": TOP_FOLDER, "env": environment, "traced": False}
        with theirs:
            # In a group of its own, which is killed at the end.
            started = Started(*words, first=os.setpgrp, program=worker.main, **settings)
        ranks.processes.append(started)

    monkeypatch.setattr(Ranks, "_start", fork)  # they need not load torch
    mine = count("mlp", BY_METHOD["syncline"], THIS)
    plain = count("mlp", BY_METHOD["no_exchange"], THIS)
    for part in ("step", "body"):
        assert mine[part]["bytecodes"]["least"] > plain[part]["bytecodes"]["least"] > 500
        assert mine[part]["calls"]["least"] > plain[part]["calls"]["least"]
    assert plain["body"]["bytecodes"]["least"] == plain["body"]["bytecodes"]["most"]


@pytest.mark.processes
@pytest.mark.slow
def test_ranks_that_load_another_package_than_they_should_are_refused(tmp_path):
    elsewhere = Version("other", "0" * 40, tmp_path)  # holds no package: this one is found instead
    with pytest.raises(ArmFailed, match=rf"rank 0 loaded .*, not {tmp_path}/src"):
        Ranks("mlp", BY_METHOD["no_exchange"], 1, elsewhere)


@needs_git
@pytest.mark.processes
@pytest.mark.slow
def test_two_versions_are_interleaved_in_one_run():
    command = [sys.executable, "-m", "benchmarks.step", "--workloads", "mlp", "--ranks", "2"]
    command += ["--rounds", "2", "--seconds", "0.05", "--against", "HEAD", "--busy", "1", "--json"]
    done = subprocess.run(
        command, cwd=TOP_FOLDER, env=untraced("RANK"), capture_output=True, text=True, timeout=110
    )
    found = json.loads(done.stdout)
    assert found["doubts"] == [], done.stderr
    assert found["against"] == git("rev-parse", "HEAD")
    (comparison,) = found["comparisons"]
    arms = {arm["name"]: arm for arm in comparison["arms"]}
    assert list(arms) == ["syncline", "other", "control"]
    assert all(len(arm["step_s_by_round"]) == 2 for arm in arms.values())
    assert len({arm["sum_by_rank_after_first_steps"][0] for arm in arms.values()}) == 1
    (row,) = found["rule_of_speed"]
    assert (row["case"], done.returncode) == ("mlp, 2 ranks", 0 if row["is_met"] else 1)
    assert row["ratio"] > 0
    assert row["control"] > 0
