"""What recording a trace costs: `python -m benchmarks.recording`.

Two ranks take steps of 50 ms, sleeping instead of computing, overlapped, with 24 layers of 1 MB in
a bucket each: more tasks than most networks have. Blocks of steps with and without a recorder take
turns. The figures are medians over pairs of blocks: time of a step, processor time of a rank, and
what of both recording adds. Beside them the difference of the least blocks: other programs on the
machine only add to a block, so it is the figure to trust where the quartiles are far apart.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

import syncline
from syncline.models.sleeping import SleepingLayer, sleeping
from syncline.perf.recorder import Recorder

RANKS = 2
LAYERS = 24
STEP_S = 0.05
BLOCK = 20
"""Steps of a block: a second."""
PAIRS = 30


def train_block(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[float, float]:
    """Return seconds and processor seconds of a step."""
    x = torch.ones(1)
    started_s, spent_s = time.perf_counter(), time.process_time()
    for _ in range(BLOCK):
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    syncline.barrier()
    return (time.perf_counter() - started_s) / BLOCK, (time.process_time() - spent_s) / BLOCK


def work() -> None:
    """Run the blocks, as one rank; rank 0 prints."""
    rank = syncline.init(threads=1)
    share_s = STEP_S / LAYERS
    model = sleeping([SleepingLayer(2**20, share_s / 3, share_s * 2 / 3)] * LAYERS)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    replica: Any = syncline.distribute(model, optimizer, overlap=True, bucket_bytes=2**20)
    train_block(model, optimizer)
    pairs, num_tasks = [], 0
    for number in range(PAIRS):
        found = {}
        for records in (False, True) if number % 2 else (True, False):
            recorder = Recorder(rank) if records else None
            replica.recorder = recorder
            found[records] = train_block(model, optimizer)
            if recorder is not None:
                num_tasks = len(recorder.tasks)
        pairs.append(found)
    replica.recorder = None
    if rank == 0:
        print(f"{len(replica.buckets)} buckets, {num_tasks / BLOCK:.0f} tasks a step and rank")
        for which, name in ((0, "time of a step"), (1, "processor time of a step")):
            plain = statistics.median(found[False][which] for found in pairs)
            least = {
                records: min(found[records][which] for found in pairs) * 1e6
                for records in (False, True)
            }
            more = [found[True][which] - found[False][which] for found in pairs]
            low, middle, high = statistics.quantiles(more, n=4)
            print(
                f"{name}: {plain * 1e3:.2f} ms; recording adds {middle * 1e6:.0f} us "
                f"({low * 1e6:.0f} to {high * 1e6:.0f}), {middle / STEP_S:.2%} of 50 ms; "
                f"between the least blocks {least[True] - least[False]:.0f} us"
            )


def main() -> int:
    if "RANK" in os.environ:
        work()
        return 0
    command = [sys.executable, "-m", "syncline", "run", "--ranks", str(RANKS), str(Path(__file__))]
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
