"""A loop over the plain loader, which gives every rank the same samples, is noticed."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

import syncline
from ranks import run_ranks

pytestmark = pytest.mark.processes


def train(x, **settings):
    """Return the warnings of one step; `x` makes the batch of a rank."""
    found = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())
    logging.getLogger("syncline").addHandler(handler)
    rank = syncline.init()
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    syncline.distribute(model, optimizer, **settings)
    model(x(rank)).square().mean().backward()
    optimizer.step()
    model.state_dict()
    return found


@pytest.mark.parametrize("overlap", [True, False])
def test_the_same_samples_on_all_ranks_are_said_once(overlap):
    first, second = run_ranks(2, lambda: train(lambda rank: torch.ones(3, 4), overlap=overlap))
    assert len(first) == 1
    assert first[0].startswith("all 2 ranks have the same gradients after their first batch")
    assert second == []


def test_ranks_with_samples_of_their_own_are_not_warned():
    assert run_ranks(2, lambda: train(lambda rank: torch.full((3, 4), 1.0 + rank))) == [[], []]
