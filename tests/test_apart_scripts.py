"""What people write in scripts with strategies whose ranks do not wait, in real processes."""

from __future__ import annotations

import contextlib
import os
import signal
import time

import numpy as np
import pytest
import torch
from torch import nn

import syncline
from ranks import collect, run_ranks, start_ranks
from syncline.checkpoint import digest_of
from syncline.errors import UsageError
from syncline.strategies import Elastic, Gossip, GossipSettings, Server, ServerSettings

pytestmark = pytest.mark.processes

DEDICATED = ServerSettings(servers=1, early=False)


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(20, 40), nn.Tanh(), nn.Linear(40, 5))


def sgd(model, lr=0.01):
    return torch.optim.SGD(model.parameters(), lr=lr)


def loader(num_samples=48):
    generator = torch.Generator().manual_seed(3)
    samples = torch.utils.data.TensorDataset(torch.randn(num_samples, 20, generator=generator))
    return torch.utils.data.DataLoader(samples, batch_size=8)


def one_step(model, optimizer, x=None):
    """Take a step, on samples of the rank's own if none are given."""
    model(torch.full((8, 20), 1.0 + syncline.rank()) if x is None else x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("name", ["gossip", "elastic", "server"])
@pytest.mark.parametrize("slow", [0, 1])
def test_a_plain_loop_ends_well_whoever_comes_last(name, slow):
    def work():
        rank = syncline.init(hung_s=10)
        model = network()
        optimizer = sgd(model)
        syncline.distribute(model, optimizer, name)
        count = 0
        for (x,) in syncline.shard(loader(96)):
            one_step(model, optimizer, x)
            count += 1
            time.sleep(0.05 * (rank == slow))
        return count

    assert run_ranks(2, work) == [6, 6]


def test_a_rank_that_is_slow_is_not_called_hung():
    def work():
        rank = syncline.init(hung_s=1.5)
        model = network()
        optimizer = sgd(model)
        replica = syncline.distribute(model, optimizer, "gossip")
        for _ in range(12):
            one_step(model, optimizer)
            time.sleep(0.4 * rank)
        started = time.monotonic()
        with replica.whole():
            return time.monotonic() - started

    waited_s, _ = run_ranks(2, work)
    assert waited_s > 3.0


def adam_loop(model, shard=lambda loader: loader, distribute=lambda model, optimizer: None):
    """Forty groups, whose rates and betas a schedule changes in every step."""
    groups = [{"params": [p], "lr": 0.01 * (k + 1)} for k, p in enumerate(model.parameters())]
    rates = [group["lr"] for group in groups]
    optimizer = torch.optim.Adam(groups)
    replica = distribute(model, optimizer)
    batches = shard(loader())
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, rates, total_steps=len(batches))
    for (x,) in batches:
        one_step(model, optimizer, x)
        scheduler.step()
    with replica.whole() if replica else contextlib.nullcontext():
        return digest_of(model.state_dict()), optimizer


@pytest.mark.parametrize("kind", ["auto", "network"])
def test_a_server_follows_the_schedule_of_many_groups_and_gives_its_state(kind):
    def deep():
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(20, 20) for _ in range(20)))

    model = deep()
    digest, optimizer = adam_loop(model)
    plain = {name: optimizer.state[p] for name, p in model.named_parameters()}
    expected = {f"{name}/{key}": value for name in plain for key, value in plain[name].items()}

    def work():
        syncline.init(comm=kind)
        model = deep()
        found, _ = adam_loop(
            model,
            syncline.shard,
            lambda model, optimizer: syncline.distribute(model, optimizer, Server(DEDICATED)),
        )
        state = syncline.optimizer_state(model)
        flat = {f"{name}/{key}": value for name in state for key, value in state[name].items()}
        return found, digest_of(flat)

    worker, server = run_ranks(2, work)
    assert worker == [digest, digest_of(expected)]
    assert server == worker


@pytest.mark.parametrize("turn", range(3))
def test_a_server_has_its_saved_state_before_the_first_push(turn):
    def work():
        rank = syncline.init()
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(20, 20) for _ in range(60)))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
        syncline.distribute(model, optimizer, Server(DEDICATED))
        zeros = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
        saved = {
            name: {"step": torch.tensor(1000.0), "exp_avg": zero, "exp_avg_sq": zero + 1e6}
            for name, zero in zeros.items()
        }
        syncline.load_optimizer_state(model, saved)
        for (x,) in syncline.shard(loader()):
            one_step(model, optimizer, x)
        state = syncline.optimizer_state(model)
        return rank, sorted({one["step"].item() for one in state.values()})

    assert run_ranks(2, work) == [[0, [1006.0]], [1, [1006.0]]]


