"""Asynchronous strategies as they were published, and servers with a period, in real processes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import syncline
from apart import check_alone, check_apart, every_world, steps
from ranks import run_ranks
from syncline.checkpoint import digest_of
from syncline.config import parse_job
from syncline.errors import ConfigError, UsageError
from syncline.measure.derive import derive
from syncline.sim.learn import Learning
from syncline.sim.run import simulate
from syncline.strategies import (
    Elastic,
    ElasticSettings,
    Gossip,
    GossipSettings,
    Server,
    ServerSettings,
    make_strategy,
)
from training import ranks_of, start_training, train_forked
from worlds import cluster, workload

pytestmark = pytest.mark.processes

DIGITS = Path(__file__).parent.parent / "examples" / "digits.toml"

PUBLISHED = {
    "pull": lambda: Gossip(GossipSettings(as_published=True)),
    "push": lambda: Gossip(GossipSettings(as_published=True, rule="push")),
    "elastic": lambda: Elastic(ElasticSettings(as_published=True)),
    "elastic, every other step": lambda: Elastic(ElasticSettings(as_published=True, period=2)),
}
every_published = pytest.mark.parametrize("name", PUBLISHED)


class SometimesMore(nn.Module):
    """A layer that gets its first gradient in the second step lies in a bucket of its own."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(20, 40), nn.BatchNorm1d(40), nn.Tanh())
        self.extra, self.last = nn.Linear(40, 40), nn.Linear(40, 5)
        self.turn = 0

    def forward(self, x):
        self.turn += 1
        x = self.body(x)
        return self.last(x + self.extra(x) if self.turn > 1 else x)


def nesterov(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)


@every_published
def test_one_rank_alone_is_plain_sgd_bit_for_bit(name, alone):
    check_alone(SometimesMore, nesterov, PUBLISHED[name]())


@every_world
@every_published
def test_ranks_hold_different_parameters_and_one_model_represents_the_run(name, world):
    found = check_apart(world, SometimesMore, nesterov, PUBLISHED[name])
    assert {num_buckets for num_buckets, _ in found} == {2}
    if name == "push":  # one message for a step: the whole vector
        assert all(0 < report["exchanges"] <= 6 for _, report in found)


@pytest.mark.parametrize("name", ["pull", "elastic"])
def test_a_script_with_another_optimizer_is_refused(name, alone):
    syncline.init()
    model = SometimesMore()
    optimizer = torch.optim.AdamW(model.parameters())
    syncline.distribute(model, optimizer, PUBLISHED[name]())
    with pytest.raises(UsageError, match=r"mixes the parameters of torch\.optim\.SGD"):
        steps(model, optimizer, 0)


def test_a_script_cannot_choose_buckets_where_all_is_one_vector(alone):
    syncline.init()
    model = SometimesMore()
    with pytest.raises(ConfigError, match="says itself when ranks exchange"):
        syncline.distribute(model, nesterov(model), PUBLISHED["pull"](), overlap=True)


@pytest.mark.parametrize("as_published", [False, True])
def test_a_dedicated_center_serves_a_plain_loop(as_published):
    def work():
        syncline.init()
        model = SometimesMore()
        optimizer = nesterov(model)
        settings = ElasticSettings(servers=1, as_published=as_published)
        replica = syncline.distribute(model, optimizer, Elastic(settings))
        samples = torch.utils.data.TensorDataset(torch.randn(64, 20))
        count, whole = 0, []
        for (x,) in syncline.shard(torch.utils.data.DataLoader(samples, batch_size=8)):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            count += 1
            if count % 2 == 0:
                with replica.whole():
                    whole.append(digest_of(model.state_dict()))
        return whole, count, replica.run.report()["exchanges"]

    first, second, center = run_ranks(3, work)
    assert [count for _, count, _ in (first, second, center)] == [4, 4, 0]
    assert first[0] == second[0]
    assert len(set(first[0])) == 2
    # Two buckets, or one vector, in each of four steps; all calls go to the one center.
    assert first[2] == second[2] == (4 if as_published else 8)
    assert center[2] == 0


def test_a_job_may_have_a_dedicated_center_on_both_clocks(tmp_path):
    sets = [
        *("optimizer.schedule=constant", "strategy.name=elastic"),
        *("strategy.elastic.servers=1", "strategy.shards="),
        *("strategy.elastic.as_published=true", "optimizer.nesterov=true"),
        *("run.steps=20", "data.batch=64", "run.checkpoint_every=10", "optimizer.warmup_steps=2"),
    ]
    found = train_forked(DIGITS, tmp_path / "run", *sets, ranks=3)
    assert found["shards"] == 2
    assert found["loss"] < 2.4
    sets[-4] = "run.steps=24"
    again = train_forked(DIGITS, tmp_path / "run", *sets, ranks=3, resume=True)
    assert again["resumed_at"] == 20
    settings = parse_job(DIGITS.read_text(), sets=sets).resolved(3).strategy.settings
    outcome = simulate(
        workload((4096, 0.01, 0.02), (1024, 0.01, 0.01)),
        cluster(3, rate=1e6, latency_s=1e-3),
        lambda: Elastic(settings),
        steps=4,
        shards=2,
    )
    # Each worker sends and gets the whole vector in each step, the center calls nobody.
    assert outcome.sent_bytes == pytest.approx(2 / 3 * 2 * (4096 + 1024))


