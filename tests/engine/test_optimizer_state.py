"""The optimizer's state in torch's format: whole on one rank, loaded on any number of ranks."""

from __future__ import annotations

import copy
import functools
import os
import time

import pytest
import torch
from torch import nn

import syncline
from ranks import RankError, run_ranks
from syncline.checkpoint import digest_of
from syncline.engine.early import EarlyUpdates
from syncline.engine.steps import Steps
from syncline.errors import RankFailed, UsageError
from syncline.strategies import Server, ServerSettings

pytestmark = pytest.mark.processes

SHARDS = 6


class Net(nn.Module):
    """A scalar, an odd matrix, a tied weight, a layer that is used seldom, one that never is."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 33)
        self.last = nn.Linear(33, 8)
        self.tied = nn.Linear(8, 33, bias=False)
        self.tied.weight = self.first.weight
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.seldom = nn.Linear(8, 8)
        self.never = nn.Linear(3, 3)

    def forward(self, x, step):
        x = self.last(torch.tanh(self.first(x))) * self.scale
        x = self.seldom(x) if step % 2 else x
        return self.tied(x)


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "plain sgd": lambda p: torch.optim.SGD(p, lr=0.1),
}


def make(optimizer="adamw"):
    torch.manual_seed(0)
    model = Net()
    chosen = OPTIMIZERS[optimizer](model.parameters())
    return model, chosen, torch.optim.lr_scheduler.CosineAnnealingLR(chosen, 8)


def backward(model, replica, step):
    for shard in replica.my_shards:
        replica.begin_shard(shard)
        generator = torch.Generator().manual_seed(100 * step + shard)
        model(torch.randn(5, 8, generator=generator), step).square().mean().backward()


def take_steps(model, optimizer, scheduler, replica, steps):
    for step in steps:
        backward(model, replica, step)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()


def flat(packed):
    """Return torch's state as tensors by text, so that it has a digest."""
    found = {}
    for number, values in packed["state"].items():
        assert isinstance(number, int)
        for key, value in values.items():
            found[f"{number}/{key}"] = torch.as_tensor(value).clone()
    for number, group in enumerate(packed["param_groups"]):
        found[f"lr {number}"] = torch.tensor(group["lr"], dtype=torch.float64)
        found[f"params {number}"] = torch.tensor(group["params"])
    return found


def shapes(packed):
    return sorted((key, list(value.shape), str(value.dtype)) for key, value in flat(packed).items())


def train(steps, *, optimizer="adamw", comm="auto", **settings):
    """Take steps; return digests of the weights and of the state, and the state's shapes."""
    syncline.init(comm=comm)
    model, chosen, scheduler = make(optimizer)
    replica = syncline.distribute(model, chosen, shards=SHARDS, **settings)
    take_steps(model, chosen, scheduler, replica, range(steps))
    packed = chosen.state_dict()
    return digest_of(model.state_dict()), digest_of(flat(packed)), shapes(packed)


@functools.cache
def trained_alone(overlap):
    (found,) = run_ranks(1, lambda: train(3, overlap=overlap))
    return found


@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
@pytest.mark.parametrize("overlap", [True, False])
def test_every_rank_gets_the_whole_state_in_torch_s_format(optimizer, overlap):
    settings = {"optimizer": optimizer, "overlap": overlap, "bucket_bytes": 1024}
    (alone,) = run_ranks(1, lambda: train(3, **settings))
    assert run_ranks(3, lambda: train(3, **settings)) == [alone] * 3
    # Keys, shapes and types are those of a plain loop.
    model, plain, scheduler = make(optimizer)
    for step in range(3):
        model(torch.ones(5, 8), step).square().mean().backward()
        plain.step()
        plain.zero_grad()
        scheduler.step()
    assert alone[2] == [list(one) for one in shapes(plain.state_dict())]


