"""Parameters without elements have optimizer state as in plain PyTorch: a count of steps."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import syncline
from ranks import run_ranks

OPTIMIZERS = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.01),
    "fused": lambda groups: torch.optim.AdamW(groups, lr=0.01, fused=True),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
}


class Net(nn.Module):
    """Parameters without elements in front, between and behind, one of them used seldom."""

    def __init__(self):
        super().__init__()
        self.front = nn.Parameter(torch.empty(0))
        self.first = nn.Linear(4, 40)
        self.between = nn.Parameter(torch.empty(3, 0))
        self.last = nn.Linear(40, 40)
        self.behind = nn.Parameter(torch.empty(0, 2))

    def forward(self, x, step):
        x = self.last(self.first(x) + self.front.sum())
        return x.sum() + (self.between.sum() if step % 2 else 0) + self.behind.sum()


def make(optimizer, *, in_groups):
    torch.manual_seed(0)
    model = Net()
    groups = [{"params": [p]} for p in model.parameters()] if in_groups else model.parameters()
    return model, OPTIMIZERS[optimizer](groups)


def take_steps(model, optimizer, steps):
    for step in steps:
        model(torch.full((2, 4), 0.1 * step), step).backward()
        optimizer.step()
        optimizer.zero_grad()


def values(packed):
    return {
        str(number): {
            key: [list(value.shape), value.tolist()] if torch.is_tensor(value) else value
            for key, value in state.items()
        }
        for number, state in packed["state"].items()
    }


def train_plain(optimizer, in_groups):
    model, chosen = make(optimizer, in_groups=in_groups)
    take_steps(model, chosen, range(5))
    return values(chosen.state_dict())


@pytest.mark.processes
@pytest.mark.parametrize("in_groups", [False, True])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_state_of_parameters_without_elements_is_that_of_plain_pytorch(
    optimizer, overlap, in_groups
):
    def work():
        syncline.init()
        model, chosen = make(optimizer, in_groups=in_groups)
        syncline.distribute(model, chosen, shards=2, overlap=overlap, bucket_bytes=1024)
        take_steps(model, chosen, range(3))
        chosen.load_state_dict(chosen.state_dict())
        take_steps(model, chosen, range(3, 5))
        return values(chosen.state_dict())

    expected = train_plain(optimizer, in_groups)
    assert run_ranks(2, work) == [expected] * 2  # both shards have the same samples


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("overlap", [True, False])
def test_state_goes_from_plain_pytorch_and_back(overlap):
    plain, its_optimizer = make("adamw", in_groups=False)
    take_steps(plain, its_optimizer, range(3))
    syncline.init()
    model, optimizer = make("adamw", in_groups=False)
    model.load_state_dict(plain.state_dict())
    syncline.distribute(model, optimizer, overlap=overlap)
    optimizer.load_state_dict(copy.deepcopy(its_optimizer.state_dict()))
    take_steps(plain, its_optimizer, range(3, 5))
    take_steps(model, optimizer, range(3, 5))
    assert values(optimizer.state_dict()) == values(its_optimizer.state_dict())
    replica = syncline.session.current_session().replicas[0]
    assert replica.optimizer_state().keys() == dict(model.named_parameters()).keys()
