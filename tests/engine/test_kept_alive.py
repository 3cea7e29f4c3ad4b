"""What ends with its users: a model that was distributed is not kept alive by the engine."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

import syncline
from syncline.session import close_session


def train_a_little(*, overlap):
    """Train a model with norms, and leave its last step in flight; return weak references."""
    syncline.init()
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    replica = syncline.distribute(model, optimizer, overlap=overlap)
    for _ in range(3):
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    found = [model, optimizer, replica, model[0].weight]
    return [weakref.ref(one) for one in found]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("overlap", [True, False])
def test_a_model_ends_with_its_session_and_its_users(overlap):
    kept = train_a_little(overlap=overlap)
    close_session()
    gc.collect()
    assert [one() is None for one in kept] == [True] * len(kept)
