"""One machine of the wire benchmark: all arms in one process, run in turn.

Started by `wire.py` under torchrun in the lab. Rank 0 writes the result. Every rank draws the
same order of arms, so no word is needed between rounds beyond a barrier.
"""

from __future__ import annotations

import itertools
import json
import random
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, Optimizer

import syncline
from syncline.models.sleeping import SleepingLayer, sleeping
from syncline.strategies import (
    Elastic,
    Gossip,
    GossipSettings,
    Server,
    ServerSettings,
)

SETTLING_STEPS = 2
FIRST_STEPS = 20  # enough for every arm to have chosen its ways
LR = 1e-4


def make_network(spec: dict[str, Any]) -> nn.Module:
    layer = SleepingLayer(
        spec["bytes"] // spec["layers"],
        spec["compute_s"] / 3 / spec["layers"],
        spec["compute_s"] * 2 / 3 / spec["layers"],
    )
    torch.manual_seed(0)
    return sleeping([layer] * spec["layers"])


def build(arm: str, spec: dict[str, Any]) -> tuple[nn.Module, Optimizer, Callable[[], None]]:
    """Return a network, its optimizer and what waits for the last step's communication."""
    model = make_network(spec)
    name, _, size = arm.partition(" ")
    if name in ("ddp", "ddp_zero"):
        from torch.nn.parallel import DistributedDataParallel

        replica = DistributedDataParallel(
            model, bucket_cap_mb=float(size), gradient_as_bucket_view=True
        )
        if name == "ddp":
            return replica, SGD(replica.parameters(), lr=LR), lambda: None
        from torch.distributed.optim import ZeroRedundancyOptimizer

        zero = ZeroRedundancyOptimizer(
            replica.parameters(), optimizer_class=SGD, parameters_as_bucket_view=True, lr=LR
        )
        return replica, zero, lambda: None
    if name == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model.children():
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model, SGD(model.parameters(), lr=LR), lambda: None
    optimizer = SGD(model.parameters(), lr=LR)
    if name == "no_exchange":
        return model, optimizer, lambda: None
    if name != "syncline" and arm not in ASYNCHRONOUS:
        raise ValueError(f"there is no arm {arm!r}")
    strategy = ASYNCHRONOUS.get(arm, lambda: "synchronous")()
    spread = syncline.distribute(model, optimizer, strategy, early=size != "late")
    if not spread.my_shards:
        return SERVING, optimizer, spread.serve
    return model, optimizer, spread.synchronize


SERVING = nn.Identity()
"""Stands for the network of a rank that only serves others."""

ASYNCHRONOUS: dict[str, Callable[[], Any]] = {
    "gossip ring": lambda: Gossip(GossipSettings(partners="ring")),
    "gossip uniform": lambda: Gossip(GossipSettings()),
    "elastic": lambda: Elastic(),
    "server": lambda: Server(),
    "server one": lambda: Server(ServerSettings(servers=1)),
}


def sent_bytes() -> int:
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def run_block(training: Any, steps: int, x: torch.Tensor) -> dict[str, Any]:
    model, optimizer, finish = training
    starts = []
    dist.barrier()
    bytes_before, cpu_before = sent_bytes(), cpu_s()
    for _ in range(steps if model is not SERVING else 0):
        starts.append(time.perf_counter())
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    finish()
    dist.barrier()
    between = [later - sooner for sooner, later in itertools.pairwise(starts)]
    return {
        "step_s": between[SETTLING_STEPS:],
        "sent_bytes": (sent_bytes() - bytes_before) / steps,
        "cpu_s": (cpu_s() - cpu_before) / steps,
    }


def main() -> None:
    spec = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = syncline.init(threads=1)
    x = torch.ones(4)
    arms, failures = {}, {}
    for arm in spec["arms"]:
        try:
            arms[arm] = build(arm, spec)
            run_block(arms[arm], FIRST_STEPS, x)
        except Exception as error:  # an arm that cannot run is reported, not hidden
            failures[arm] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    results: dict[str, list[dict[str, Any]]] = {arm: [] for arm in arms}
    order = random.Random(0)
    for _ in range(spec["rounds"]):
        for arm in order.sample(list(arms), len(arms)):
            results[arm].append(run_block(arms[arm], spec["steps"], x))
    found = {
        arm: {
            "step_s": [statistics.median(block["step_s"] or [0.0]) for block in blocks],
            "sent_bytes": statistics.median(block["sent_bytes"] for block in blocks),
            "cpu_s": statistics.median(block["cpu_s"] for block in blocks),
        }
        for arm, blocks in results.items()
    }
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, found)
    if rank == 0:
        answer = {"arms": everybody, "failures": failures}
        Path(spec["out"]).write_text(json.dumps(answer))
    dist.barrier()


if __name__ == "__main__":
    main()
