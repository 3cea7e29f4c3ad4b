"""Chooses a strategy's settings from times that a run measures at its start.

Each rank times one forward and backward of its own, one exchange among all, and a copy of memory;
all ranks do so at the same time. Rank 0 simulates a step with each choice and decides for all.
"""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable

import msgspec
import torch
from torch import nn

from syncline.cluster import Cluster, Link, cluster_of
from syncline.comm.base import Communicator, exchange_bytes, small_sum
from syncline.config import Job
from syncline.engine.lane import Lane
from syncline.errors import ConfigError
from syncline.measure.derive import derive
from syncline.sim.groups_choice import Handling, best_of, candidates, table_of
from syncline.strategies.group_settings import HybridSettings
from syncline.workload import Workload

_LARGE, _SMALL = 1 << 20, 16
"""Elements of the two exchanges that are timed: 4 MB shows the rate, 64 bytes the latency."""
_COPIED = 1 << 22
"""Elements of a copy: 16 MB, more than caches hold."""
_ROUNDS = 3
"""The shortest of these counts: first calls include set-up, and others may be disturbed."""


class Chosen(msgspec.Struct):
    """What rank 0 tells the others."""

    settings: HybridSettings
    table: list[str]


def choose_groups(
    job: Job,
    model: nn.Module,
    batch: torch.Tensor,
    loss: Callable[[torch.Tensor], torch.Tensor],
    comm: Communicator,
    lane: Lane,
) -> Chosen:
    """Return how many groups split which layers. Every rank calls it, with a shard's batch."""
    assert job.strategy.shards is not None
    forward_s, backward_s = _time_compute(model, batch, loss)
    with comm.traffic.apart():
        cluster, spent_s = lane.call(_time_exchange, job, comm)
        taking_s = lane.call(_time_copy, comm)
        mine = b""
        if comm.ranks[comm.position] == 0:
            workload = _scaled(model, batch, forward_s, backward_s)
            wanted = job.strategy.own
            assert isinstance(wanted, HybridSettings)
            handling = Handling(taking_s, spent_s * _busy(cluster))
            found = candidates(workload, cluster, job.strategy.shards, wanted, handling)
            mine = msgspec.json.encode(Chosen(best_of(found).settings, table_of(found)))
        told = lane.call(exchange_bytes, comm, mine)
    return msgspec.json.decode(told[comm.ranks.index(0)], type=Chosen)


def _time_compute(
    model: nn.Module, batch: torch.Tensor, loss: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[float, float]:
    """Return the seconds of forward and backward, on a copy of the model."""
    trial, times = copy.deepcopy(model).train(), []
    with torch.random.fork_rng():
        for _ in range(_ROUNDS):
            started_s = time.perf_counter()
            found = loss(trial(batch))
            middle_s = time.perf_counter()
            found.backward()
            times.append((middle_s - started_s, time.perf_counter() - middle_s))
    return min(one[0] for one in times), min(one[1] for one in times)


def _time_copy(comm: Communicator) -> float:
    """Return the seconds to copy a byte, while all ranks copy."""
    source, target, times = torch.ones(_COPIED), torch.zeros(_COPIED), []
    for _ in range(_ROUNDS):
        comm.barrier()
        started_s = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - started_s)
    return min(times) / (target.itemsize * _COPIED)


def _busy(cluster: Cluster) -> float:
    """Return what a processor second of the comm lane takes from compute.

    Nothing if each rank has a core more than for its compute lane. Ranks that share cores take
    turns; then it takes as much longer as there are more ranks than cores.
    """
    cores = len(os.sched_getaffinity(0))
    return cluster.ranks_per_machine / cores if cluster.ranks_per_machine >= cores else 0.0


def _time_exchange(job: Job, comm: Communicator) -> tuple[Cluster, float]:
    """Return the cluster that the ranks run on, as an exchange among all of them shows it.

    Also returns the processor seconds that a rank spends on each byte of a vector.
    """
    machines = comm.machines
    if len({len(machine) for machine in machines}) > 1:
        raise ConfigError(
            "strategy.hybrid.groups",
            'got "auto" on machines with different numbers of ranks',
            "only equal machines are simulated",
            "Give a number of groups.",
        )
    seconds, spent_s = {}, {}
    for size in (_SMALL, _LARGE):
        partials = small_sum(comm, size, torch.float32)
        times, spent = [], []
        for _ in range(_ROUNDS):
            comm.barrier()
            started_s, began_s = time.perf_counter(), time.thread_time()
            comm.reduce_scatter(partials)
            comm.all_gather(partials.gathered)
            times.append(time.perf_counter() - started_s)
            spent.append(time.thread_time() - began_s)
        seconds[size], spent_s[size] = min(times), min(spent)
    latency_s = seconds[_SMALL] / 2  # of each of the two collectives
    parts = len(machines) if len(machines) > 1 else comm.size
    moved_bytes = 2 * (parts - 1) / parts * 4 * _LARGE
    rate = moved_bytes / max(seconds[_LARGE] - seconds[_SMALL], 1e-9)
    link = Link(latency_s=latency_s, rate_bytes_per_s=rate)
    usual = cluster_of(job.cluster, comm.size, len(machines))
    many = len(machines) > 1
    found = msgspec.structs.replace(
        usual,
        network=link if many else usual.network,
        inside=usual.inside if many else link,
        message_s=0.0,
        collective_s=0.0,
        cores=None,  # compute was timed while all ranks computed
    )
    return found, spent_s[_LARGE] / (4 * _LARGE)


def _scaled(model: nn.Module, batch: torch.Tensor, forward_s: float, backward_s: float) -> Workload:
    """Return the model's workload, with counted operations scaled to the measured times."""
    flops_per_s = 1e9  # any rate: only the proportions of the layers remain
    counted = derive(model, tuple(batch.shape[1:]), len(batch), flops_per_s, dtype=batch.dtype)
    forward = forward_s / max(counted.forward_s, 1e-12)
    backward = backward_s / max(counted.backward_s, 1e-12)
    return counted.scaled(forward, backward)