JOB = """
[model]
name = "cnn"
[data]
name = "digits"
batch = 36
[optimizer]
lr = 0.02
momentum = 0.9
nesterov = true
weight_decay = 0.001
[strategy]
name = "{name}"
[strategy.{name}]
{settings}
[run]
steps = 8
"""


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("gossip", "as_published = true"),
        ("gossip", "as_published = true\nrule = 'push'\nperiod = 2"),
        ("elastic", "as_published = true\nservers = 1"),
        ("server", "period = 3\nservers = 1"),
    ],
)
def test_a_real_and_a_virtual_run_exchange_as_often_and_as_much(name, settings, tmp_path):
    job = tmp_path / "job.toml"
    job.write_text(JOB.format(name=name, settings=settings))
    real = train_forked(job, tmp_path / "run", ranks=4)["strategy"]
    resolved = parse_job(job.read_text()).resolved(4)
    learning = Learning(resolved)
    found = simulate(
        derive(learning.model, learning.data.sample_shape, 9, 1e9, 0.0, "digits"),
        cluster(4, 4, rate=1e9),
        lambda: make_strategy(name, resolved.strategy.settings),
        steps=8,
        shards=resolved.strategy.shards,
        learning=learning,
    )
    keys = ("exchanges", "exchanged_bytes")
    assert {key: real[key] for key in keys} == {key: found.strategy[key] for key in keys}
    assert real["exchanges"] > 0


def test_a_dead_center_ends_the_run(tmp_path):
    """A dedicated rank has no parameters of its own with which another could take over."""
    sets = ["strategy.name=elastic", "strategy.elastic.servers=2", "strategy.shards="]
    sets += ["run.epochs=12", "run.checkpoint_every=5", "data.batch=64"]
    running = start_training(DIGITS, tmp_path / "run", *sets, ranks=3)
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 60
    while not (metrics.exists() and metrics.read_text().count("\n") >= 20):
        assert time.monotonic() < deadline, "no progress"
        assert running.poll() is None, running.communicate()
        time.sleep(0.02)
    os.kill(ranks_of(running)[1], signal.SIGKILL)
    _, said = running.communicate(timeout=60)
    assert running.returncode == 1
    assert "rank 0: rank 1 died at step " in said
    assert "to go on from the last checkpoint" in said


def test_a_server_with_a_period_goes_on_with_what_was_not_pushed(tmp_path):
    """One worker and one server: nothing depends on timing, so the hash is the unbroken run's."""
    sets = [
        *("strategy.name=server", "strategy.server.servers=1", "strategy.server.period=4"),
        *("strategy.shards=", "run.steps=10", "run.checkpoint_every=6", "optimizer.warmup_steps=2"),
    ]
    whole = train_forked(DIGITS, tmp_path / "whole", *sets, ranks=2)
    fault = 'faults=[{rank=0, step=7, kind="death"}]'
    died = start_training(DIGITS, tmp_path / "run", *sets, fault, ranks=2)
    _, said = died.communicate()
    assert died.returncode == 1, said
    resumed = start_training(DIGITS, tmp_path / "run", *sets, ranks=2, more=["--resume"])
    out, said = resumed.communicate()
    assert resumed.returncode == 0, said
    found = json.loads(out)
    assert found["resumed_at"] == 6
    assert found["weights_sha256"] == whole["weights_sha256"]


def test_a_rank_whose_own_checkpoint_is_missing_says_so(tmp_path):
    sets = ["strategy.name=gossip", "strategy.shards=", "run.steps=8", "optimizer.warmup_steps=2"]
    sets += ["optimizer.schedule=constant"]
    first = start_training(DIGITS, tmp_path / "run", *sets, ranks=2)
    first.communicate()
    assert first.returncode == 0
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "rank-1")
    sets[2] = "run.steps=9"
    resumed = start_training(DIGITS, tmp_path / "run", *sets, ranks=2, more=["--resume"])
    _, said = resumed.communicate()
    assert resumed.returncode == 0, said
    assert "rank 1 has no checkpoint of its own at step 8" in said
    assert said.count("the parameters that represent the run") == 1, "it says so once"


@pytest.mark.parametrize("period", [1, 2])
def test_a_change_that_a_pull_would_undo_is_refused(period, alone):
    syncline.init()
    model = SometimesMore()
    optimizer = nesterov(model)
    syncline.distribute(model, optimizer, Server(ServerSettings(period=period)))
    steps(model, optimizer, 0, count=2)
    with torch.no_grad():
        model.last.weight.mul_(0.9)
    with pytest.raises(UsageError, match=r"last\.weight was changed in place"):
        steps(model, optimizer, 0, count=1)