def test_gradients_between_two_pushes_count_also_of_a_layer_that_has_none_at_the_push():
    def work():
        syncline.init()
        model = nn.ModuleList([nn.Linear(3, 1), nn.Linear(3, 1)])
        optimizer = sgd(model, lr=0.1)
        server = Server(ServerSettings(servers=1, period=2, early=False))
        replica = syncline.distribute(model, optimizer, server)
        before = [layer.weight.detach().clone() for layer in model]
        for number, _ in enumerate(syncline.shard(loader())):
            # The first step uses both, so that both are known; then each every other step.
            used = model if number == 0 else [model[number % 2]]
            sum(layer(torch.ones(1, 3)).sum() for layer in used).backward()
            optimizer.step()
            optimizer.zero_grad()
        with replica.whole():
            return [(b - layer.weight).tolist()[0] for b, layer in zip(before, model, strict=True)]

    worker, _ = run_ranks(2, work)
    # Six steps, gradient 1: the first layer has one in steps 0, 2, 4, the second in 0, 1, 3, 5.
    assert worker == [pytest.approx([0.3] * 3), pytest.approx([0.4] * 3)]


def test_the_staleness_of_an_early_push_counts_from_what_it_was_computed_on():
    def work():
        syncline.init()
        model = network()
        optimizer = sgd(model)
        server = Server(ServerSettings(servers=1, early=True))
        replica = syncline.distribute(model, optimizer, server)
        for (x,) in syncline.shard(loader()):
            one_step(model, optimizer, x)
        return dict(replica.strategy.staleness)

    worker, _ = run_ranks(2, work)
    # The last push is not pulled; each but the first missed the one before it.
    assert worker == {"0": 1, "1": 4}


@pytest.mark.parametrize("asks", [False, True])
def test_ranks_with_other_numbers_of_batches_end_under_a_bound(asks):
    def work():
        rank = syncline.init(hung_s=5)
        model = network()
        optimizer = sgd(model)
        server = Server(ServerSettings(max_staleness=2))
        replica = syncline.distribute(model, optimizer, server)
        for _ in range(6 + 6 * rank):
            one_step(model, optimizer)
        if not asks:
            return "well"
        with replica.whole():
            return digest_of(model.state_dict())

    first, second = run_ranks(2, work)
    assert first == second


def test_a_loop_over_three_machines_ends_when_the_first_has_left_long_before():
    def work():
        rank = syncline.init(hung_s=6)
        model = network()
        optimizer = sgd(model)
        syncline.distribute(model, optimizer, "gossip")
        for _ in range(40):
            one_step(model, optimizer)
            time.sleep(0.02 * rank)
        return "well"

    assert run_ranks(3, work, machines=3) == ["well"] * 3


def test_a_frozen_rank_is_found_when_the_first_rank_is_gone():
    def work():
        rank = syncline.init(hung_s=30, silent_s=2)
        model = network()
        optimizer = sgd(model)
        replica = syncline.distribute(model, optimizer, "gossip")
        for step in range(20):
            one_step(model, optimizer)
            time.sleep(0.05)
            if (rank, step) == (0, 5):
                os.kill(os.getpid(), signal.SIGKILL)
            if (rank, step) == (1, 15):
                os.kill(os.getpid(), signal.SIGSTOP)
        with replica.whole():
            return "well"

    killed, frozen, last = collect(*start_ranks(3, work), 20.0)
    assert killed is None
    assert frozen is None
    assert last["result"] == "well"


PUSH = GossipSettings(rule="push")


@pytest.mark.parametrize("make", [lambda: Gossip(PUSH), Elastic])
def test_a_frozen_rank_holds_nobody_up_who_has_many_calls_to_it(make):
    def work():
        rank = syncline.init(hung_s=30, silent_s=2)
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(45)))
        optimizer = sgd(model)
        replica = syncline.distribute(model, optimizer, make(), overlap=True, bucket_bytes=16000)
        for step in range(12):
            one_step(model, optimizer, torch.ones(8, 64))
            if (rank, step) == (2, 5):
                os.kill(os.getpid(), signal.SIGSTOP)
        with replica.whole():
            return len(replica.buckets)

    first, second, frozen = collect(*start_ranks(3, work), 30.0)
    assert frozen is None
    assert first["result"] == second["result"] > 32


def test_a_rank_that_fails_says_why_and_the_other_goes_on():
    def work():
        rank = syncline.init()
        model = network()
        optimizer = sgd(model)
        replica = syncline.distribute(model, optimizer, "gossip")
        for step in range(20):
            one_step(model, optimizer)
            if (rank, step) == (0, 5):
                raise ValueError("a mistake of the script")
        with replica.whole():
            return "well"

    for _ in range(3):
        failed, other = collect(*start_ranks(2, work), 30.0)
        assert failed["kind"] == "ValueError"
        assert other["result"] == "well"


def refused(act, strategy):
    """Run a few steps and then something on every rank; return what each is told."""

    def work():
        syncline.init()
        model = network()
        optimizer = sgd(model)
        replica = syncline.distribute(model, optimizer, strategy(), overlap=True)
        for _ in range(3):
            one_step(model, optimizer)
        try:
            act(model, optimizer, replica)
        except UsageError as error:
            return str(error)

    return run_ranks(2, work)


