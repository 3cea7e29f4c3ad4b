"""One rank of one arm: builds the network, then runs steps when the parent asks.

Between requests it sleeps in `recv`. Data and first weights depend on the rank and on nothing
else, so that arms that do the same arithmetic stay close. Started by `ranks.py`.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, Optimizer

from benchmarks.arms import ARMS, WORKLOADS, Arm
from syncline import models

SGD_SETTINGS: dict[str, Any] = {"lr": 0.01, "momentum": 0.9, "weight_decay": 1e-4}
_PR_SET_PDEATHSIG = 1


@dataclass
class Training:
    """A network ready to train; `finish` waits for communication that a step left running."""

    model: nn.Module
    optimizer: Optimizer
    finish: Callable[[], None] = lambda: None


def build_no_exchange(model: nn.Module, arm: Arm) -> Training:
    return Training(model, SGD(model.parameters(), **SGD_SETTINGS))


def build_ddp(model: nn.Module, arm: Arm) -> Training:
    replica = _ddp(model, arm)
    return Training(replica, SGD(replica.parameters(), **SGD_SETTINGS))


def build_ddp_zero(model: nn.Module, arm: Arm) -> Training:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    replica = _ddp(model, arm)
    optimizer = ZeroRedundancyOptimizer(
        replica.parameters(),
        optimizer_class=SGD,
        parameters_as_bucket_view=True,
        **SGD_SETTINGS,
    )
    return Training(replica, optimizer)


def build_fsdp2(model: nn.Module, arm: Arm) -> Training:
    """Shard every layer (resnet: every stage) by itself, and what is left at the root."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for layer in model.children():
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return Training(model, SGD(model.parameters(), **SGD_SETTINGS))


def build_syncline(model: nn.Module, arm: Arm) -> Training:
    import syncline
    from syncline.strategies import make_strategy
    from syncline.strategy_settings import SETTINGS

    syncline.init(threads=1)
    optimizer = SGD(model.parameters(), **SGD_SETTINGS)
    kind = SETTINGS[arm.strategy]
    settings = None if kind is None else kind(period=arm.period)
    replica = syncline.distribute(model, optimizer, make_strategy(arm.strategy, settings))
    return Training(model, optimizer, replica.synchronize)


BUILDERS: dict[str, Callable[[nn.Module, Arm], Training]] = {
    "ddp": build_ddp,
    "ddp_zero": build_ddp_zero,
    "fsdp2": build_fsdp2,
    "no_exchange": build_no_exchange,
    "syncline": build_syncline,
}


def _ddp(model: nn.Module, arm: Arm) -> nn.Module:
    from torch.nn.parallel import DistributedDataParallel

    assert arm.bucket_mb is not None, arm
    torch.distributed.init_process_group("gloo")
    return DistributedDataParallel(model, bucket_cap_mb=arm.bucket_mb, gradient_as_bucket_view=True)


class Rank:
    """The network, its input and the two things that the parent may ask for."""

    def __init__(self, workload_name: str, arm: Arm) -> None:
        torch.set_num_threads(1)
        workload = WORKLOADS[workload_name]
        torch.manual_seed(0)
        model = models.build(
            workload.model, workload.sample_shape, workload.classes, **workload.options
        )
        self.training = BUILDERS.get(arm.method, build_syncline)(model, arm)
        # After building, which may draw random numbers of its own: equal dropout in all arms.
        torch.manual_seed(1 + int(os.environ["RANK"]))
        self.x = torch.randn(workload.batch, *workload.sample_shape)
        self.y = torch.randint(workload.classes, (workload.batch,))

    def run(self, steps: int) -> dict[str, float]:
        """Take steps; the time includes what the last one left to communicate."""
        model, optimizer, x, y = self.training.model, self.training.optimizer, self.x, self.y
        start_s = time.perf_counter()
        for _ in range(steps):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        self.training.finish()
        return {"took_s": time.perf_counter() - start_s, "loss": loss.item()}

    @torch.no_grad()
    def sum(self) -> dict[str, float]:
        """Sum all parameters: equal sums mean equal parameters, for our purpose."""
        total = 0.0
        for parameter in self.training.model.parameters():
            whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
            total += whole.sum(dtype=torch.float64).item()
        return {"sum": total}


def main() -> None:
    """Serve requests until the parent hangs up."""
    workload_name, arm_name, descriptor = sys.argv[1:]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    channel = socket.socket(fileno=int(descriptor))
    status = 0
    try:
        rank = Rank(workload_name, next(arm for arm in ARMS if arm.name == arm_name))
        channel.send(json.dumps({"ready": True}).encode())
        while request := channel.recv(4096):
            question = json.loads(request)
            answer = rank.run(question["steps"]) if "steps" in question else rank.sum()
            channel.send(json.dumps(answer).encode())
    except Exception as error:
        reason = " ".join(str(error).split())[:500]
        channel.send(json.dumps({"error": f"{type(error).__name__}: {reason}"}).encode())
        status = 1
    # Without finalizers: they would wait for peers that have gone.
    os._exit(status)


if __name__ == "__main__":
    main()
