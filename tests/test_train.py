"""`syncline train` for real: processes, data, checkpoints, kills."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from syncline.checkpoint import digest_of
from syncline.config import OptimizerSettings, read_job
from syncline.loader import epoch_order, reseed
from syncline.recipe import batch_of, build_model, build_optimizer, learning_rate, load_data
from training import are_gone, ranks_of, start_training, train_forked

ROOT = Path(__file__).parent.parent
DIGITS = ROOT / "examples" / "digits.toml"

pytestmark = pytest.mark.processes


def train(out, *sets, ranks=1, more=()):
    started = start_training(DIGITS, out, *sets, ranks=ranks, more=more, traced=ranks < 3)
    text, said = started.communicate()
    assert started.returncode == 0, said
    return json.loads(text)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """Thirty undisturbed steps on one rank, in a process that is started as a user's is."""
    out = tmp_path_factory.mktemp("one") / "run"
    command = [sys.executable, "-m", "syncline", "train", str(DIGITS), "--out", str(out), "--json"]
    done = subprocess.run(
        [*command, "--ranks", "1", "--set", "run.steps=30"], stdout=subprocess.PIPE, timeout=100
    )
    assert done.returncode == 0
    return json.loads(done.stdout)


@pytest.mark.timeout(180)
def test_the_promised_keys_are_in_the_json(reference):
    assert {
        "steps",
        "samples_per_s",
        "loss",
        "accuracy",
        "exposed_communication",
        "weights_sha256",
    } <= reference.keys()
    assert reference["steps"] == 30
    assert reference["accuracy"] > 0.9
    assert 0 <= reference["exposed_communication"] <= 1


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_any_number_of_ranks_gives_one_and_the_same_hash(tmp_path, reference, ranks):
    if ranks == 4:
        found = train(tmp_path / "run", "run.steps=30", ranks=ranks)
    else:
        found = train_forked(DIGITS, tmp_path / "run", "run.steps=30", ranks=ranks)
    for key in ("weights_sha256", "loss", "accuracy", "test_loss"):
        assert found[key] == reference[key], key
    text = (tmp_path / "run" / "metrics.jsonl").read_text()
    metrics = [json.loads(line) for line in text.splitlines()]
    assert [line["step"] for line in metrics] == list(range(1, 31))
    assert metrics[-1]["loss"] == found["loss"]


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 1)])
def test_killed_at_step_17_and_resumed_elsewhere_gives_the_same_hash(
    tmp_path, reference, before, after
):
    out = tmp_path / "run"
    sets = ["run.steps=30", "run.checkpoint_every=5"]
    running = start_training(DIGITS, out, *sets, ranks=before)
    wait_for_step(out, 17)
    for pid in ranks_of(running).values():
        os.kill(pid, signal.SIGKILL)
    assert running.wait(30) != 0
    assert not (out / "summary.json").exists()
    found = train(out, *sets, ranks=after, more=["--resume"])
    assert found["resumed_at"] in (15, 20, 25)
    assert found["weights_sha256"] == reference["weights_sha256"]
    text = (out / "metrics.jsonl").read_text()
    assert [json.loads(line)["step"] for line in text.splitlines()] == list(range(1, 31))


def wait_for_step(out, step):
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        metrics = out / "metrics.jsonl"
        if metrics.exists() and metrics.read_bytes().count(b"\n") >= step - 1:
            return
        time.sleep(0.002)
    raise AssertionError("the run did not get that far")


@pytest.mark.timeout(180)
def test_one_killed_rank_is_named_and_the_way_on_is_shown(tmp_path):
    out = tmp_path / "run"
    running = start_training(DIGITS, out, "run.epochs=500", "run.checkpoint_every=5", ranks=3)
    wait_for_step(out, 12)
    ranks = ranks_of(running)
    killed_at = time.monotonic()
    os.kill(ranks[2], signal.SIGKILL)
    _, text = running.communicate(timeout=30)
    assert time.monotonic() - killed_at < 5.0
    assert running.returncode == 1
    lines = text.splitlines()
    named = [line for line in lines if "died at step" in line]
    assert len(named) == 2, "each of the two others names it, once"
    assert len({line.split(": ", 1)[1] for line in named}) == 1
    assert any("--resume" in line for line in lines)
    assert are_gone(ranks)


def test_the_plain_loop_with_the_published_seeds_gives_the_same_hash(tmp_path):
    """One shard, one rank, against PyTorch and nothing else: clipping off, dropout and norm on."""
    sets = ["run.steps=12", "optimizer.warmup_steps=2", "strategy.shards=1", "run.ranks=1"]
    found = train_forked(DIGITS, tmp_path / "run", *sets)

    job = read_job(DIGITS, sets).resolved()
    torch.set_num_threads(job.run.threads)
    data = load_data(job)
    model = build_model(job, data)
    optimizer = build_optimizer(job.optimizer, model)
    order = epoch_order(len(data.train), job.run.seed, 0)
    for step in range(12):
        optimizer.param_groups[0]["lr"] = learning_rate(job.optimizer, step, 12)
        rows = order[step * 64 : (step + 1) * 64].numpy()
        images, labels = batch_of(data.train, rows)
        reseed(job.run.seed, step, 0)
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert digest_of(model.state_dict()) == found["weights_sha256"]


def test_a_batch_lies_in_memory_of_its_own_on_a_boundary():
    data = load_data(read_job(DIGITS).resolved())
    rows = epoch_order(len(data.train), 0, 0)[:7].numpy()
    images, labels = batch_of(data.train, rows)
    assert images.data_ptr() % 64 == 0
    assert images.is_contiguous()
    assert torch.equal(images, torch.from_numpy(data.train.batch(rows)[0]))
    assert labels.dtype == torch.int64


def test_learning_rates_follow_the_schedule():
    cosine = OptimizerSettings(lr=1.0, schedule="cosine", warmup_steps=2)
    assert [round(learning_rate(cosine, step, 10), 4) for step in (0, 1, 2, 6)] == [0.5, 1, 1, 0.5]
    steps = OptimizerSettings(lr=1.0, schedule="step", decay_steps=3, decay_factor=0.5)
    assert [learning_rate(steps, step, 9) for step in (0, 2, 3, 8)] == [1.0, 1.0, 0.5, 0.25]


@pytest.mark.parametrize("warmup_steps", [0, 3])
def test_milestones_are_those_of_torch(warmup_steps):
    own = OptimizerSettings(
        lr=0.5, schedule="milestones", milestones=(3, 4, 8), warmup_steps=warmup_steps
    ).resolved()
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 4, 8], gamma=0.1)
    for step in range(10):
        optimizer.step()
        wanted = optimizer.param_groups[0]["lr"]
        if step < warmup_steps:
            wanted *= (step + 1) / warmup_steps
        assert learning_rate(own, step, 10) == pytest.approx(wanted)
        scheduler.step()


@pytest.mark.timeout(120)
def test_clipping_and_adamw_over_the_network(tmp_path):
    sets = ["run.steps=6", "optimizer.warmup_steps=2", "optimizer.clip_norm=0.1"]
    sets += ["optimizer.name=adamw", "optimizer.momentum="]
    one = train_forked(DIGITS, tmp_path / "one", *sets)
    two = train_forked(DIGITS, tmp_path / "two", *sets, "strategy.comm=network", ranks=2)
    assert two["communicator"] == "network (tcp)"
    assert one["weights_sha256"] == two["weights_sha256"]
