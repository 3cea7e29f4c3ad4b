"""One rank of the wire benchmark: all arms of one version in one process, run when asked.

Started by `wire_machines.py` under torchrun in the lab. It also runs with the package of another
commit (--against). So it uses of the package what users do, and imports anything else where it is
needed and not before.
"""

from __future__ import annotations

import itertools
import json
import os
import resource
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, Optimizer

import syncline
from syncline.models.sleeping import SleepingLayer, sleeping

SETTLING_STEPS = 2
FIRST_STEPS = 20  # enough for every arm to have chosen its ways
LR = 1e-4


def make_network(spec: dict[str, Any]) -> nn.Module:
    """Return the network of this name, or one that sleeps."""
    torch.manual_seed(0)
    if "network" in spec:
        from syncline import models

        return models.build(
            spec["network"], tuple(spec["shape"]), spec["classes"], **spec["options"]
        )
    layer = SleepingLayer(
        spec["bytes"] // spec["layers"],
        spec["compute_s"] / 3 / spec["layers"],
        spec["compute_s"] * 2 / 3 / spec["layers"],
    )
    return sleeping([layer] * spec["layers"])


def make_samples(spec: dict[str, Any], arm: str) -> torch.Tensor:
    """Return a batch of one rank; of all ranks, where each computes on the whole batch."""
    if "network" not in spec:
        return torch.ones(4)
    ranks = dist.get_world_size()
    batch = spec["batch"] if arm.startswith("dtensor") else spec["batch"] // ranks
    torch.manual_seed(1 + dist.get_rank())
    return torch.randn(batch, *spec["shape"])


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
    if name == "syncline":
        settings = {"early": False} if size == "late" else {}
        replica = syncline.distribute(model, optimizer, "synchronous", **settings)
        return model, optimizer, replica.synchronize
    if arm == "all_reduce gloo":
        return model, AllReduceAfterBackward(model.parameters()), lambda: None
    if name == "hybrid":
        replica = syncline.distribute(model, optimizer, make_hybrid(int(size)))
        return model, optimizer, replica.synchronize
    if name == "dtensor":
        return make_dtensor(model), SGD(model.parameters(), lr=LR), lambda: None
    if name == "layered":
        replica = syncline.distribute(model, optimizer, make_layered(published=size == "published"))
        return model, optimizer, replica.synchronize
    if arm in BASELINES:
        replica = syncline.distribute(model, optimizer, arm)
        return model, optimizer, replica.synchronize
    if arm not in ASYNCHRONOUS:
        raise ValueError(f"there is no arm {arm!r}")
    replica = syncline.distribute(model, optimizer, make_asynchronous(arm))
    if not replica.my_shards:
        return SERVING, optimizer, replica.serve
    return model, optimizer, replica.synchronize


class AllReduceAfterBackward(SGD):
    """The conventional way on Gloo: one all-reduce of all gradients, then every rank updates."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, lr=LR)
        everything = self.param_groups[0]["params"]
        self._flat = torch.zeros(sum(one.numel() for one in everything))
        parts = self._flat.split([one.numel() for one in everything])
        self._parts = list(zip(everything, parts, strict=True))

    def step(self, closure: Any = None) -> None:
        for parameter, part in self._parts:
            part.copy_(parameter.grad.view(-1))
        dist.all_reduce(self._flat)
        self._flat.div_(dist.get_world_size())
        for parameter, part in self._parts:
            parameter.grad = part.view_as(parameter)
        super().step()


def make_layered(*, published: bool) -> Any:
    from syncline.strategies import Layered, LayeredSettings

    return Layered(LayeredSettings(as_published=published))


def make_hybrid(groups: int) -> Any:
    from syncline.strategies import Hybrid, HybridSettings

    return Hybrid(HybridSettings(groups=groups))


def make_dtensor(model: nn.Module) -> nn.Module:
    """Split the linear layers of a Sequential over all ranks by torch's own tensor parallelism.

    Pairs: by columns, then by rows, with one sum after each pair. Each rank computes on the whole
    batch, so nothing is gathered at the beginning.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    names = [name for name, one in model.named_modules() if isinstance(one, nn.Linear)]
    plan: dict[str, Any] = {}
    for number, name in enumerate(names):
        plan[name] = RowwiseParallel() if number % 2 else ColwiseParallel()
    if len(names) % 2:
        plan[names[-1]] = ColwiseParallel(output_layouts=Shard(-1), use_local_output=True)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return parallelize_module(model, mesh, plan)


SERVING = nn.Identity()
"""Stands for the network of a rank that only serves others."""

BASELINES = ("all_reduce", "wait_free", "merged", "sync_server")
"""Strategies with their default settings: `merged` assumes 1 Gbit/s."""

ASYNCHRONOUS: dict[str, tuple[str, dict[str, Any]]] = {
    "gossip ring": ("Gossip", {"partners": "ring"}),
    "gossip uniform": ("Gossip", {}),
    "elastic": ("Elastic", {}),
    "server": ("Server", {}),
    "server one": ("Server", {"servers": 1}),
}
"""By the arm's name, the strategy and its settings."""


def make_asynchronous(arm: str) -> Any:
    from syncline import strategies

    kind, settings = ASYNCHRONOUS[arm]
    return getattr(strategies, kind)(getattr(strategies, f"{kind}Settings")(**settings))


def sent_bytes() -> int:
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def run_block(training: Any, steps: int, x: torch.Tensor, input_s: float = 0.0) -> dict[str, Any]:
    model, optimizer, finish = training
    starts = []
    dist.barrier()
    bytes_before, cpu_before = sent_bytes(), cpu_s()
    for _ in range(steps if model is not SERVING else 0):
        starts.append(time.perf_counter())
        time.sleep(input_s)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    finish()
    dist.barrier()
    between = [later - sooner for sooner, later in itertools.pairwise(starts)]
    return {
        "step_s": statistics.median(between[SETTLING_STEPS:] or [0.0]),
        "sent_bytes": (sent_bytes() - bytes_before) / steps,
        "cpu_s": (cpu_s() - cpu_before) / steps,
    }


def main() -> None:
    """Serve requests until the parent hangs up."""
    spec = json.loads(sys.argv[1])
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel.connect(spec["channel"])
    channel.send(json.dumps({"rank": int(os.environ["RANK"])}).encode())
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    syncline.init(threads=1)
    arms, failures, samples = {}, {}, {}
    for arm in spec["arms"]:
        try:
            arms[arm], samples[arm] = build(arm, spec), make_samples(spec, arm)
            run_block(arms[arm], spec.get("first_steps", FIRST_STEPS), samples[arm])
        except Exception as error:  # an arm that cannot run is reported, not hidden
            failures[arm] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            arms.pop(arm, None)
    channel.send(json.dumps({"package": syncline.__file__, "failures": failures}).encode())
    while request := channel.recv(4096):
        question = json.loads(request)
        try:
            arm = question["arm"]
            answer = run_block(arms[arm], question["steps"], samples[arm], question["input_s"])
        except Exception as error:
            reason = " ".join(str(error).split())[:500]
            answer = {"error": f"{question['arm']}: {type(error).__name__}: {reason}"}
        channel.send(json.dumps(answer).encode())
    # Without finalizers: they would wait for peers that have gone.
    os._exit(0)


if __name__ == "__main__":
    main()
