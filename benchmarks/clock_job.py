"""The network and the data of `benchmarks/clocks.py`, as a job's own functions: both sleep."""

from __future__ import annotations

import time

import torch
from torch import nn

from syncline.models.sleeping import SleepingLayer, sleeping


def make(size_bytes: int, layers: int, compute_s: float) -> nn.Module:
    """Return a network of equal layers; forward takes a third of the time of compute."""
    one = SleepingLayer(size_bytes // layers, compute_s / 3 / layers, compute_s * 2 / 3 / layers)
    return sleeping([one] * layers)


class SlowSamples:
    """Samples that take their time to be read."""

    def __init__(self, sample_s: float) -> None:
        self._sample_s = sample_s

    def __len__(self) -> int:
        return 4096

    def __getitems__(self, rows: list[int]) -> list[tuple[torch.Tensor, int]]:
        time.sleep(self._sample_s * len(rows))
        return [(torch.ones(2), row % 2) for row in rows]

    def __getitem__(self, row: int) -> tuple[torch.Tensor, int]:
        return self.__getitems__([row])[0]


def samples(sample_s: float) -> tuple[SlowSamples, None]:
    return SlowSamples(sample_s), None
