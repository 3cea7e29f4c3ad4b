"""The network and the data of `benchmarks/clocks.py`, as a job's own functions: both sleep.

As a program it times the network by itself: a plain PyTorch loop, on one rank. Layers sleep a
little longer than they are told to, and autograd takes time between them.
"""

from __future__ import annotations

import json
import statistics
import sys
import time

import torch
from torch import nn

from syncline.models.sleeping import SleepingLayer, sleeping


def make(sizes: list[int], compute_s: float) -> nn.Module:
    """Return a network of layers with these bytes, which compute equally long.

    Forward takes a third of the time of compute.
    """
    each_s = compute_s / len(sizes)
    return sleeping([SleepingLayer(size, each_s / 3, each_s * 2 / 3) for size in sizes])


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


def measure(model: nn.Module, steps: int = 15) -> dict[str, float]:
    """Return the median seconds of forward and of backward, in a plain loop with SGD.

    Also the relative spread of both together: half the way from the 16th to the 84th percentile.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    x, forward_s, backward_s = torch.ones(4, 2), [], []
    for _ in range(steps):
        began_s = time.perf_counter()
        loss = model(x).square().mean()
        middle_s = time.perf_counter()
        loss.backward()
        forward_s.append(middle_s - began_s)
        backward_s.append(time.perf_counter() - middle_s)
        optimizer.step()
        optimizer.zero_grad()
    both = sorted(map(sum, zip(forward_s, backward_s, strict=True)))
    low, high = both[round(0.16 * (steps - 1))], both[round(0.84 * (steps - 1))]
    return {
        "forward_s": statistics.median(forward_s),
        "backward_s": statistics.median(backward_s),
        "spread": (high - low) / 2 / statistics.median(both),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    model = make(json.loads(sys.argv[1]), float(sys.argv[2]))
    print(json.dumps(measure(model)))
