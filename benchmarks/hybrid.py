"""Hybrid parallelism against others: `python -m benchmarks.hybrid` (as root).

Real networks on machines of the lab with links of 1 Gbit/s, or on one machine: step times of
synchronous SGD, DDP, hybrid parallelism with each number of groups, and torch's tensor parallelism
(DTensor, one group). The global batch is the same for all. Arms run in turn, in shuffled order;
times are step start to step start, the median of each block of the slowest rank.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from lab.network import Lab, LabError, why_not
from rich.console import Console
from rich.table import Table

from benchmarks.channels import ArmFailed
from benchmarks.command import end_cleanly, machine_facts, names
from benchmarks.versions import THIS
from benchmarks.wire_machines import Machines

RANKS = 4
NETWORKS: dict[str, dict[str, Any]] = {
    "cd-dnn": {"network": "cd-dnn", "shape": [429], "classes": 9304, "options": {}, "batch": 256},
    "vgg-a": {
        **{"network": "vgg-a", "shape": [3, 32, 32], "classes": 10, "batch": 32},
        "options": {"hidden": [4096, 4096]},
    },
    "alexnet": {
        **{"network": "alexnet", "shape": [3, 64, 64], "classes": 1000, "batch": 32},
        "options": {},
    },
}
ARMS = ("syncline", "ddp 25", "hybrid 1", "hybrid 2", "dtensor")


def measure(job: argparse.Namespace, network: str) -> dict[str, list[float]]:
    """Return the step times of each arm, one for each round."""
    arms = [arm for arm in job.arms if arm != "dtensor" or network == "cd-dnn"]
    found: dict[str, list[float]] = {arm: [] for arm in arms}
    order = random.Random(0)
    with tempfile.TemporaryDirectory() as folder, Lab(job.machines, job.rate) as lab:
        spec = NETWORKS[network] | {"folder": folder, "first_steps": 4}
        machines = Machines(lab, THIS, arms, spec, 0, RANKS // job.machines)
        try:
            if machines.failures:
                raise ArmFailed(str(machines.failures))
            for number in range(job.rounds):
                for arm in order.sample(arms, len(arms)):
                    block = machines.run(arm, job.steps)
                    found[arm].append(max(rank["step_s"] for rank in block))
                print(f"{network}, round {number + 1} of {job.rounds}", file=sys.stderr)
        finally:
            machines.close()
    return found


def table_of(network: str, found: dict[str, list[float]], title: str) -> Table:
    table = Table(title=f"{network}, {title}")
    for column in ("arm", "step, ms", "against synchronous", "against DDP"):
        table.add_column(column, justify="left" if column == "arm" else "right")
    middle = {arm: statistics.median(times_s) for arm, times_s in found.items()}
    for arm, times_s in found.items():
        spread = f"({min(times_s) * 1e3:.0f} to {max(times_s) * 1e3:.0f})"
        against = [
            f"{middle[base] / middle[arm]:.2f}" if base in middle else ""
            for base in ("syncline", "ddp 25")
        ]
        table.add_row(arm, f"{middle[arm] * 1e3:.0f} {spread}", *against)
    return table


def read_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hybrid", description=__doc__)
    parser.add_argument("--networks", type=names(NETWORKS), default=list(NETWORKS))
    parser.add_argument("--arms", type=names(dict.fromkeys(ARMS)), default=list(ARMS))
    parser.add_argument("--machines", type=int, choices=(1, 2, 4), default=4, help="for 4 ranks")
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--json", action="store_true")
    job = parser.parse_args(arguments)
    if job.rounds < 1 or job.steps < 4:
        parser.error("--rounds is at least 1, --steps at least 4")
    return job


def main() -> int:
    """Measure and print."""
    job = read_arguments()
    if reason := why_not():
        print(f"benchmarks.hybrid: {reason}", file=sys.stderr)
        return 2
    end_cleanly()
    try:
        found = {network: measure(job, network) for network in job.networks}
    except (LabError, ArmFailed) as error:
        print(f"benchmarks.hybrid: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    if job.json:
        print(json.dumps({"machine": machine_facts(), "machines": job.machines, "step_s": found}))
        return 0
    console = Console(width=None if sys.stdout.isatty() else 110)
    for network, times in found.items():
        title = f"{RANKS} ranks on {job.machines} machines, {job.rate}"
        console.print(table_of(network, times, title))
    return 0


if __name__ == "__main__":
    sys.exit(main())
