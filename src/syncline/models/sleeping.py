"""A network whose layers sleep instead of computing, with real parameters and real gradients.

It needs almost no processor time, so two cores can run many machines, and the ratio of compute to
communication can be chosen freely. Each layer adds the mean of its weights to its input; the time
of this arithmetic is part of the layer's time.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn


class SleepingLayer(NamedTuple):
    """The cost of a layer."""

    parameter_bytes: int
    forward_s: float
    backward_s: float


def _sleep_until(deadline_s: float) -> None:
    time.sleep(max(0.0, deadline_s - time.perf_counter()))


class _AddMean(torch.autograd.Function):
    """y = x + mean(weight), which takes the layer's time in forward and in backward."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, forward_s: float, backward_s: float
    ) -> torch.Tensor:
        deadline_s = time.perf_counter() + forward_s
        ctx.backward_s = backward_s
        ctx.shape = weight.shape
        y = x + weight.mean()
        _sleep_until(deadline_s)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        deadline_s = time.perf_counter() + ctx.backward_s
        (gradient,) = gradients
        of_weight = gradient.new_empty(ctx.shape).fill_(gradient.sum() / ctx.shape.numel())
        _sleep_until(deadline_s)
        return gradient, of_weight, None, None


class Sleeper(nn.Module):
    """One layer that sleeps."""

    def __init__(self, layer: SleepingLayer) -> None:
        super().__init__()
        self.layer = layer
        self.weight = nn.Parameter(torch.randn(max(1, layer.parameter_bytes // 4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = _AddMean.apply(
            x, self.weight, self.layer.forward_s, self.layer.backward_s
        )
        return y


def sleeping(layers: Sequence[SleepingLayer]) -> nn.Sequential:
    """Return a network of these layers. Its input may have any shape; the output has the same."""
    return nn.Sequential(*(Sleeper(layer) for layer in layers))
