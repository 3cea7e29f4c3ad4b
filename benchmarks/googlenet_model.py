"""The rule of `benchmarks.googlenet`: what a step takes, by the virtual clock and by formulas."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from benchmarks import googlenet_constants as constants
from syncline.cluster import Cluster, Link
from syncline.measure.imports import import_workload
from syncline.measure.imports.bcaffe import LoggedLayer
from syncline.perf.formulas import merged_layers, wait_free
from syncline.sim.run import simulate
from syncline.strategies import Merged, MergedSettings
from syncline.workload import Workload

NODES = (2, 4, 8)
PUBLISHED: dict[str, tuple[float, float, float]] = {
    "wait_free": (74.83, 74.91, 62.9),
    "merged": (79.02, 75.03, 75.68),
    "all_reduce": (62.57, 57.67, 55.58),
}
"""Images/s of a GPU on 2, 4 and 8 nodes: B-Caffe, scripts/gmwfbp.py, realdata_speedup."""
RANGED = (
    "ALONE_SAMPLES_PER_S",
    "COPY_BYTES_PER_S",
    "SCALE_BYTES_PER_S",
    "CALL_S",
    "EXTRAPOLATION",
)
NOMINAL_BYTES_PER_S = 1.25e9
VALUES = {name: getattr(constants, name).value for name in RANGED}


@dataclasses.dataclass(frozen=True)
class Line:
    """An exchange of S bytes takes startup_s + S * byte_s."""

    startup_s: float
    byte_s: float

    def seconds(self, size_bytes: float) -> float:
        return self.startup_s + size_bytes * self.byte_s if size_bytes else 0.0


def read_table(path: Path) -> list[tuple[float, float]]:
    """Return (bytes, seconds) of an OSU table; its lines are `size time` or `nodes,size time`."""
    rows = [re.split(r"[,\s]+", line.strip()) for line in path.read_text().splitlines()]
    numbers = [row for row in rows if row[0].isdigit()]
    return [(float(row[-2]), float(row[-1]) * 1e-6) for row in numbers]


def fit(table: Sequence[tuple[float, float]]) -> Line:
    """Return the line with the least relative error over all sizes that count."""
    kept = [row for row in table if row[0] >= constants.FIT_FROM_BYTES]
    sizes, times = (np.array(column) for column in zip(*kept, strict=True))
    terms = np.stack([1 / times, sizes / times], axis=1)
    startup_s, byte_s = np.linalg.lstsq(terms, np.ones(len(kept)), rcond=None)[0]
    return Line(float(startup_s), float(byte_s))


def exchange_of(network: Line, values: Mapping[str, float]) -> Line:
    """Add to the network's line what an exchange costs a node besides."""
    copies_s = constants.COPIES_PER_BYTE / values["COPY_BYTES_PER_S"]
    byte_s = network.byte_s * values["EXTRAPOLATION"]
    return Line(
        network.startup_s + values["CALL_S"], byte_s + copies_s + 1 / values["SCALE_BYTES_PER_S"]
    )


def step_alone_s(values: Mapping[str, float]) -> float:
    return constants.SAMPLES_PER_GPU / values["ALONE_SAMPLES_PER_S"]


def simulated_s(workload: Workload, method: str, nodes: int, exchange: Line) -> float:
    """Return the time of a step on the virtual clock; `workload` takes as long as a step alone."""
    # A ring, since the simulator sends small vectors whole in direct collectives.
    rate = 2 * (nodes - 1) / nodes / exchange.byte_s
    link = Link(latency_s=0.0, rate_bytes_per_s=rate)
    cluster = Cluster(
        machines=nodes,
        ranks_per_machine=1,
        network=link,
        inside=link,
        flops_per_s=1.0,
        update_bytes_per_s=math.inf,
        collective_s=exchange.startup_s,
    )
    settings = MergedSettings(latency_s=exchange.startup_s / 2, rate_bytes_per_s=rate)
    strategy = method if method != "merged" else lambda: Merged(settings)
    return simulate(workload, cluster, strategy, steps=4, algorithm="ring").step_s


