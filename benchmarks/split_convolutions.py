"""What splitting convolutions would gain: `python -m benchmarks.split_convolutions`.

Hybrid parallelism on the networks and clusters of Das et al. 2016, simulated twice: with their
linear layers split over groups of ranks, as Syncline does, and with the last convolutions split by
output features, too. For each network the best number of groups is taken for both. A convolution
is described to the simulator as a linear layer with its weights, operations and activations.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any, NamedTuple

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.command import machine_facts
from syncline.cluster import cluster_of
from syncline.config import ClusterSettings
from syncline.device import DEVICES
from syncline.measure.derive import derive
from syncline.models import build
from syncline.sim.run import simulate
from syncline.strategies import Hybrid, HybridSettings
from syncline.workload import Workload


class Case(NamedTuple):
    network: str
    pixels: int
    cluster: str
    ranks: int
    batch: int


CASES = (
    Case("vgg-a", 224, "e5-2698v3-fdr", 128, 512),
    Case("vgg-a", 224, "e5-2698v3-fdr", 64, 256),
    Case("overfeat-fast", 231, "e5-2698v3-fdr", 64, 256),
    Case("vgg-a", 224, "c4.8xlarge-10gbe", 16, 256),
)
"""The networks with convolutions among the results in the paper's abstract."""


def with_rows(workload: Workload, convolutions: list[str]) -> Workload:
    """Return the workload in which these convolutions, a chain, can be split."""
    parameters = []
    before = dict(zip(convolutions[1:], convolutions, strict=False))
    rows = {size.layer: size.num_elements for size in workload.parameters if "bias" in size.name}
    for size in workload.parameters:
        if size.layer in convolutions:
            how = {"rows": rows[size.layer], "follows": before.get(size.layer, "")}
            size = msgspec.structs.replace(size, **how)
        parameters.append(size)
    return msgspec.structs.replace(workload, parameters=tuple(parameters))


def step_s(case: Case, workload: Workload, layers: list[str], groups: int) -> tuple[float, float]:
    """Return the seconds of a step, and the share of communication that shows."""
    settings = HybridSettings(groups=groups, layers=tuple(layers))
    found = simulate(
        workload,
        cluster_of(ClusterSettings(preset=case.cluster), case.ranks),
        lambda: Hybrid(settings),
        steps=5,
        links="fast",
    )
    return found.step_s, found.exposed_communication


def measure(case: Case) -> list[dict[str, Any]]:
    """Return the best step without and with split convolutions, from the last one on."""
    shape = (3, case.pixels, case.pixels)
    device = DEVICES[cluster_of(ClusterSettings(preset=case.cluster), 1).device]
    workload = derive(
        build(case.network, shape, 1000), shape, case.batch // case.ranks, 1.0, device=device
    )
    convolutions = [layer.name for layer in workload.layers if layer.kind == "conv"]
    linear = [layer.name for layer in workload.layers if layer.kind == "linear"]
    counts = [groups for groups in range(1, case.ranks) if case.ranks % groups == 0]
    rows = []
    for number in range(5):
        chain = convolutions[len(convolutions) - number :]
        work = with_rows(workload, chain)
        found = [(*step_s(case, work, [*chain, *linear], one), one) for one in counts]
        seconds, exposed, groups = min(found)
        rows.append(
            {
                **case._asdict(),
                **{"convolutions": number, "groups": groups, "step_s": seconds},
                "exposed": exposed,
            }
        )
        print(f"{case.network} on {case.ranks}: {rows[-1]}", file=sys.stderr)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.split_convolutions")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    rows = [row for case in CASES for row in measure(case)]
    if asked.json:
        print(json.dumps({"machine": machine_facts(), "rows": rows}, indent=2))
        return 0
    table = Table(title="the last convolutions split besides the linear layers, simulated")
    for column in ("network", "cluster", "ranks", "split", "groups", "step, ms", "exposed"):
        table.add_column(column, justify="left" if column in ("network", "cluster") else "right")
    for row in rows:
        table.add_row(
            *(row["network"], row["cluster"], str(row["ranks"]), str(row["convolutions"])),
            *(str(row["groups"]), f"{row['step_s'] * 1e3:.1f}", f"{row['exposed']:.1%}"),
        )
    Console(width=None if sys.stdout.isatty() else 110).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
