"""`replica.losses` holds the losses of the last step, of all shards: never those of another."""

from __future__ import annotations

import math
import time

import pytest
import torch
from torch import nn

import syncline
from ranks import run_ranks
from syncline.errors import UsageError
from syncline.strategies import Synchronous


class SlowSynchronous(Synchronous):
    """Takes its time when all ranks have entered a step."""

    def gradient_ready(self, bucket):
        time.sleep(0.02)
        super().gradient_ready(bucket)


def make(**settings):
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, syncline.distribute(model, optimizer, SlowSynchronous(), **settings)


@pytest.mark.processes
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("size", [1, 2])
def test_losses_are_those_of_the_last_step(size, overlap):
    def work():
        syncline.init()
        model, optimizer, replica = make(shards=2, overlap=overlap)
        seen = []
        for step in range(3):
            for shard in replica.my_shards:
                replica.begin_shard(shard)
                replica.tell_loss(10.0 * step + shard)
                model(torch.ones(3, 4)).sum().backward()
            optimizer.step()
            seen.append(replica.losses)
            optimizer.zero_grad()
        return seen

    assert run_ranks(size, work) == [[[0.0, 1.0], [10.0, 11.0], [20.0, 21.0]]] * size


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("overlap", [True, False])
def test_a_loss_that_was_not_told_is_not_that_of_another_step(overlap):
    syncline.init()
    model, optimizer, replica = make(overlap=overlap)
    for step in range(2):
        if step == 0:
            replica.tell_loss(5.0)
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert math.isnan(replica.losses[0])


@pytest.mark.usefixtures("alone")
def test_losses_before_the_first_step_are_refused():
    syncline.init()
    _, _, replica = make()
    with pytest.raises(UsageError, match="take one first"):
        _ = replica.losses
