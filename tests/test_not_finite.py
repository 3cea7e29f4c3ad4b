"""Losses and weights that are not finite: every run ends by its own rules, and says where."""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path

import pytest

from syncline.not_finite import mean_loss
from training import start_training

pytestmark = pytest.mark.processes

# The learning rate is 0.05 for four steps, then enormous: the weights stay finite for a step, and
# the loss of step 6 is not finite on any rank.
JOB = """\
[model]
name = "mlp"

[data]
name = "digits"
batch = 48

[optimizer]
lr = 0.05
schedule = "step"
decay_steps = 4
decay_factor = 1e36

[run]
ranks = 3
steps = 1000
checkpoint_every = 4
"""

STRATEGIES = {
    "synchronous": (),
    "synchronous, overlapped": ("strategy.overlap=true", "strategy.bucket_bytes=20000"),
    "sync_server": ("strategy.name=sync_server", "strategy.sync_server.servers=1"),
    "local": ("strategy.name=local", "strategy.local.period=2"),
    "gossip": ("strategy.name=gossip",),
    "push-sum": (
        "strategy.name=gossip",
        "strategy.gossip.rule=push",
        "strategy.gossip.push_sum=true",
    ),
    "elastic": ("strategy.name=elastic",),
    "elastic, synchronous": ("strategy.name=elastic", "strategy.elastic.synchronous=true"),
    "server": ("strategy.name=server",),
    "server, bounded": ("strategy.name=server", "strategy.server.max_staleness=1"),
    "server of its own": ("strategy.name=server", "strategy.server.servers=1"),
}
ALIKE = ("synchronous", "synchronous, overlapped", "sync_server")
every_strategy = pytest.mark.parametrize("name", STRATEGIES)


def train(tmp_path, *sets, ranks=3, more=()):
    """Run `syncline train`; return its status, what it printed, and what it said."""
    job = tmp_path / "job.toml"
    job.write_text(JOB)
    started = start_training(job, tmp_path / "run", *sets, ranks=ranks, more=more)
    out, err = started.communicate(60)
    assert "Traceback" not in err, err
    return started.returncode, out, err


def said(err):
    return [line for line in err.splitlines() if re.match(r"(syncline|rank \d+): ", line)]


def strictly(text):
    """Read JSON as any other reader does: NaN is none."""
    return json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))


def kept(tmp_path):
    return sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*"))


@every_strategy
def test_a_loss_that_is_not_finite_ends_the_run_on_every_rank(tmp_path, name):
    status, out, err = train(tmp_path, *STRATEGIES[name])
    assert (status, out) == (1, ""), err
    lines = said(err)
    assert 1 <= len(lines) <= 3, err
    for line in lines:
        assert "run.stop_when_not_finite: " in line
        if line.startswith("syncline: rank 0: "):
            assert "The last good checkpoint is " in line
            assert "checkpoints/step-00000004.safetensors." in line
    assert any(line.startswith("syncline: rank 0: ") for line in lines)
    assert kept(tmp_path) == ["step-00000004.safetensors"]
    assert not (tmp_path / "run" / "summary.json").exists()
    for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines():
        strictly(line)
    if name in ALIKE:
        (line,) = lines
        assert line.startswith(
            "syncline: rank 0: run.stop_when_not_finite: the loss of step 6 is nan, so the run"
        )


@every_strategy
def test_a_run_may_go_on_and_ends_after_its_last_step(tmp_path, name):
    sets = ["run.stop_when_not_finite=false", "run.steps=8", "run.checkpoint_every=1"]
    status, out, err = train(tmp_path, *STRATEGIES[name], *sets)
    assert status == 0, err
    result = strictly(out)
    assert (result["steps"], result["loss"], result["test_loss"]) == (8, None, None)
    assert strictly((tmp_path / "run" / "summary.json").read_text()) == result
    metrics = [strictly(x) for x in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in metrics] == list(range(1, 9))
    assert metrics[3]["loss"] is not None
    assert metrics[-1]["loss"] is None
    began = next(line["step"] for line in metrics if line["loss"] is None)
    assert f"the loss is not finite from step {began} on" in err
    # The last good one stays though two others follow it.
    good, *others = kept(tmp_path)
    assert others == ["step-00000007.safetensors", "step-00000008.safetensors"]
    assert good in ("step-00000005.safetensors", "step-00000006.safetensors")


