"""The rule of `benchmarks.das`: what a step takes on one node and on many, on the virtual clock.

A network is counted once for each number of samples and timed on a device made of the constants. A
layer that n ranks split computes on the samples of all n, with 1/n of its features. Each of the
n - 1 messages of an exchange takes a latency (MPI's pairwise exchange and ring), and all of them
together the bytes at the rate reached.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import itertools
import math
from collections.abc import Mapping
from statistics import NormalDist
from unittest.mock import patch

import msgspec
import numpy as np
import torch

from benchmarks.das_constants import CONSTANTS, Row
from syncline.cluster import Cluster, Link
from syncline.cluster_facts import Fact
from syncline.contract import Plan, UpdateSettings, World
from syncline.device import Device, update_s
from syncline.engine.bucket import Bucket
from syncline.measure.count import Counted, count
from syncline.measure.derive import layer_of, times_on, workload_of
from syncline.models import build
from syncline.perf.balance import LayerShape, best_groups
from syncline.sim import run
from syncline.sizes import ByLayer, Size
from syncline.strategies import Hybrid, HybridSettings
from syncline.workload import Workload

Values = Mapping[str, float]
VALUES: Values = {name: constant.value for name, constant in CONSTANTS.items()}
MOMENTUM = 1
"""Numbers that the optimizer keeps for each parameter."""
STEPS = 4
"""The last one is timed; the first ones fill the lanes."""
_COLLECT_EVERY = 25
_simulations = itertools.count(1)


class AsPublished(Hybrid):
    """Hybrid parallelism with the exchanges in the paper's order.

    A layer's gradient is reduced (part-reduce), its strip updated and gathered (part-broadcast) as
    soon as backward has finished the layer. `Hybrid` itself gathers after backward. For sizes
    only: the optimizer's settings of the step are not there yet.
    """

    def plan(self, world: World, sizes: list[Size], shards: int) -> Plan:  # type: ignore[override]
        found = super().plan(world, sizes, shards)
        by_layer = (dataclasses.replace(one, buckets=ByLayer()) for one in found.families)
        return dataclasses.replace(found, families=tuple(by_layer), overlap=True)

    def gradient_ready(self, bucket: Bucket) -> None:
        super().gradient_ready(bucket)
        super().before_use(bucket, UpdateSettings([], frozenset()))

    def before_use(self, bucket: Bucket, update: UpdateSettings) -> None:
        """Do nothing: the parameters are there, or forward waits for them."""


def batch_of(row: Row, values: Values) -> int:
    """Return the samples of a step, over all nodes."""
    return int(values["cd_dnn_batch"]) if row.batch is None else row.batch


def device_of(row: Row, values: Values, *, lost: float = 0.0) -> Device:
    """Return a node's device; `lost` of its cores do not compute."""

    def known(value: float) -> Fact:
        return Fact(value, source="benchmarks/das_constants.py")

    machine = row.machine
    peak = known(machine.peak_flops_per_s * (machine.cores - lost) / machine.cores)
    return Device(
        name=machine.name,
        conv_peak_flops_per_s=peak,
        peak_flops_per_s=peak,
        conv_efficiency=known(values["conv_efficiency"]),
        linear_efficiency=known(values["linear_efficiency"]),
        conv_half_samples=known(values["conv_half_samples"]),
        linear_half_rows=known(values["linear_half_rows"]),
        memory_bytes_per_s=known(values[machine.memory]),
        launch_s=known(0.0),
    )


@functools.cache
def counted_of(network: str, shape: tuple[int, ...], classes: int, samples: int) -> Counted:
    """Count a network's operations, once."""
    with torch.device("meta"):
        model = build(network, shape, classes)
    return count(model, torch.empty((samples, *shape), device="meta"))


def workload_on(row: Row, samples: int, device: Device, members: int = 1) -> Workload:
    """Return a node's workload, if groups of so many nodes split the linear layers."""
    counted = counted_of(row.network, row.sample_shape, row.classes, samples)
    layers = []
    for one in counted.layers:
        timed = one
        if members > 1 and one.kind == "linear":
            inputs = (members - 1) * samples * (one.input_bytes or 0)
            timed = dataclasses.replace(
                one,
                rows=one.rows * members,
                size_bytes=one.size_bytes // members,
                moved_bytes=one.moved_bytes + inputs,
            )
        layers.append(layer_of(one, *times_on(device, timed)))
    size_bytes = sum(size.size_bytes for size in counted.sizes)
    return workload_of(
        torch.nn.Module(),
        counted,
        layers,
        name=row.network,
        samples=samples,
        update_s=update_s(size_bytes, MOMENTUM, device),
    )


