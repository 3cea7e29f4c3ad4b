"""Strategies whose ranks do not wait for each other, in real processes."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import syncline
from apart import check_alone, check_apart, every_world, steps
from ranks import run_ranks
from syncline.checkpoint import digest_of, load, newest
from syncline.comm.meeting import Meeting
from syncline.config import parse_job
from syncline.errors import RankHung, UsageError
from syncline.measure.derive import derive
from syncline.session import current_session
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
from training import are_gone, ranks_of, start_training, train_forked
from worlds import cluster

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parent.parent
DIGITS = ROOT / "examples" / "digits.toml"

STRATEGIES = {
    "pull": lambda: Gossip(GossipSettings()),
    "pull, early": lambda: Gossip(GossipSettings(early=True)),
    "push": lambda: Gossip(GossipSettings(rule="push")),
    "push-sum": lambda: Gossip(GossipSettings(rule="push", push_sum=True)),
    "elastic": lambda: Elastic(ElasticSettings()),
    "elastic, early": lambda: Elastic(ElasticSettings(early=True)),
    "elastic, synchronous": lambda: Elastic(ElasticSettings(synchronous=True)),
    "elastic, every other step": lambda: Elastic(ElasticSettings(period=2)),
    "server": lambda: Server(ServerSettings()),
    "server, early": lambda: Server(ServerSettings(early=True)),
    "server, bounded": lambda: Server(ServerSettings(max_staleness=1)),
    "server, every other step": lambda: Server(ServerSettings(period=2)),
}
every_strategy = pytest.mark.parametrize("name", STRATEGIES)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 40), nn.BatchNorm1d(40), nn.Tanh(), nn.Linear(40, 5))


def halving(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


SMALL = {"overlap": True, "bucket_bytes": 2000}


@pytest.mark.parametrize("overlap", [True, False])
@every_strategy
def test_one_rank_alone_is_plain_sgd_bit_for_bit(name, overlap, alone):
    if name == "server, every other step":
        pytest.skip("it pushes sums of gradients: other arithmetic")
    options = SMALL | {"overlap": overlap}
    check_alone(network, sgd, STRATEGIES[name](), halving, **options)


@every_world
@every_strategy
def test_ranks_hold_different_parameters_and_one_model_represents_the_run(name, world):
    found = check_apart(world, network, sgd, STRATEGIES[name], halving, **SMALL)
    assert all(report["exchanges"] > 0 for _, report in found)


@pytest.mark.parametrize("in_shards", [False, True])
def test_a_dedicated_server_holds_the_parameters_and_serves_a_plain_loop(in_shards):
    def batches(loader):
        if not in_shards:
            yield from syncline.shard(loader)
        else:
            for shards in syncline.shards(loader):
                yield from shards

    def work():
        syncline.init()
        model = network()
        optimizer = sgd(model)
        server = Server(ServerSettings(servers=1))
        replica = syncline.distribute(model, optimizer, server, overlap=True, bucket_bytes=2000)
        samples = torch.utils.data.TensorDataset(torch.randn(64, 20))
        count, whole = 0, []
        for (x,) in batches(torch.utils.data.DataLoader(samples, batch_size=8)):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            count += 1
            if count % 2 == 0:  # the server meets those who ask for the whole
                with replica.whole():
                    whole.append(digest_of(model.state_dict()))
        return whole, count, dict(replica.strategy.staleness)

    results = run_ranks(3, work)
    assert [count for _, count, _ in results] == [4, 4, 0]
    first, second, third = (whole for whole, _, _ in results)
    assert first == second
    assert len(set(first)) == 2
    assert third == []
    # 64 samples in steps of two workers with 8 each; two parameters' buckets, so some pushes each.
    pushes = [sum(staleness.values()) for _, _, staleness in results]
    assert pushes[0] == pushes[1] > 0
    assert pushes[2] == 0


class Sometimes(nn.Module):
    """A network with a layer that gets a gradient in every other step."""

    def __init__(self):
        super().__init__()
        self.body, self.extra = network(), nn.Linear(5, 5)
        self.turn = 0

    def forward(self, x):
        self.turn += 1
        y = self.body(x)
        return self.extra(y) if self.turn % 2 else y


@pytest.mark.parametrize("kind", ["auto", "network"])
def test_one_worker_of_a_dedicated_server_is_plain_sgd_bit_for_bit(kind):
    """The server takes no step of its own: settings and missing gradients come with the push.

    Its model is the whole as well, also when it is asked for after the workers have left.
    """

    def loop(shard=lambda loader: loader, distribute=lambda model, optimizer: None):
        torch.manual_seed(1)
        model = Sometimes()
        optimizer = sgd(model)
        samples = torch.utils.data.TensorDataset(torch.randn(48, 20))
        replica = distribute(model, optimizer)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        for (x,) in shard(torch.utils.data.DataLoader(samples, batch_size=8)):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        with replica.whole() if replica else contextlib.nullcontext():
            state = model.state_dict().items()  # without counters: a server has seen no batch
            return digest_of({key: value for key, value in state if value.is_floating_point()})

    def work():
        syncline.init(comm=kind)
        server = Server(ServerSettings(servers=1, early=False))
        return loop(syncline.shard, functools.partial(syncline.distribute, strategy=server))

    assert run_ranks(2, work) == [loop()] * 2


def test_a_dropped_gradient_does_not_part_a_rank_from_the_center():
    """What the center has moved towards a rank, the rank moves towards the center: a sum stays."""

    def work():
        rank = syncline.init()
        model = network()
        optimizer = sgd(model)
        replica = syncline.distribute(
            model, optimizer, Elastic(), overlap=True, bucket_bytes=2000, shards=2
        )
        sums = []
        steps(model, optimizer, rank, schedule=halving)
        for turn in range(3):
            own = torch.cat([p.detach().double().reshape(-1) for p in model.parameters()])
            with replica.whole():
                center = torch.cat([p.detach().double().reshape(-1) for p in model.parameters()])
            sums.append([own.tolist(), center.tolist()])
            if turn < 2:
                model(torch.ones(8, 20)).square().mean().backward()
                syncline.discard_gradients(model)
        return sums

    first, second = (torch.tensor(sums, dtype=torch.float64) for sums in run_ranks(2, work))
    assert torch.equal(first[:, 1], second[:, 1]), "one center"
    totals = first[:, 0] + second[:, 0] + first[:, 1]
    assert not torch.allclose(first[0, 0], first[1, 0], atol=1e-4), "the rank has moved"
    assert torch.allclose(totals[0], totals[2], atol=1e-6)


def test_a_strategy_drives_one_model(alone):
    syncline.init()
    strategy, model, other = Gossip(), network(), network()
    syncline.distribute(model, sgd(model), strategy)
    with pytest.raises(UsageError, match="drives another model already"):
        syncline.distribute(other, sgd(other), strategy)


@pytest.mark.parametrize("kind", ["auto", "network"])
def test_a_rank_that_never_comes_to_a_meeting_is_named(kind):
    def work():
        rank = syncline.init(comm=kind, hung_s=1.0)
        session = current_session()
        meeting = Meeting(session.comm)
        session.comm.barrier()
        if rank == 2:
            time.sleep(4.0)
            return None
        session.control.progress.write("evaluate")
        try:
            meeting.meet()
        except RankHung as error:
            return [error.rank, str(error)]

    first, second, _ = run_ranks(3, work)
    for rank, said in (first, second):
        assert rank == 2
        assert "meeting 1 waits for rank [2]" in said


JOB = """
[model]
name = "cnn"
[data]
name = "digits"
batch = 32
[optimizer]
lr = 0.02
[strategy]
name = "{name}"
bucket_bytes = 100000
overlap = true
[run]
steps = 8
"""


@pytest.mark.parametrize("name", ["gossip", "elastic", "server"])
def test_a_real_and_a_virtual_run_exchange_as_often_and_as_much(name, tmp_path):
    job = tmp_path / "job.toml"
    job.write_text(JOB.format(name=name))
    real = train_forked(job, tmp_path / "run", ranks=4)["strategy"]
    resolved = parse_job(job.read_text()).resolved(4)
    learning = Learning(resolved)
    workload = derive(learning.model, learning.data.sample_shape, 8, 1e9, 0.0, "digits")
    found = simulate(
        workload,
        cluster(4, 4, rate=1e9),
        lambda: make_strategy(name, resolved.strategy.settings),
        steps=8,
        shards=4,
        bucket_bytes=100_000,
        learning=learning,
    )
    virtual = found.strategy
    keys = ("exchanges", "exchanged_bytes")
    assert {key: real[key] for key in keys} == {key: virtual[key] for key in keys}
    assert real["exchanges"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(("name", "rank"), [("gossip", 2), ("elastic", 0)])
def test_the_others_finish_when_a_rank_is_killed(name, rank, tmp_path):
    folder = tmp_path / "run"
    segments = set(Path("/dev/shm").iterdir())
    sets = (f"strategy.name={name}", "strategy.shards=", "data.batch=48", "run.epochs=12")
    running = start_training(DIGITS, folder, *sets, ranks=3)
    metrics = folder / "metrics.jsonl"
    deadline = time.monotonic() + 60
    while not (metrics.exists() and metrics.read_text().count("\n") >= 40):
        assert time.monotonic() < deadline, "no progress"
        assert running.poll() is None, running.communicate()
        time.sleep(0.02)
    ranks = ranks_of(running)
    os.kill(ranks[rank], signal.SIGKILL)
    out, said = running.communicate(timeout=60)
    assert running.returncode == 0, said
    found = json.loads(out)
    assert found["steps"] == 12 * (1437 // 48)
    assert list(found["gone"]) == [str(rank)]
    for other in {0, 1, 2} - {rank}:
        assert f"rank {other}: rank {rank} died at step " in said
    assert found["accuracy"] > 0.93
    lines = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    assert lines == sorted(set(lines))
    assert are_gone(ranks)
    assert set(Path("/dev/shm").iterdir()) <= segments


@pytest.mark.slow
def test_a_job_may_have_dedicated_servers_and_lose_a_worker(tmp_path):
    started = start_training(
        DIGITS,
        tmp_path / "run",
        *("strategy.name=server", "strategy.server.servers=1", "strategy.shards="),
        *("data.batch=48", "run.steps=60", "run.checkpoint_every=50", "run.hung_s=3"),
        *("optimizer.lr=0.01", "optimizer.momentum=0.5"),
        # Nobody meets for longer than hung_s: the server waits for those who get on.
        'faults=[{rank=1, step=40, kind="death"}, {rank=2, step=5, kind="pause", seconds=2.5}, '
        '{rank=2, step=15, kind="pause", seconds=2.5}]',
        ranks=4,
    )
    out, said = started.communicate()
    assert started.returncode == 0, said
    found = json.loads(out)
    assert list(found["gone"]) == ["1"]
    assert found["shards"] == 3
    assert 1.0 < found["strategy"]["mean_staleness"] < 2.5
    saved = load(newest(tmp_path / "run" / "checkpoints"))
    assert set(saved.optimizer) == {
        name for name in saved.model if name.endswith(("weight", "bias"))
    }
    assert all("momentum_buffer" in state for state in saved.optimizer.values())


@pytest.mark.parametrize("name", ["gossip", "elastic"])
def test_a_run_goes_on_with_what_each_rank_had(name, tmp_path):
    sets = [f"strategy.name={name}", "strategy.shards=", "run.steps=40", "run.checkpoint_every=40"]
    sets += ["optimizer.schedule=constant"]  # a cosine's rates depend on the number of steps
    first = train_forked(DIGITS, tmp_path / "run", *sets, ranks=2)
    saved = [tmp_path / "run" / "checkpoints" / f"rank-{rank}" for rank in range(2)]
    models = [load(newest(folder)).model for folder in saved]
    whole = load(newest(tmp_path / "run" / "checkpoints"))
    assert digest_of(whole.model) == first["weights_sha256"]
    assert len({digest_of(model) for model in [*models, whole.model]}) == 3
    sets[2] = "run.steps=41"
    found = train_forked(DIGITS, tmp_path / "run", *sets, ranks=2, resume=True)
    assert found["resumed_at"] == 40
    if name == "gossip":
        # One small step, and a mix or none with the other rank: the mean is what it was.
        mean = [sum(m[key] for m in models) / 2 for key in whole.model if "weight" in key]
        now = load(newest(tmp_path / "run" / "checkpoints")).model
        kept = [now[key] for key in now if "weight" in key]
        assert all(torch.allclose(a, b, atol=0.05) for a, b in zip(mean, kept, strict=True))


def test_a_rank_that_is_new_begins_with_nothing_of_anothers(tmp_path):
    """Push-sum's weights are as many as there are ranks."""
    sets = [
        "optimizer.schedule=constant",  # a cosine's rates depend on the number of steps
        *("strategy.name=gossip", "strategy.gossip.rule=push", "strategy.gossip.push_sum=true"),
        *("strategy.shards=", "data.batch=48", "run.steps=31", "run.checkpoint_every=31"),
    ]
    train_forked(DIGITS, tmp_path / "run", *sets, ranks=2)

    def mass(ranks):
        folder = tmp_path / "run" / "checkpoints"
        saved = [load(newest(folder / f"rank-{rank}")).strategy for rank in range(ranks)]
        keys = [min(key for key in one if key.startswith("weights/")) for one in saved]
        return sum(one[key].sum().item() for one, key in zip(saved, keys, strict=True))

    assert mass(2) == pytest.approx(2.0)
    sets[-2] = "run.steps=40"
    found = train_forked(DIGITS, tmp_path / "run", *sets, ranks=3, resume=True)
    assert mass(3) == pytest.approx(3.0)
    # Steps of the run before are not counted.
    assert found["samples_per_s"] < 2 * 48 / found["step_s"]