def test_weights_that_are_not_finite_are_not_saved(tmp_path):
    status, _, err = train(tmp_path, "run.checkpoint_every=2")
    assert status == 1
    (line,) = said(err)
    assert "the weights after step 6 are not finite, so the run ends here." in line
    assert kept(tmp_path) == ["step-00000002.safetensors", "step-00000004.safetensors"]


def test_weights_that_the_last_step_has_spoilt_are_not_the_result(tmp_path):
    status, out, err = train(tmp_path, "run.steps=6", "optimizer.decay_factor=1e38")
    assert (status, out) == (1, "")
    (line,) = said(err)
    assert "step 6" in line
    assert kept(tmp_path) == ["step-00000004.safetensors"]


def test_without_a_checkpoint_the_line_says_so(tmp_path):
    status, _, err = train(tmp_path, "run.checkpoint_every=500", ranks=1)
    assert status == 1
    (line,) = said(err)
    assert "the loss of step 6 is nan" in line
    assert "No checkpoint was saved before." in line


@pytest.mark.parametrize("name", ["synchronous", "local", "gossip", "elastic", "server"])
def test_a_finished_run_that_is_resumed_says_so_and_ends(tmp_path, name):
    sets = [*STRATEGIES[name], "run.steps=4"]
    status, first, err = train(tmp_path, *sets)
    assert status == 0, err
    before = {path: path.read_bytes() for path in files_of(tmp_path / "run")}
    status, again, err = train(tmp_path, *sets, more=["--resume"])
    assert status == 0, err
    assert "this run is finished: it has taken its 4 steps" in err
    assert strictly(again) == strictly(first)
    assert {path: path.read_bytes() for path in files_of(tmp_path / "run")} == before


@pytest.mark.parametrize("name", ["synchronous", "gossip", "server"])
def test_a_run_that_was_killed_before_its_summary_gets_one(tmp_path, name):
    sets = [*STRATEGIES[name], "run.steps=4"]
    status, first, err = train(tmp_path, *sets)
    assert status == 0, err
    (tmp_path / "run" / "summary.json").unlink()
    status, again, err = train(tmp_path, *sets, more=["--resume"])
    assert status == 0, err
    first, again = strictly(first), strictly(again)
    assert again["weights_sha256"] == first["weights_sha256"]
    assert (again["loss"], again["accuracy"]) == (None, first["accuracy"])


def test_a_run_does_not_go_back(tmp_path):
    assert train(tmp_path, "run.steps=4")[0] == 0
    before = {path: path.read_bytes() for path in files_of(tmp_path / "run")}
    status, _, err = train(tmp_path, "run.steps=3", more=["--resume"])
    assert status == 2
    (line,) = said(err)
    assert line == (
        "syncline: rank 0: run.steps: got 3 to go on with a run that has taken 4 steps, but steps"
        " are not taken back. Use 4 steps or more, or start a new run in another folder."
    )
    job = tmp_path / "run" / "job.toml"
    before.pop(job)
    after = {path: path.read_bytes() for path in files_of(tmp_path / "run") if path != job}
    assert after == before


def files_of(folder: Path) -> list[Path]:
    return [Path(at, name) for at, _, names in os.walk(folder) for name in names]


def test_the_mean_of_infinities_is_no_number():
    assert mean_loss([1.0, 3.0]) == 2.0
    assert mean_loss([1.0, math.inf]) == math.inf
    assert math.isnan(mean_loss([math.inf, -math.inf]))
