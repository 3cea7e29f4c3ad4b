"""Layered SGD against others, with loading in line: `python -m benchmarks.layered` (as root).

Machines of the lab with two workers each, on links of 1 Gbit/s. A network that sleeps takes as long
to compute as the wire takes for its gradients: C = W. Each step first loads for I = 0, 0.5, 1 and 2
times W, in line. Arms run in turn, in shuffled order; times are step start to step start, the
median of each block of the slowest rank. The faster of `all_reduce` on Gloo and on our streams is
called conventional.

    conventional: I + C + W     layered as published: C + max(I, W)     bound: max(I + C, W)

W counts packet headers. Exit status 1 if a goal is missed: layered at least 1.4 x conventional
where C = I = W, never behind it, at most 1.10 x (C + max(I, W)), at most 1.15 x synchronous.
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

from lab.network import Lab, LabError, rate_bytes_per_s, why_not
from rich.console import Console
from rich.table import Table

from benchmarks.channels import ArmFailed
from benchmarks.command import end_cleanly, machine_facts
from benchmarks.versions import THIS
from benchmarks.wire import HEADER_SHARE
from benchmarks.wire_machines import Machines

MACHINES = 4
SIZE_BYTES, LAYERS = 25_000_000, 10
"""At 1 Gbit/s; at other rates in proportion, so that the wire takes as long."""
SHARES = (0.0, 0.5, 1.0, 2.0)
"""Loading, in times of W."""
CONVENTIONAL = ("all_reduce gloo", "all_reduce")
ARMS = (*CONVENTIONAL, "ddp 5", "syncline", "layered", "layered published")
GOALS = {
    "layered against conventional, C = I = W": ("at least", 1.4),
    "layered against conventional, worst": ("at least", 1.0),
    "layered over C + max(I, W), worst": ("at most", 1.10),
    "layered over synchronous, worst": ("at most", 1.15),
}


def wire_s(rate: str) -> float:
    """Return W: each machine sends its share of both halves, with packet headers."""
    size_bytes = SIZE_BYTES * rate_bytes_per_s(rate) / rate_bytes_per_s("1gbit")
    least = 2 * (MACHINES - 1) / MACHINES * size_bytes
    return least / rate_bytes_per_s(rate) * HEADER_SHARE


def measure(job: argparse.Namespace) -> dict[float, dict[str, list[float]]]:
    """Return the step times of all rounds, by loading and arm."""
    size = round(SIZE_BYTES * rate_bytes_per_s(job.rate) / rate_bytes_per_s("1gbit"))
    exchange_s = wire_s(job.rate)
    cases = [(share, arm) for share in SHARES for arm in ARMS]
    found: dict[float, dict[str, list[float]]] = {
        share: {arm: [] for arm in ARMS} for share in SHARES
    }
    order = random.Random(0)
    with tempfile.TemporaryDirectory() as folder, Lab(MACHINES, job.rate) as lab:
        spec = {"bytes": size // 40 * 40, "layers": LAYERS, "compute_s": exchange_s}
        machines = Machines(lab, THIS, ARMS, spec | {"folder": folder}, 0, job.workers)
        try:
            if machines.failures:
                raise ArmFailed(str(machines.failures))
            for number in range(job.rounds):
                for share, arm in order.sample(cases, len(cases)):
                    block = machines.run(arm, job.steps, share * exchange_s)
                    found[share][arm].append(max(rank["step_s"] for rank in block))
                print(f"round {number + 1} of {job.rounds}", file=sys.stderr)
        finally:
            machines.close()
    return found


def summarise(found: dict[float, dict[str, list[float]]], exchange_s: float) -> dict[str, Any]:
    """Put the medians beside the formulas, and hold them against the goals."""
    rows = []
    for share, arms in found.items():
        step_s = {arm: statistics.median(times_s) for arm, times_s in arms.items()}
        input_s = share * exchange_s
        rows.append(
            {
                "share": share,
                "step_s": step_s,
                "spread_s": {arm: (min(times_s), max(times_s)) for arm, times_s in arms.items()},
                "conventional_s": min(step_s[arm] for arm in CONVENTIONAL),
                "published_s": exchange_s + max(input_s, exchange_s),
                "bound_s": max(input_s + exchange_s, exchange_s),
            }
        )
    gains = {row["share"]: row["conventional_s"] / row["step_s"]["layered"] for row in rows}
    goals = {
        "layered against conventional, C = I = W": gains[1.0],
        "layered against conventional, worst": min(gains.values()),
        "layered over C + max(I, W), worst": max(
            row["step_s"]["layered"] / row["published_s"] for row in rows
        ),
        "layered over synchronous, worst": max(
            row["step_s"]["layered"] / row["step_s"]["syncline"] for row in rows
        ),
    }
    is_met = {
        name: reached >= GOALS[name][1]
        if GOALS[name][0] == "at least"
        else reached <= GOALS[name][1]
        for name, reached in goals.items()
    }
    return {"wire_s": exchange_s, "rows": rows, "goals": goals, "is_met": is_met}


def tables_of(result: dict[str, Any], title: str) -> list[Table]:
    steps = Table(title=title)
    steps.add_column("step, ms")
    for row in result["rows"]:
        steps.add_column(f"I = {row['share']:g} W", justify="right")
    for arm in ARMS:
        cells = []
        for row in result["rows"]:
            low, high = row["spread_s"][arm]
            cells.append(f"{row['step_s'][arm] * 1e3:.0f} ({low * 1e3:.0f} to {high * 1e3:.0f})")
        steps.add_row("synchronous" if arm == "syncline" else arm, *cells)
    for key, name in (("published_s", "formula, C + max(I, W)"), ("bound_s", "max(I + C, W)")):
        steps.add_row(name, *(f"{row[key] * 1e3:.0f}" for row in result["rows"]))
    goals = Table(title="goals")
    for column in ("goal", "wanted", "reached", ""):
        goals.add_column(column)
    for name, reached in result["goals"].items():
        wanted = " ".join(map(str, GOALS[name]))
        goals.add_row(name, wanted, f"{reached:.2f}", "met" if result["is_met"][name] else "MISSED")
    return [steps, goals]


def read_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.layered", description=__doc__)
    parser.add_argument("--rate", default="1gbit", help="with 100mbit a tenth of the bytes is sent")
    parser.add_argument("--workers", type=int, default=2, help="on each of the four machines")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--json", action="store_true")
    job = parser.parse_args(arguments)
    if job.rounds < 1 or job.steps < 4 or job.workers < 1:
        parser.error("--rounds and --workers are at least 1, --steps at least 4")
    return job


def main() -> int:
    """Measure and print; return 1 if a goal is missed."""
    job = read_arguments()
    if reason := why_not():
        print(f"benchmarks.layered: {reason}", file=sys.stderr)
        return 2
    end_cleanly()
    try:
        result = summarise(measure(job), wire_s(job.rate))
    except (LabError, ArmFailed) as error:
        print(f"benchmarks.layered: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    if job.json:
        print(json.dumps({"machine": machine_facts(), "rate": job.rate} | result, indent=2))
    else:
        console = Console(width=None if sys.stdout.isatty() else 130)
        title = f"{MACHINES} machines x {job.workers} workers, {job.rate}, C = W"
        for table in tables_of(result, f"{title} = {result['wire_s'] * 1e3:.0f} ms"):
            console.print(table)
    return 0 if all(result["is_met"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