def test_samples_a_second_are_those_of_all_ranks(tmp_path):
    sets = ["strategy.name=gossip", "strategy.shards=", "data.batch=48", "run.steps=24"]
    # So slow that two of them add little: on a loaded machine rank 0's own rate varies as well.
    slow = "faults=[" + ",".join(
        f'{{rank={rank}, step=0, kind="slow", factor=30, steps=24}}' for rank in (1, 2)
    )
    found = train_forked(DIGITS, tmp_path / "run", *sets, slow + "]", ranks=3)
    if_all_were_as_fast = 48 / found["step_s"]
    assert found["samples_per_s"] < 0.6 * if_all_were_as_fast


def test_a_dead_server_ends_the_run_with_a_checkpoint_to_go_on_from(tmp_path):
    sets = ["strategy.name=server", "run.steps=40", "run.checkpoint_every=10"]
    fault = 'faults=[{rank=1, step=25, kind="death"}]'
    died = start_training(DIGITS, tmp_path / "run", *sets, fault, ranks=2)
    _, said = died.communicate()
    assert died.returncode == 1
    assert "rank 1 died at step 2" in said
    assert "to go on from the last checkpoint" in said
    resumed = start_training(DIGITS, tmp_path / "run", *sets, ranks=2, more=["--resume"])
    out, said = resumed.communicate()
    assert resumed.returncode == 0, said
    assert json.loads(out)["resumed_at"] == 20
