"""One rank of one arm: builds the network, then runs steps when the parent asks.

Between requests it sleeps in `recv`. Data and first weights depend on the rank and on nothing
else, so that arms that do the same arithmetic stay close. Started by `ranks.py`.

It also runs with the package of another commit (--against). So it uses of the package what users
do, and imports anything else where it is needed and not before.
"""

from __future__ import annotations

import ctypes
import json
import math
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
from torch.optim import SGD, AdamW, Optimizer

import syncline
from benchmarks.arms import ARMS, CONTROL, OTHER, WORKLOADS, Arm, Workload
from benchmarks.counting import counts_of

OPTIMIZERS: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "sgd": (SGD, {"lr": 0.01, "momentum": 0.9, "weight_decay": 1e-4}),
    "adamw": (AdamW, {"lr": 3e-4, "weight_decay": 0.1}),
}
_PR_SET_PDEATHSIG = 1


@dataclass
class Training:
    """A network ready to train; `finish` waits for communication that a step left running."""

    model: nn.Module
    optimizer: Optimizer
    finish: Callable[[], None] = lambda: None


def make_optimizer(model: nn.Module, workload: Workload) -> Optimizer:
    kind, settings = OPTIMIZERS[workload.optimizer]
    return kind(model.parameters(), **settings)


def build_no_exchange(model: nn.Module, arm: Arm, workload: Workload) -> Training:
    return Training(model, make_optimizer(model, workload))


def build_ddp(model: nn.Module, arm: Arm, workload: Workload) -> Training:
    replica = _ddp(model, arm)
    return Training(replica, make_optimizer(replica, workload))


def build_ddp_zero(model: nn.Module, arm: Arm, workload: Workload) -> Training:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    replica = _ddp(model, arm)
    kind, settings = OPTIMIZERS[workload.optimizer]
    optimizer = ZeroRedundancyOptimizer(
        replica.parameters(), optimizer_class=kind, parameters_as_bucket_view=True, **settings
    )
    return Training(replica, optimizer)


def build_fsdp2(model: nn.Module, arm: Arm, workload: Workload) -> Training:
    """Shard every layer (resnet: every stage) by itself, and what is left at the root.

    A transformer's blocks are its layers. Its tied weights are used outside of them, so they stay
    with the root.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for layer in getattr(model, "blocks", model.children()):
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return Training(model, make_optimizer(model, workload))


def build_syncline(model: nn.Module, arm: Arm, workload: Workload) -> Training:
    syncline.init(threads=1)
    optimizer = make_optimizer(model, workload)
    strategy: Any = arm.strategy
    if arm.period is not None:
        from syncline import strategies

        kind = arm.strategy.capitalize()
        settings = getattr(strategies, f"{kind}Settings")(period=arm.period)
        strategy = getattr(strategies, kind)(settings)
    replica = syncline.distribute(model, optimizer, strategy)
    return Training(model, optimizer, replica.synchronize)


BUILDERS: dict[str, Callable[[nn.Module, Arm, Workload], Training]] = {
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


def build_model(workload: Workload) -> nn.Module:
    if workload.model == "gpt":
        from benchmarks.gpt import Gpt

        return Gpt(workload.classes, workload.sample_shape[0])
    from syncline import models

    return models.build(workload.model, workload.sample_shape, workload.classes, **workload.options)


def make_batch(workload: Workload) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw input and labels: a label for each sample, or for each token of `gpt`."""
    shape = (workload.batch, *workload.sample_shape)
    if workload.model == "gpt":
        return torch.randint(workload.classes, shape), torch.randint(
            workload.classes, (math.prod(shape),)
        )
    return torch.randn(shape), torch.randint(workload.classes, (workload.batch,))


class Rank:
    """The network, its input and what the parent may ask for."""

    def __init__(self, workload_name: str, arm: Arm) -> None:
        torch.set_num_threads(1)
        workload = WORKLOADS[workload_name]
        torch.manual_seed(0)
        model = build_model(workload)
        self.training = BUILDERS.get(arm.method, build_syncline)(model, arm, workload)
        # After building, which may draw random numbers of its own: equal dropout in all arms.
        torch.manual_seed(1 + int(os.environ["RANK"]))
        self.x, self.y = make_batch(workload)

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

    def count(self, steps: int) -> dict[str, Any]:
        """Count what Python executes on this thread: in the loop's body, and in step() alone."""
        model, optimizer, x, y = self.training.model, self.training.optimizer, self.x, self.y

        def body() -> None:
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

        bodies = [counts_of(body) for _ in range(steps)]
        alone = []
        for _ in range(steps):
            F.cross_entropy(model(x), y).backward()
            alone.append(counts_of(optimizer.step))
            optimizer.zero_grad()
        self.training.finish()
        return {"body": bodies, "step": alone}

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
        arms = (*ARMS, OTHER, CONTROL)
        rank = Rank(workload_name, next(arm for arm in arms if arm.name == arm_name))
        channel.send(json.dumps({"package": syncline.__file__}).encode())
        while request := channel.recv(4096):
            question = json.loads(request)
            if "steps" in question:
                answer = rank.run(question["steps"])
            elif "count" in question:
                answer = rank.count(question["count"])
            else:
                answer = rank.sum()
            channel.send(json.dumps(answer).encode())
    except Exception as error:
        reason = " ".join(str(error).split())[:500]
        channel.send(json.dumps({"error": f"{type(error).__name__}: {reason}"}).encode())
        status = 1
    # Without finalizers: they would wait for peers that have gone.
    os._exit(status)


if __name__ == "__main__":
    main()
