"""Loading a state dict is right on one rank and on all, or refused; it never disturbs a peer."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import syncline
import syncline.session
from ranks import RankError, run_ranks
from syncline.checkpoint import digest_of
from syncline.errors import UsageError
from syncline.session import current_session

pytestmark = pytest.mark.processes


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh())
        self.head = nn.Linear(16, 4)
        self.head.bias.requires_grad_(False)

    def forward(self, x):
        return self.head(self.body(x))


def make(seed=0):
    torch.manual_seed(seed)
    model = Net()
    trained = [p for p in model.parameters() if p.requires_grad]
    return model, torch.optim.SGD(trained, lr=0.1, momentum=0.9)


def batch(step, shard):
    return torch.randn(5, 8, generator=torch.Generator().manual_seed(100 * step + shard))


def take_step(model, optimizer, replica, step):
    for shard in replica.my_shards:
        replica.begin_shard(shard)
        model(batch(step, shard)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def start(comm="auto", **settings):
    rank = syncline.init(comm=comm)
    model, optimizer = make(rank)
    settings = {"shards": 4, "bucket_bytes": 512} | settings
    return rank, model, optimizer, syncline.distribute(model, optimizer, **settings)


def meet():
    current_session().lane.call(current_session().comm.barrier)


def copied(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("overlap", [True, False])
def test_a_rank_that_loads_and_evaluates_disturbs_no_other(overlap):
    def work():
        rank, model, optimizer, replica = start(overlap=overlap)
        take_step(model, optimizer, replica, 0)
        best = copied(model)
        for step in range(1, 3):
            take_step(model, optimizer, replica, step)
        replica.synchronize()
        before = digest_of(model.state_dict())
        meet()
        if rank == 0:
            model.load_state_dict(best)
        meet()
        model.eval()
        with torch.no_grad():
            model(batch(9, 0))
        return digest_of(model.state_dict()), before, digest_of(best)

    (mine, before, best), (other, _, _) = run_ranks(2, work)
    assert mine == best
    assert other == before
    assert best != before


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("part", ["", "body"])
def test_all_ranks_load_and_train_on(overlap, part):
    """Also a part of the model, which has hooks of its own."""

    def work():
        _, model, optimizer, replica = start(overlap=overlap)
        target = model.get_submodule(part)
        for step in range(3):
            take_step(model, optimizer, replica, step)
            if step == 0:
                kept = copied(target)
        target.load_state_dict(kept)
        for step in range(3, 5):
            take_step(model, optimizer, replica, step)
        replica.synchronize()
        return digest_of(model.state_dict()), any(bucket.has_copy for bucket in replica.buckets)

    (expected,) = run_ranks(1, work)
    assert run_ranks(2, work) == [expected] * 2
    assert run_ranks(4, work) == [expected] * 4
    assert not expected[1], "after the step ranks share one copy again"


@pytest.mark.parametrize(("ranks", "machines", "comm"), [(2, 1, "network"), (4, 2, "auto")])
def test_all_ranks_load_and_train_on_over_a_network(ranks, machines, comm):
    def work():
        _, model, optimizer, replica = start(comm, overlap=True)
        kept = copied(model)
        for step in range(24):  # early updates are tried in some of them
            take_step(model, optimizer, replica, step)
            if step % 5 == 4:
                model.load_state_dict(kept)
        return digest_of(model.state_dict())

    (expected,) = run_ranks(1, work)
    assert run_ranks(ranks, work, machines=machines) == [expected] * ranks


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("comm", ["auto", "network"])
def test_a_step_after_a_load_on_one_rank_is_refused_on_all(overlap, comm):
    def work():
        rank, model, optimizer, replica = start(comm, overlap=overlap)
        take_step(model, optimizer, replica, 0)
        kept = copied(model)
        take_step(model, optimizer, replica, 1)
        if rank == 1:
            model.load_state_dict(kept)
        with pytest.raises(UsageError) as caught:  # noqa: PT012
            take_step(model, optimizer, replica, 2)
            replica.synchronize()
        return str(caught.value)

    said = run_ranks(2, work)
    assert said[0] == said[1]
    assert said[0].startswith(
        "parameter body.0.weight differs between ranks: rank 1 holds other values than rank 0. "
        "Since the last step it was loaded or changed in place on rank 1: "
    )


def test_a_load_of_the_same_values_on_one_rank_changes_nothing():
    def work():
        rank, model, optimizer, replica = start()
        for step in range(4):
            take_step(model, optimizer, replica, step)
            if rank == 0 and step == 1:
                model.load_state_dict(copied(model))
        return digest_of(model.state_dict())

    (expected,) = run_ranks(1, work)
    assert run_ranks(2, work) == [expected] * 2


def test_parameters_that_need_no_gradient_are_compared_too():
    def work():
        rank, model, optimizer, replica = start()
        take_step(model, optimizer, replica, 0)
        if rank == 1:
            model.load_state_dict(copied(model) | {"head.bias": torch.ones(4)})
        take_step(model, optimizer, replica, 1)

    with pytest.raises(RankError, match=r"parameter head\.bias differs between ranks: rank 1"):
        run_ranks(2, work)


def test_a_load_on_one_rank_before_the_first_step_is_refused_at_that_step():
    def work():
        rank, model, optimizer, replica = start()
        if rank == 1:
            model.load_state_dict(make(5)[0].state_dict())
        take_step(model, optimizer, replica, 0)

    with pytest.raises(RankError, match=r"parameter body\.0\.weight differs between ranks"):
        run_ranks(2, work)


def test_a_load_on_all_ranks_before_the_first_step_is_right():
    def work():
        _, model, optimizer, replica = start()
        model.load_state_dict(make(5)[0].state_dict())
        take_step(model, optimizer, replica, 0)
        return digest_of(model.state_dict())

    (expected,) = run_ranks(1, work)
    assert run_ranks(2, work) == [expected] * 2


@pytest.mark.parametrize("part", ["", "body.1"])
@pytest.mark.parametrize("is_first", [True, False])
def test_statistics_that_are_loaded_are_the_start_of_every_shard(part, is_first):
    """A mean of 100 on data around 100 stays there, whatever the number of shards a rank has."""

    def loop(model, optimizer, take):
        if not is_first:
            take(0)
        if is_first:
            with torch.no_grad():
                model.body[0].weight.zero_()
        target = model.get_submodule(part)
        values = {
            name: torch.full_like(value, 100.0) if name.endswith("running_mean") else value
            for name, value in copied(target).items()
        }
        target.load_state_dict(values)
        take(1)
        return model.state_dict()["body.1.running_mean"].tolist()

    def work():
        _, model, optimizer, replica = start(private_parameters=True)
        model.body[0].bias.data.fill_(100.0) if is_first else None
        return loop(model, optimizer, lambda step: take_step(model, optimizer, replica, step))

    (expected,) = run_ranks(1, work)
    assert run_ranks(2, work) == [expected] * 2
    assert run_ranks(4, work) == [expected] * 4
    if is_first:
        assert expected == pytest.approx([100.0] * 16)
    else:
        assert min(expected) > 85.0, "every shard keeps nine tenths of what was loaded"


@pytest.mark.usefixtures("alone")
def test_a_load_between_two_shards_of_a_step_is_refused():
    syncline.init()
    model, optimizer = make()
    replica = syncline.distribute(model, optimizer, shards=2)
    take_step(model, optimizer, replica, 0)
    kept = copied(model)
    replica.begin_shard(0)
    model(batch(1, 0)).square().mean().backward()
    with pytest.raises(UsageError, match="between two shards"):
        model.load_state_dict(kept)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.usefixtures("alone")
def test_a_load_between_backward_and_step_has_plain_s_bits(overlap):
    syncline.init()
    results = []
    for is_ours in (False, True):
        model, optimizer = make()
        if is_ours:
            syncline.distribute(model, optimizer, overlap=overlap)
        kept = copied(model)
        for step in range(4):
            model(batch(step, 0)).square().mean().backward()
            if step % 2:
                model.load_state_dict(kept)
            optimizer.step()
            optimizer.zero_grad()
        results.append(digest_of(model.state_dict()))
    assert results[0] == results[1]