def computed_s(workload: Workload, method: str, exchange: Line, alone_s: float) -> float:
    """Return the same from the closed formulas, which know no meeting for flags."""
    sizes = [layer.size_bytes for layer in workload.layers]
    backward_s = [layer.backward_s for layer in workload.layers]
    if method == "all_reduce":
        return alone_s + exchange.seconds(sum(sizes))
    if method == "merged":
        starts = merged_layers(sizes, backward_s, exchange.startup_s, exchange.byte_s)
        ends = [*starts[1:], len(sizes)]
        joined = {a: sum(sizes[a:b]) for a, b in zip(starts, ends, strict=True)}
        sizes = [joined.get(number, 0) for number in range(len(sizes))]
    return alone_s + wait_free(backward_s, list(map(exchange.seconds, sizes))).exposed_s


def logged_s(layers: Sequence[LoggedLayer], method: str, alone_s: float) -> float:
    """Return the time of a step with the exchanges that a log has."""
    times_s = [one.merged_s if method == "merged" else one.exchange_s for one in layers]
    return alone_s + wait_free([one.backward_s for one in layers], times_s).exposed_s


def workload_of(path: Path, alone_s: float) -> Workload:
    """Return the log's workload; forward stands for all of the step that is not backward."""
    _, found = import_workload(path, format="bcaffe", samples=2 * constants.SAMPLES_PER_GPU)
    made = found.workload
    factor = (alone_s - made.backward_s) / made.forward_s
    layers = tuple(
        msgspec.structs.replace(layer, forward_s=layer.forward_s * factor) for layer in made.layers
    )
    return msgspec.structs.replace(made, layers=layers)


def interval_of(
    workload: Workload, method: str, network: Line, middle: float
) -> tuple[float, float]:
    """Return the range of a prediction: each constant at its ends, changes added as squares."""
    below = above = 0.0
    for name in RANGED:
        constant = getattr(constants, name)
        changes = [0.0]
        for value in (constant.low, constant.high):
            values = VALUES | {name: value}
            exchange, alone_s = exchange_of(network, values), step_alone_s(values)
            step_s = computed_s(workload, method, exchange, alone_s)
            base_s = computed_s(
                workload, method, exchange_of(network, VALUES), step_alone_s(VALUES)
            )
            changes.append(middle * (base_s / step_s - 1))
        below += min(changes) ** 2
        above += max(changes) ** 2
    return middle - math.sqrt(below), middle + math.sqrt(above)


def sensitivity_of(workload: Workload, networks: Mapping[int, Line]) -> dict[str, dict[str, float]]:
    """Return mean and largest error with one thing changed: constants at their ends, and more."""
    uniform_s = workload.backward_s / len(workload.layers)
    uniform = msgspec.structs.replace(
        workload,
        layers=tuple(msgspec.structs.replace(one, backward_s=uniform_s) for one in workload.layers),
    )
    ring = {nodes: Line(0.0, 2 * (nodes - 1) / nodes / NOMINAL_BYTES_PER_S) for nodes in NODES}
    no_copies = VALUES | {"COPY_BYTES_PER_S": math.inf, "SCALE_BYTES_PER_S": math.inf}
    no_latency = {nodes: Line(0.0, line.byte_s) for nodes, line in networks.items()}
    cases = {"as it is": (workload, networks, VALUES)}
    for name in RANGED:
        for end in ("low", "high"):
            value = getattr(getattr(constants, name), end)
            cases[f"{name} = {value:g}"] = (workload, networks, VALUES | {name: value})
    cases |= {
        "no copies, no scaling": (workload, networks, no_copies),
        "no latency, no cost of a call": (workload, no_latency, VALUES | {"CALL_S": 0.0}),
        "a ring at 1.25 GB/s for the table": (workload, ring, VALUES),
        "backward equal for all layers": (uniform, networks, VALUES),
    }
    found = {}
    for case, (work, lines, values) in cases.items():
        alone_s = step_alone_s(values)
        errors = []
        for method, speeds in PUBLISHED.items():
            for nodes, published in zip(NODES, speeds, strict=True):
                step_s = computed_s(work, method, exchange_of(lines[nodes], values), alone_s)
                errors.append(abs(constants.SAMPLES_PER_GPU / step_s / published - 1))
        found[case] = {"mean": sum(errors) / len(errors), "largest": max(errors)}
    return found