@pytest.mark.parametrize("comm", ["auto", "network"])
@pytest.mark.parametrize("others", ["compute", "step", "sleep", "leave"])
@pytest.mark.parametrize("overlap", [True, False])
def test_one_rank_alone_reads_the_whole_state_whatever_the_others_do(overlap, others, comm):
    expected = trained_alone(overlap)

    def work():
        rank = syncline.init(comm=comm)
        model, optimizer, scheduler = make()
        replica = syncline.distribute(model, optimizer, shards=SHARDS, overlap=overlap)
        take_steps(model, optimizer, scheduler, replica, range(3))
        if rank == 0:
            time.sleep(0.3)  # the others are far ahead by now, or gone as far as they can go
            packed = optimizer.state_dict()
            found = digest_of(flat(packed))
            assert not optimizer.state  # the whole is not kept on this rank
        elif others == "compute":
            backward(model, replica, 3)
            time.sleep(0.6)
        elif others == "sleep":
            time.sleep(0.6)
        elif others == "leave":
            return None
        if others in ("compute", "step"):
            if rank == 0 or others == "step":
                backward(model, replica, 3)
            optimizer.step()
            replica.synchronize()
        return found if rank == 0 else None

    assert run_ranks(3, work)[0] == expected[1]


def test_ranks_on_several_machines_read_over_tcp():
    expected = trained_alone(None)

    def work():
        rank = syncline.init()
        model, optimizer, scheduler = make()
        replica = syncline.distribute(model, optimizer, shards=SHARDS, overlap=True)
        take_steps(model, optimizer, scheduler, replica, range(3))
        return digest_of(flat(optimizer.state_dict())) if rank == 3 else None

    assert run_ranks(4, work, machines=2)[3] == expected[1]


@pytest.mark.parametrize("turn", ["before step", "after backward"])
def test_state_is_that_of_before_an_early_update(turn):
    def work(early):
        EarlyUpdates.decide = lambda self, step_s: setattr(self, "_is_wanted", True)
        rank = syncline.init(comm="network")
        model, optimizer, scheduler = make("sgd")
        settings = {"overlap": True, "bucket_bytes": 256, "early": early}
        replica = syncline.distribute(model, optimizer, shards=SHARDS, **settings)
        found, taken, run_early = [], [], Steps.run_early
        Steps.run_early = lambda self, *args: taken.append(1) or run_early(self, *args)
        for step in range(5):
            backward(model, replica, 2 * step + 1)  # an odd one uses all layers
            if turn == "after backward":
                time.sleep(0.05 * (1 - rank))  # the peers have updated early by now
                found.append(digest_of(flat(optimizer.state_dict())))
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            if turn == "before step" and rank == 0:
                found.append(digest_of(flat(optimizer.state_dict())))
        return found, digest_of(model.state_dict()), replica._parts.early.why_not, len(taken)

    late, early = run_ranks(2, lambda: work(False)), run_ranks(2, lambda: work(True))
    assert [one[:2] for one in early] == [one[:2] for one in late]
    assert early[0][2] is None  # reading does not end early updates
    assert early[0][3] >= 4 > late[0][3] == 0


