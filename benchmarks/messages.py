"""What a collective and each of its messages cost a rank: processor time of the comm lane.

Small all-reduces over TCP streams, each rank a machine of its own on the loopback device. A rank
sends a message to each of n - 1 peers and gets one from each, so its time for a collective is

    collective_s + (n - 1) message_s.

Both numbers are fitted by least squares to several n, with the least time of all ranks and rounds
for each: other processes on the machine only add to it. `cluster.py` has what this measured.

    PYTHONPATH=tests python -m benchmarks.messages
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time

import torch

import syncline
from syncline.comm.base import small_sum

ELEMENTS = 16
SIZES = (2, 3, 4, 6, 8)


def measure(count: int) -> float:
    """Return the lane's processor seconds for one collective, on this rank."""
    from syncline import session

    syncline.init()
    current = session._session
    assert current is not None
    comm = current.comm

    def run() -> float:
        sums = small_sum(comm, ELEMENTS, torch.float32)
        for _ in range(count // 10):
            comm.all_reduce(sums)
        started = time.thread_time()
        for _ in range(count):
            comm.all_reduce(sums)
        return (time.thread_time() - started) / count

    return current.lane.call(run)


def main() -> None:
    from ranks import run_ranks

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--collectives", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print the two fitted costs only")
    arguments = parser.parse_args()
    least = dict.fromkeys(SIZES, math.inf)
    for _ in range(arguments.rounds):
        for size in SIZES:
            found = run_ranks(size, lambda: measure(arguments.collectives), machines=size)
            least[size] = min(least[size], *found)
    slope, intercept = statistics.linear_regression([size - 1 for size in least], least.values())
    if arguments.json:
        print(json.dumps({"collective_s": max(0.0, intercept), "message_s": slope}))
        return
    for size, found_s in least.items():
        print(f"{size} ranks: {found_s * 1e6:.1f} us a collective")
    print(f"collective_s {intercept:.2e}, message_s {slope:.2e}")


if __name__ == "__main__":
    main()
