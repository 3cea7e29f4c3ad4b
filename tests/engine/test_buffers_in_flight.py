"""Buffers that a script reads or changes right after `step()`, while ranks still average them."""

from __future__ import annotations

import copy
import time

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import syncline
from ranks import run_ranks
from syncline.engine.parameters import InFlight
from syncline.strategies import Synchronous


def make():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def x(step):
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(step))


def train(model, optimizer, after_step, seed=0):
    for step in range(4):
        model(x(seed + step)).square().mean().backward()
        optimizer.step()
        after_step(model[1], step)
        optimizer.zero_grad()
    return [buffer.tolist() for buffer in model.buffers()]


def shift(norm, step):
    norm.running_mean.mul_(0.5).add_(step)
    norm.num_batches_tracked += 3


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("overlap", [True, False])
def test_a_change_right_after_a_step_is_kept(overlap):
    expected = train(*make(), shift)
    syncline.init()
    ours = make()
    syncline.distribute(*ours, overlap=overlap)
    assert train(*ours, shift) == expected


@pytest.mark.processes
def test_ranks_read_the_average_right_after_a_step():
    def work():
        rank = syncline.init()
        model, optimizer = make()
        syncline.distribute(model, optimizer, overlap=True)
        seen = []

        def read(norm, step):
            seen.append(torch.cat([norm.running_mean, norm.running_var]).tolist())
            if rank == 1:
                time.sleep(0.05)  # the next step's average is late on rank 0

        train(model, optimizer, read, seed=100 * rank)
        return seen

    first, second = run_ranks(2, work)
    assert first == second


@pytest.mark.usefixtures("alone")
def test_copies_and_views_of_buffers_in_flight_are_plain_tensors():
    syncline.init()
    model, optimizer = make()
    syncline.distribute(model, optimizer, overlap=True)

    def use(norm, step):
        copied = copy.deepcopy(norm.running_mean)
        assert type(copied) is type(norm.running_mean) is torch.Tensor
        assert type(norm.running_var.view(2, 4)) is torch.Tensor

    train(model, optimizer, use)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("is_buffer_first", [True, False])
def test_a_function_of_a_buffer_and_a_parameter_waits_for_both(is_buffer_first):
    syncline.init()
    model, optimizer = make()
    syncline.distribute(model, optimizer, overlap=True, bucket_bytes=16)
    classes = []

    def use(norm, step):
        pair = (norm.running_mean, norm.weight)
        classes.append(type(norm.weight))
        torch.add(*(pair if is_buffer_first else reversed(pair)))
        classes.append(type(norm.weight))

    train(model, optimizer, use)
    assert classes[0] is InFlight
    assert InFlight not in classes[1::2]


class Remembers(nn.Module):
    """Keeps its last inputs, whose shape depends on the batch."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.register_buffer("last", torch.zeros(1, 4))

    def forward(self, x):
        self.last = x[: int(x[0, 0])].clone()
        return self.layer(x) + self.last.sum()


@pytest.mark.processes
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("size", [1, 2])
def test_a_buffer_whose_shape_differs_by_shard_takes_that_of_shard_0(size, overlap):
    def work():
        syncline.init()
        torch.manual_seed(0)
        model = Remembers()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        syncline.distribute(model, optimizer, shards=2, overlap=overlap)
        data = [torch.full((5, 4), 1.0 + number) for number in (1, 3, 2, 0)]
        seen = []
        for step in syncline.shards(DataLoader(data, batch_size=None)):
            for inputs in step:
                (0.01 * model(inputs).sum()).backward()
            optimizer.step()
            seen.append((tuple(model.last.shape), model.last.tolist()))
            optimizer.zero_grad()
        return seen, model.layer.weight.tolist()

    for seen, weights in (results := run_ranks(size, work)):
        assert [shape for shape, _ in seen] == [[2, 4], [3, 4]]
        assert [seen, weights] == results[0]


class Entered(Synchronous):
    """Takes its time before the buffers are set."""

    def step_entered(self, step):
        time.sleep(0.05)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("overlap", [True, False])
def test_a_buffer_that_is_replaced_right_after_a_step_is_kept(overlap):
    """As the hidden state of a recurrent network is, at the end of a text."""
    syncline.init()
    model = Remembers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    syncline.distribute(model, optimizer, Entered(), overlap=overlap)
    for step in range(3):
        model(torch.full((5, 4), 2.0)).sum().backward()
        optimizer.step()
        model.last = torch.full((2, 4), 7.0 + step)
        optimizer.zero_grad()
        syncline.barrier()
        model.layer(torch.ones(5, 4))  # waits for the step
        assert model.last.tolist() == [[7.0 + step] * 4] * 2