def resume(saved, when, steps, optimizer="adamw"):
    """Go on from a file, loaded before distribute, after it, or after a step."""
    syncline.init()
    model, chosen, scheduler = make(optimizer)
    packed = torch.load(saved, weights_only=True)

    def load():
        model.load_state_dict(packed["model"])
        scheduler.load_state_dict(packed["scheduler"])
        chosen.load_state_dict(packed["optimizer"])

    if when == "before distribute":
        load()
    replica = syncline.distribute(model, chosen, shards=SHARDS)
    if when == "after a step":
        take_steps(model, chosen, scheduler, replica, range(1))
    if when != "before distribute":
        load()
    take_steps(model, chosen, scheduler, replica, steps)
    state = digest_of(flat(chosen.state_dict()))
    return digest_of(model.state_dict()), state, scheduler.get_last_lr()


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "adafactor"])
@pytest.mark.parametrize("when", ["before distribute", "after distribute", "after a step"])
def test_rank_0_saves_and_another_number_of_ranks_goes_on(when, optimizer, tmp_path):
    saved = tmp_path / "saved.pt"
    (unbroken,) = run_ranks(1, lambda: train(6, optimizer=optimizer))

    def work():
        rank = syncline.init()
        model, chosen, scheduler = make(optimizer)
        replica = syncline.distribute(model, chosen, shards=SHARDS)
        take_steps(model, chosen, scheduler, replica, range(3))
        if rank == 0:
            parts = {"model": model, "optimizer": chosen, "scheduler": scheduler}
            torch.save({name: part.state_dict() for name, part in parts.items()}, saved)

    run_ranks(2, work)
    rate = make(optimizer)[2]
    for _ in range(6):
        rate.optimizer._opt_called = True
        rate.step()
    for size in (1, 3):
        for found in run_ranks(size, lambda: resume(saved, when, range(3, 6), optimizer)):
            assert found[:2] == list(unbroken[:2]), size
            assert found[2] == rate.get_last_lr()


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("when", ["before distribute", "before the first step", "between steps"])
def test_state_loaded_on_one_rank_only_is_refused_at_the_next_step(when, overlap):
    def work():
        rank = syncline.init()
        model, optimizer, scheduler = make()
        other = make()[:2]
        other[0](torch.ones(5, 8), 1).mean().backward()
        other[1].step()
        packed = other[1].state_dict()
        if when == "before distribute" and rank == 0:
            optimizer.load_state_dict(packed)
        replica = syncline.distribute(model, optimizer, shards=SHARDS, overlap=overlap)
        if when == "between steps":
            take_steps(model, optimizer, scheduler, replica, range(1))
        if when != "before distribute" and rank == 0:
            optimizer.load_state_dict(packed)

        def go_on():
            take_steps(model, optimizer, scheduler, replica, range(1, 2))
            replica.synchronize()

        with pytest.raises(UsageError, match="loaded optimizer state that others have not"):
            go_on()

    run_ranks(2, work)


def test_different_state_on_different_ranks_is_refused():
    def work():
        rank = syncline.init()
        model, optimizer, scheduler = make()
        replica = syncline.distribute(model, optimizer, shards=SHARDS)
        take_steps(model, optimizer, scheduler, replica, range(2))
        packed = copy.deepcopy(optimizer.state_dict())
        packed["state"][0]["exp_avg"] += rank
        optimizer.load_state_dict(packed)
        with pytest.raises(UsageError, match="loaded optimizer state that others have not"):
            take_steps(model, optimizer, scheduler, replica, range(2, 3))

    run_ranks(2, work)


@pytest.mark.parametrize("overlap", [True, False])
def test_a_reader_gets_the_state_of_before_what_the_others_have_loaded_already(overlap):
    def work():
        rank = syncline.init()
        model, optimizer, scheduler = make()
        replica = syncline.distribute(model, optimizer, shards=SHARDS, overlap=overlap)
        take_steps(model, optimizer, scheduler, replica, range(2))
        first = copy.deepcopy(optimizer.state_dict())
        take_steps(model, optimizer, scheduler, replica, range(2, 4))
        before = digest_of(flat(optimizer.state_dict())) if rank == 1 else None
        if rank == 0:
            time.sleep(0.4)  # rank 1 has loaded by now
            before = digest_of(flat(optimizer.state_dict()))
        optimizer.load_state_dict(first)
        after = digest_of(flat(optimizer.state_dict()))
        return before, after, digest_of(flat(first))

    one, other = run_ranks(2, work)
    assert one == other
    assert one[1] == one[2] != one[0]


def test_the_death_of_an_owner_is_named_while_its_state_is_read():
    def work():
        rank = syncline.init()
        model, optimizer, scheduler = make()
        replica = syncline.distribute(model, optimizer, shards=SHARDS)
        take_steps(model, optimizer, scheduler, replica, range(2))
        if rank == 1:
            os._exit(3)
        time.sleep(0.5)
        with pytest.raises(RankFailed, match="rank 1 died"):
            optimizer.state_dict()
        raise ArithmeticError("this rank is done")

    with pytest.raises(RankError, match="this rank is done"):
        run_ranks(2, work)