def alone_s(row: Row, values: Values) -> float:
    """Return the step of one node on the whole batch: no core is lost, nobody is waited for."""
    found = workload_on(row, batch_of(row, values), device_of(row, values))
    assert found.update_s is not None
    return found.forward_s + found.backward_s + found.update_s


@functools.cache
def slowest_of(ranks: int, sigma: float) -> float:
    """Return the mean of the largest of so many lognormal factors with mean 1."""
    normal = NormalDist()
    edges = np.linspace(-8, 8, 4001)
    below = np.array([normal.cdf(edge) for edge in edges]) ** ranks
    middles = (edges[1:] + edges[:-1]) / 2
    return float(np.diff(below) @ np.exp(sigma * middles - sigma**2 / 2))


def groups_of(row: Row, values: Values) -> int:
    """Return the number of groups with the fewest bytes: the paper's rule."""
    counted = counted_of(row.network, row.sample_shape, row.classes, batch_of(row, values))
    weights = [size for size in counted.sizes if size.rows and size.name.endswith("weight")]
    shapes = [LayerShape(one.num_elements // one.rows, one.rows) for one in weights]
    return best_groups(shapes, batch_of(row, values), ranks=row.nodes)


def cluster_of(row: Row, values: Values, duplex: str = "full") -> Cluster:
    """Return the nodes, with one rank each."""
    rate = values["link_share"] * row.machine.nominal_bytes_per_s
    link = Link(latency_s=0.0, rate_bytes_per_s=rate, duplex="half" if duplex == "half" else "full")
    return Cluster(
        machines=row.nodes,
        ranks_per_machine=1,
        network=link,
        inside=link,
        flops_per_s=row.machine.peak_flops_per_s,
        update_bytes_per_s=math.inf,
        message_s=values[row.machine.latency],
    )


def compute_of(row: Row, values: Values, groups: int) -> Workload:
    """Return a node's workload among many: fewer cores, and the slowest node's jitter."""
    device = device_of(row, values, lost=values["cores_lost"])
    samples = batch_of(row, values) // row.nodes
    found = workload_on(row, samples, device, row.nodes // groups)
    factor = slowest_of(row.nodes, values["jitter_sigma"])
    layers = tuple(
        msgspec.structs.replace(
            one, forward_s=one.forward_s * factor, backward_s=one.backward_s * factor
        )
        for one in found.layers
    )
    return msgspec.structs.replace(found, layers=layers)


def step_s(
    row: Row,
    values: Values,
    groups: int,
    *,
    duplex: str = "full",
    strategy: type[Hybrid] = AsPublished,
    all_ranks: bool = False,
) -> float:
    """Return the time of a step on all nodes.

    Nodes are alike and each has a link of its own, so one of them stands for all, in groups, too:
    one rank is simulated. With `all_ranks` all are, which gives the same.
    """
    settings = HybridSettings(groups=groups)

    def simulated() -> run.Outcome:
        return run.simulate(
            compute_of(row, values, groups),
            cluster_of(row, values, duplex),
            lambda: strategy(settings),
            steps=STEPS,
            links="fast" if all_ranks else "exact",
        )

    if all_ranks:
        found = simulated()
    else:
        with patch.object(run, "are_alike", return_value=True):
            found = simulated()
    # A simulation leaves 15 MB in reference cycles, and runs with the collector off.
    if next(_simulations) % _COLLECT_EVERY == 0:
        gc.collect()
    return found.step_ends_s[-1] - found.step_ends_s[-2]


def speed_up(row: Row, values: Values, groups: int, **how: object) -> float:
    """Return how many times as fast as one node all of them are, on the same batch."""
    return alone_s(row, values) / step_s(row, values, groups, **how)  # type: ignore[arg-type]


def free_speed_up(row: Row, values: Values, groups: int) -> float:
    """Return the speed-up if communication takes no time: small batches, lost cores and jitter.

    Updates of strips hide behind compute, as they do on the virtual clock.
    """
    found = compute_of(row, values, groups)
    return alone_s(row, values) / (found.forward_s + found.backward_s)
