"""`optimizer.state` of a distributed optimizer: what a script would find there is refused."""

from __future__ import annotations

import copy
from collections import defaultdict

import pytest
import torch
from torch import nn

import syncline
from syncline.errors import UsageError

pytestmark = pytest.mark.usefixtures("_world_of_one")


@pytest.fixture
def _world_of_one(alone):
    syncline.init()


def make(overlap=None):
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    replica = syncline.distribute(model, optimizer, overlap=overlap)
    return replica, model, optimizer


def take_step(model, optimizer):
    model(torch.ones(3, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def replace(optimizer, parameter):
    optimizer.state = defaultdict(dict)


def zero(optimizer, parameter):
    for state in optimizer.state.values():
        state["momentum_buffer"].zero_()


DEEDS = {
    "clear": lambda optimizer, parameter: optimizer.state.clear(),
    "replace": replace,
    "zero": zero,
    "loop": lambda optimizer, parameter: list(optimizer.state),
    "ask": lambda optimizer, parameter: parameter in optimizer.state,
    "get": lambda optimizer, parameter: optimizer.state.get(parameter),
    "read": lambda optimizer, parameter: optimizer.state[parameter],
    "write": lambda optimizer, parameter: optimizer.state.update({parameter: {}}),
    "delete": lambda optimizer, parameter: optimizer.state.pop(parameter, None),
}


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("deed", sorted(DEEDS))
def test_a_look_into_the_state_is_refused_after_the_first_step(deed, overlap):
    _, model, optimizer = make(overlap)
    take_step(model, optimizer)

    def act():
        DEEDS[deed](optimizer, model.weight)
        take_step(model, optimizer)

    with pytest.raises(UsageError, match=r"optimizer\.state cannot be read, changed or replaced"):
        act()


def test_before_the_first_step_the_state_is_the_user_s():
    _, model, optimizer = make()
    optimizer.state[model.weight]["momentum_buffer"] = torch.ones(2, 4)
    take_step(model, optimizer)
    assert set(optimizer.state_dict()["state"]) == {0, 1}


def test_saving_loading_and_copying_go_on():
    _, model, optimizer = make()
    take_step(model, optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    assert torch.is_tensor(saved["state"][0]["momentum_buffer"])
    take_step(model, optimizer)
    optimizer.load_state_dict(saved)
    found = optimizer.state_dict()["state"][0]["momentum_buffer"]
    assert torch.equal(found, saved["state"][0]["momentum_buffer"])
    take_step(model, optimizer)
    copied = copy.deepcopy(optimizer)
    assert type(copied.state) is defaultdict
    assert len(copied.state) == 2


def test_a_detached_optimizer_has_its_state_again():
    replica, model, optimizer = make()
    take_step(model, optimizer)
    replica.detach()
    assert type(optimizer.state) is defaultdict
    assert set(optimizer.state) == set(model.parameters())
    take_step(model, optimizer)