def test_a_rank_that_stays_for_others_ends_at_once_when_they_fail():
    def work():
        rank = syncline.init()
        model, optimizer, scheduler = make()
        replica = syncline.distribute(model, optimizer, shards=SHARDS)
        take_steps(model, optimizer, scheduler, replica, range(2))
        if rank == 0:
            time.sleep(0.3)
            raise ArithmeticError("rank 0 ends badly")

    started = time.monotonic()
    with pytest.raises(RankError, match="rank 0 ends badly"):
        run_ranks(3, work)
    assert time.monotonic() - started < 20


@pytest.mark.parametrize("strategy", ["gossip", "elastic", "local"])
def test_a_rank_with_a_replica_of_its_own_gets_its_own_state(strategy):
    def work():
        rank = syncline.init()
        model, optimizer, scheduler = make("sgd")
        replica = syncline.distribute(model, optimizer, strategy)
        take_steps(model, optimizer, scheduler, replica, range(2))
        mine = optimizer.state_dict()
        optimizer.load_state_dict(copy.deepcopy(mine))
        assert rank == 0 or digest_of(flat(optimizer.state_dict())) == digest_of(flat(mine))
        take_steps(model, optimizer, scheduler, replica, range(2, 3))
        return digest_of(flat(mine))

    one, other = run_ranks(2, work)
    assert one != other


@pytest.mark.parametrize("settings", [ServerSettings(), ServerSettings(servers=1)])
def test_a_server_s_whole_state_is_read_by_one_rank(settings):
    def work():
        rank = syncline.init()
        model, optimizer, scheduler = make("sgd")
        replica = syncline.distribute(model, optimizer, Server(settings))
        data = torch.utils.data.DataLoader(torch.arange(8), batch_size=2)
        for _ in syncline.shard(data):
            take_steps(model, optimizer, scheduler, replica, range(1, 2))
        if rank == 0:
            time.sleep(0.2)
            packed = optimizer.state_dict()
            whole = shapes(packed)
            buffers = [values["momentum_buffer"] for values in packed["state"].values()]
            return whole, all(buffer.abs().sum() > 0 for buffer in buffers), len(buffers)
        return None

    whole, moved, count = run_ranks(2, work)[0]
    assert moved
    assert count == 7  # all but the layer that is never used
    model, plain, _ = make("sgd")
    model(torch.ones(5, 8), 1).square().mean().backward()
    plain.step()
    assert whole == [list(one) for one in shapes(plain.state_dict())]


# What is refused, in a world of one.


@pytest.fixture
def trained(alone):
    syncline.init()
    model, optimizer, scheduler = make()
    replica = syncline.distribute(model, optimizer)
    take_steps(model, optimizer, scheduler, replica, range(2))
    return model, optimizer


def test_state_by_name_is_strict_about_names_keys_and_shapes(trained):
    model, _ = trained
    state = syncline.optimizer_state(model)
    good = copy.deepcopy(state)

    def refused(change, text):
        changed = copy.deepcopy(good)
        change(changed)
        with pytest.raises(UsageError, match=text):
            syncline.load_optimizer_state(model, changed)

    refused(lambda s: s.update(other=s.pop("scale")), "holds parameter 'other', but the optimizer")
    refused(lambda s: s["scale"].pop("exp_avg"), "of parameter scale holds exp_avg_sq, step, but")
    refused(
        lambda s: s["scale"].update(momentum_buffer=torch.zeros(())),
        "AdamW keeps exp_avg, exp_avg_sq, step",
    )
    refused(
        lambda s: s["last.weight"].update(exp_avg=torch.zeros(33, 8)),
        r"exp_avg of parameter last.weight has shape \(33, 8\), but AdamW keeps \(8, 33\)",
    )
    refused(lambda s: s.clear(), "is empty, but steps were taken")
    after = syncline.optimizer_state(model)
    assert all(torch.equal(after[n][k], good[n][k]) for n in good for k in good[n])


