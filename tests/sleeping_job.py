"""A job whose layers and samples take known times, and a clock that only they move."""

from __future__ import annotations

import time

import torch
from torch import nn

from syncline.config import Job, parse_job
from syncline.models.sleeping import Sleeper, SleepingLayer

LAYERS = (
    SleepingLayer(400, 0.25, 0.5),
    SleepingLayer(4000, 0.125, 0.125),
    SleepingLayer(40, 0.5, 1.0),
)
READ_S = 0.0625
"""Seconds to read a sample."""

JOB = """
[model]
name = "sleeping_job:make"
[data]
name = "sleeping_job:load"
batch = 8
[optimizer]
lr = 0.1
momentum = 0.9
[strategy]
shards = 2
[run]
steps = 10
"""


class Net(nn.Module):
    """Layers that sleep, registered in another order than they are used in."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        layers = [SleepingLayer(b, factor * f, factor * w) for b, f, w in LAYERS]
        self.last, self.first = Sleeper(layers[2]), Sleeper(layers[0])
        self.middle, self.unused = Sleeper(layers[1]), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(self.first(x)))


class Samples:
    """Samples that take their time to be read."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __len__(self) -> int:
        return 32

    def __getitems__(self, rows: list[int]) -> list[tuple[torch.Tensor, int]]:
        time.sleep(READ_S * self.factor * len(rows))
        return [(torch.ones(2), row % 2) for row in rows]

    def __getitem__(self, row: int) -> tuple[torch.Tensor, int]:
        return self.__getitems__([row])[0]


def make(factor: float = 1.0) -> Net:
    return Net(factor)


def load(factor: float = 1.0) -> tuple[Samples, None]:
    return Samples(factor), None


def sleeping_job(**sets: str) -> Job:
    """The job, resolved, with settings such as run__threads="2" laid over it."""
    found = [f"{key.replace('__', '.')}={value}" for key, value in sets.items()]
    return parse_job(JOB, sets=found).resolved()


class FakeClock:
    """A clock that sleeping moves, and each look at it by `tick_s`: so that a hook costs that."""

    def __init__(self, tick_s: float = 0.0) -> None:
        self.now_s, self.tick_s = 0.0, tick_s

    def perf_counter(self) -> float:
        self.now_s += self.tick_s
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