@pytest.mark.parametrize("make", [Gossip, Elastic, Server])
def test_the_whole_between_backward_and_step_is_refused(make):
    def act(model, optimizer, replica):
        model(torch.ones(8, 20)).sum().backward()
        with replica.whole():
            pass

    for said in refused(act, make):
        assert said.startswith("whole() came between backward() and step()")


@pytest.mark.parametrize("make", [Gossip, Elastic, Server])
def test_parameters_loaded_after_the_first_step_are_refused_at_the_next(make):
    def act(model, optimizer, replica):
        with replica.whole():
            saved = {key: value.clone() for key, value in model.state_dict().items()}
            model.load_state_dict(saved)
        one_step(model, optimizer)  # what was loaded into the whole is put away with it
        model.load_state_dict(saved)
        one_step(model, optimizer)

    for said in refused(act, make):
        assert said.startswith("parameters were loaded after the first step")


def test_a_state_dict_outside_the_whole_is_told_once(caplog):
    def work():
        syncline.init()
        model = network()
        optimizer = sgd(model)
        replica = syncline.distribute(model, optimizer, "gossip")
        model.state_dict()
        one_step(model, optimizer)
        with replica.whole():
            model.state_dict()
        before = len(caplog.messages)
        model.state_dict()
        model.state_dict()
        return before, caplog.messages

    for rank, (before, said) in enumerate(run_ranks(2, work)):
        assert before == 0
        (line,) = said
        assert line.startswith(f"state_dict() holds rank {rank}'s own parameters.")


def test_ranks_that_serve_do_so_for_one_model():
    def work():
        syncline.init()
        for strategy in (Server(DEDICATED), Gossip()):
            model = network()
            syncline.distribute(model, sgd(model), strategy)
        with pytest.raises(UsageError, match="only serve loop for one model"):
            syncline.shard(loader())

    run_ranks(2, work)


def test_a_rank_that_serves_takes_no_steps_and_knows_how_many_the_others_take():
    def work():
        rank = syncline.init()
        model = network()
        optimizer = sgd(model)
        syncline.distribute(model, optimizer, Server(DEDICATED))
        batches = syncline.shard(loader())
        for (x,) in batches:
            one_step(model, optimizer, x)
        said = ""
        if rank == 1:
            with pytest.raises(UsageError) as caught:
                one_step(model, optimizer)
            said = str(caught.value)
        return len(batches), said

    worker, server = run_ranks(2, work)
    assert worker == [6, ""]
    assert server[0] == 6
    assert server[1].startswith("rank 1 serves the others and takes no steps of its own.")


@pytest.mark.parametrize("kind", [float, np.float64, np.float32, torch.tensor])
def test_a_server_takes_a_learning_rate_of_any_kind(kind):
    def work():
        syncline.init()
        model = network()
        optimizer = sgd(model)
        server = Server(ServerSettings(early=False))
        replica = syncline.distribute(model, optimizer, server)
        states = []
        for rate in (0.1, 0.0, 0.0):
            optimizer.param_groups[0]["lr"] = kind(rate)
            one_step(model, optimizer)
            with replica.whole():
                states.append(digest_of(model.state_dict()))
        return states

    first, second = run_ranks(2, work)
    assert first == second
    assert first[0] == first[1] == first[2]


def test_a_step_inside_the_whole_is_refused_and_wholes_may_be_nested():
    def act(model, optimizer, replica):
        with replica.whole():
            with replica.whole():
                pass
            model.load_state_dict(model.state_dict())
        one_step(model, optimizer)
        with replica.whole():
            one_step(model, optimizer)

    for said in refused(act, Gossip):
        assert said.startswith("step() came inside whole()")


@pytest.mark.parametrize("name", ["server", "gossip"])
def test_one_rank_alone_may_ask_for_the_whole_at_the_end(name, caplog):
    """Those with strips of a server stay until all leave; without the others it is told."""

    def work():
        rank = syncline.init(hung_s=10)
        model = network()
        optimizer = sgd(model)
        replica = syncline.distribute(model, optimizer, name)
        for _ in range(3):
            one_step(model, optimizer)
        if rank == 0:
            time.sleep(0.3)
            with replica.whole():
                model.state_dict()
        return caplog.messages

    first, second = run_ranks(2, work)
    without = "whole() is without rank 1, which left before. Call it on every rank."
    assert first == ([without] if name == "gossip" else [])
    assert second == []


def test_a_server_whose_workers_have_all_died_says_so():
    def work():
        rank = syncline.init()
        model = network()
        optimizer = sgd(model)
        syncline.distribute(model, optimizer, Server(DEDICATED))
        for number, (x,) in enumerate(syncline.shard(loader(96))):
            one_step(model, optimizer, x)
            if number == 3:
                os.kill(os.getpid(), signal.SIGKILL)
        return rank

    *workers, server = collect(*start_ranks(3, work), 20.0)
    assert workers == [None, None]
    assert server["kind"] == "RankDied"
