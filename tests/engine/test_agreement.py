"""`check_every` finds ranks that hold different values, and names the first and the ranks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import syncline
from ranks import RankError, run_ranks
from syncline.errors import ConfigError

pytestmark = pytest.mark.processes


def train(steps, change, **settings):
    rank = syncline.init()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].bias.requires_grad_(False)
    model.register_buffer("offset", torch.zeros(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    syncline.distribute(model, optimizer, **settings)
    for step in range(steps):
        model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            change(model, rank, step)
    return model.state_dict()["1.weight"].sum().item()


def change_frozen(model, rank, step):
    if rank == 2 and step == 2:
        model[0].bias.add_(1.0)


@pytest.mark.parametrize("overlap", [True, False])
def test_a_difference_is_found_within_so_many_steps(overlap):
    def work():
        try:
            train(9, change_frozen, overlap=overlap, check_every=2)
        except syncline.SynclineError as error:
            return str(error)

    for text in run_ranks(3, work):
        assert text.startswith(
            "parameter 0.bias differs between ranks: rank 2 holds other values than rank 0. "
            "check_every found this at step 4."
        )


def test_a_buffer_that_differs_is_found():
    def change(model, rank, step):
        if step == 0:
            model.load_state_dict(model.state_dict() | {"offset": torch.full((3,), float(rank))})

    with pytest.raises(RankError, match="buffer offset differs between ranks: rank 1 holds"):
        run_ranks(2, lambda: train(3, change, check_every=1))


def test_ranks_that_agree_go_on_with_the_same_result():
    def nothing(model, rank, step):
        return None

    (plain,) = run_ranks(1, lambda: train(4, nothing))
    assert run_ranks(2, lambda: train(4, nothing, check_every=1)) == [plain] * 2


@pytest.mark.parametrize("strategy", ["gossip", "elastic", "local", "server"])
@pytest.mark.usefixtures("alone")
def test_it_is_refused_where_ranks_hold_different_parameters(strategy):
    syncline.init()
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=r"check_every: got 5, but with this strategy"):
        syncline.distribute(model, optimizer, strategy, check_every=5)


@pytest.mark.usefixtures("alone")
def test_a_number_below_one_is_refused():
    syncline.init()
    model = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="check_every: got 0"):
        syncline.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), check_every=0)
