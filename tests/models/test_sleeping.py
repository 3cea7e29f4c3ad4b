"""Networks that sleep: real parameters and gradients, and the time they were told to take."""

from __future__ import annotations

import time

import torch

from syncline.models.sleeping import SleepingLayer, sleeping


def test_layers_add_the_mean_of_their_weights_and_get_its_gradient():
    model = sleeping([SleepingLayer(40, 0.0, 0.0), SleepingLayer(8, 0.0, 0.0)])
    assert [p.numel() for p in model.parameters()] == [10, 2]
    x = torch.zeros(3)
    y = model(x)
    means = sum(p.mean() for p in model.parameters())
    assert torch.allclose(y, means.expand(3))
    y.sum().backward()
    for parameter in model.parameters():
        # Each of three outputs grows by 1 / n for each weight.
        assert torch.allclose(parameter.grad, torch.tensor(3.0 / parameter.numel()))


def test_forward_and_backward_take_their_time_without_the_processor():
    model = sleeping([SleepingLayer(4, 0.05, 0.1)] * 2)
    started, used = time.perf_counter(), time.process_time()
    y = model(torch.zeros(1))
    between = time.perf_counter()
    y.sum().backward()
    ended = time.perf_counter()
    assert 0.1 <= between - started < 0.6
    assert 0.2 <= ended - between < 0.7
    assert time.process_time() - used < 0.1