def test_names_of_a_compiled_model_and_torch_s_format_are_taken(trained):
    model, optimizer = trained
    state = copy.deepcopy(syncline.optimizer_state(model))
    state["scale"]["exp_avg"].fill_(7.0)
    syncline.load_optimizer_state(model, {f"_orig_mod.{n}": v for n, v in state.items()})
    assert syncline.optimizer_state(model)["scale"]["exp_avg"] == 7.0
    packed = copy.deepcopy(optimizer.state_dict())
    packed["state"][0]["exp_avg"].fill_(8.0)
    packed["param_groups"][0]["lr"] = 0.125
    syncline.load_optimizer_state(model, packed)
    assert optimizer.state_dict()["state"][0]["exp_avg"].mean() == 8.0
    assert optimizer.param_groups[0]["lr"] == 0.125


def test_torch_s_format_is_strict_as_well(trained):
    model, optimizer = trained
    good = copy.deepcopy(optimizer.state_dict())
    wrong = copy.deepcopy(good)
    wrong["state"][0]["exp_avg"] = torch.zeros(2, 2)
    with pytest.raises(UsageError, match=r"has shape \(2, 2\)"):
        optimizer.load_state_dict(wrong)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    wrong = {"state": {0: {"momentum_buffer": torch.zeros(33, 8)}}, **sgd.state_dict()}
    wrong = {**wrong, "state": {0: {"momentum_buffer": torch.zeros(33, 8)}}}
    with pytest.raises(UsageError, match="holds momentum_buffer, but AdamW keeps exp_avg"):
        optimizer.load_state_dict({**good, "state": wrong["state"]})
    with pytest.raises(UsageError, match=r"takes what optimizer.state_dict.. returned"):
        optimizer.load_state_dict(syncline.optimizer_state(model))
    short = copy.deepcopy(good)
    short["param_groups"][0]["params"].pop()
    with pytest.raises(UsageError, match="it belongs to another model"):
        optimizer.load_state_dict(short)
    assert digest_of(flat(optimizer.state_dict())) == digest_of(flat(good))


def test_a_fresh_state_starts_the_optimizer_anew(alone):
    syncline.init()
    results = []
    for is_ours in (True, False):
        model, optimizer, _ = make()
        fresh = copy.deepcopy(optimizer.state_dict())
        replica = syncline.distribute(model, optimizer) if is_ours else None
        for turn in range(2):
            for step in range(2):
                if is_ours:
                    replica.begin_shard(0)
                model(torch.ones(5, 8), step).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            if turn == 0:
                optimizer.load_state_dict(copy.deepcopy(fresh))
        results.append((digest_of(model.state_dict()), digest_of(flat(optimizer.state_dict()))))
    assert results[0] == results[1]


def test_state_of_a_frozen_parameter_is_kept(alone):
    syncline.init()
    model, optimizer, _ = make()
    model(torch.ones(5, 8), 1).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    packed = copy.deepcopy(optimizer.state_dict())
    model.last.weight.requires_grad_(False)
    syncline.distribute(model, optimizer)
    model(torch.ones(5, 8), 1).square().mean().backward()
    optimizer.step()
    found = optimizer.state_dict()
    assert found["state"].keys() == packed["state"].keys()
    number = [name for name, _ in model.named_parameters()].index("last.weight")
    assert torch.equal(found["state"][number]["exp_avg"], packed["state"][number]["exp_avg"])
    assert found["state"][number]["step"] == 1


def rates_that_differ(overlap):
    rank = syncline.init()
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    syncline.distribute(model, optimizer, overlap=overlap)
    for step in range(4):
        model(torch.ones(2, 8)).sum().backward()
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + step + (rank if step == 2 else 0))
        try:
            optimizer.step()
            model.weight.sum().item()
        except syncline.SynclineError as error:
            return step, str(error)
        optimizer.zero_grad()
    return None


@pytest.mark.parametrize("overlap", [True, False])
def test_learning_rates_that_differ_between_ranks_are_refused(overlap):
    for step, error in run_ranks(2, lambda: rates_that_differ(overlap)):
        assert step == 2
        assert "learning rates" in error
