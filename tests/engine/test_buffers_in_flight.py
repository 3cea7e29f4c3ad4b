"""Buffers that a script reads or changes right after `step()`, while ranks still average them."""

from __future__ import annotations

import copy
import time

import pytest
import torch
from torch import nn

import syncline
from ranks import run_ranks
from syncline.engine.parameters import InFlight


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
