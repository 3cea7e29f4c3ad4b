"""Time steps over shaped links, in the lab: Syncline against DDP, ZeRO and FSDP2.

A network that sleeps instead of computing, on machines that are network namespaces. For each case
all arms live in one process per machine and run in turn, in shuffled order. Times are step start
to step start, the median of each block; the table gives the median block and the spread.

`bound` is max(compute, wire), `ideal` what two lanes could reach on a perfect wire: reduces as
buckets become ready, then gathers in forward order. Both count packet headers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.network import Lab, LabError, rate_bytes_per_s, why_not
from rich.console import Console
from rich.table import Table

from benchmarks.ranks import TOP_FOLDER
from benchmarks.step import machine_facts

HEADER_SHARE = 1514 / 1448  # Ethernet frame over TCP payload, at an MTU of 1500
ARMS = ("ddp 2.5", "ddp 5", "ddp 25", "ddp_zero 5", "fsdp2", "syncline", "no_exchange")
CASE_TIMEOUT_S = 900.0


@dataclass(frozen=True)
class Case:
    """Machines, their links, and how long the wire takes against compute."""

    machines: int
    rate: str
    wire_share: float
    size_bytes: int
    layers: int = 10

    @property
    def wire_s(self) -> float:
        """Time to send one's share of both halves, without headers."""
        return self.least_bytes / rate_bytes_per_s(self.rate)

    @property
    def compute_s(self) -> float:
        return self.wire_s / self.wire_share

    @property
    def least_bytes(self) -> float:
        return 2 * (self.machines - 1) / self.machines * self.size_bytes

    @property
    def name(self) -> str:
        return f"{self.machines} machines, {self.rate}, wire = {self.wire_share:g} x compute"


def ideal_step_s(compute_s: float, wire_s: float, layers: int, steps: int = 20) -> float:
    """Return the step time of two lanes on a perfect wire: forward 1/3, backward 2/3 of compute.

    >>> round(ideal_step_s(0.3, 0.3 * 1514 / 1448, 10), 3)
    0.382
    """
    forward_s, backward_s = compute_s / 3 / layers, compute_s * 2 / 3 / layers
    message_s = wire_s / 2 / layers
    gathered = [0.0] * layers
    now = started = wire = period = 0.0
    for _ in range(steps):
        started, before = now, started
        period = started - before
        for layer in range(layers):
            now = max(now, gathered[layer]) + forward_s
        for _ in range(layers):
            now += backward_s
            wire = max(wire, now) + message_s
        for layer in range(layers):
            wire += message_s
            gathered[layer] = wire
    return period


def run_case(case: Case, arms: Sequence[str], rounds: int, steps: int) -> dict[str, Any]:
    """Run all arms on one lab and return what rank 0 wrote."""
    with tempfile.TemporaryDirectory() as folder, Lab(case.machines, case.rate) as lab:
        out = Path(folder) / "result.json"
        spec = {
            "bytes": case.size_bytes,
            "layers": case.layers,
            "compute_s": case.compute_s,
            "arms": list(arms),
            "rounds": rounds,
            "steps": steps,
            "out": str(out),
        }
        log = Path(folder) / "log"
        with log.open("wb") as file:
            jobs = lab.torchrun(
                ["-m", "benchmarks.wire_worker", json.dumps(spec)],
                cwd=TOP_FOLDER,
                stdout=file,
                stderr=subprocess.STDOUT,
                environment={"SYNCLINE_KEY": "00" * 16},
            )
            for job in jobs:
                job.wait(timeout=CASE_TIMEOUT_S)
        if not out.exists():
            raise LabError(
                f"{case.name}: no result. The end of the log:\n{log.read_text()[-3000:]}"
            )
        answer: dict[str, Any] = json.loads(out.read_text())
        answer["congestion_control"] = lab.congestion_control(0)
    return answer


def summarise(case: Case, answer: dict[str, Any]) -> dict[str, Any]:
    """Put a case's figures together: the slowest machine's time, the median machine's bytes."""
    machines = answer["arms"]
    rows = {}
    for arm in machines[0]:
        blocks = [max(times) for times in zip(*(m[arm]["step_s"] for m in machines), strict=True)]
        rows[arm] = {
            "step_s": statistics.median(blocks),
            "least_s": min(blocks),
            "most_s": max(blocks),
            "sent_bytes": statistics.median(m[arm]["sent_bytes"] for m in machines),
            "cpu_s": statistics.median(m[arm]["cpu_s"] for m in machines),
        }
    compute_s = rows["no_exchange"]["step_s"] if "no_exchange" in rows else case.compute_s
    wire_s = case.wire_s * HEADER_SHARE
    return {
        "case": case.name,
        "machines": case.machines,
        "rate": case.rate,
        "wire_share": case.wire_share,
        "bytes": case.size_bytes,
        "compute_s": compute_s,
        "wire_s": wire_s,
        "bound_s": max(compute_s, wire_s),
        "ideal_s": ideal_step_s(compute_s, wire_s, case.layers),
        "least_bytes": case.least_bytes,
        "congestion_control": answer["congestion_control"],
        "failures": answer["failures"],
        "arms": rows,
    }


def table_of(found: dict[str, Any]) -> Table:
    ideal_ms, bound_ms = found["ideal_s"] * 1e3, found["bound_s"] * 1e3
    title = f"{found['case']}: ideal {ideal_ms:.0f} ms, bound {bound_ms:.0f} ms"
    table = Table(title=title)
    for column in ("arm", "step, ms", "of ideal", "against best DDP", "bytes of least", "CPU, ms"):
        table.add_column(column, justify="left" if column == "arm" else "right")
    ddp_s = min(
        (row["step_s"] for arm, row in found["arms"].items() if arm.startswith("ddp ")),
        default=None,
    )
    for arm, row in found["arms"].items():
        table.add_row(
            arm,
            f"{row['step_s'] * 1e3:.0f} ({row['least_s'] * 1e3:.0f} to {row['most_s'] * 1e3:.0f})",
            f"{row['step_s'] / found['ideal_s']:.3f}",
            f"{ddp_s / row['step_s']:.2f}" if ddp_s else "",
            f"{row['sent_bytes'] / found['least_bytes']:.3f}",
            f"{row['cpu_s'] * 1e3:.0f}",
        )
    for arm, reason in found["failures"].items():
        table.add_row(arm, reason)
    return table


def read_job() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.wire", description=__doc__)
    parser.add_argument("--machines", default="2,4,8")
    parser.add_argument("--rates", default="100mbit,1gbit,5gbit")
    parser.add_argument("--wire", default="0.5,1,2", help="wire time over compute time")
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--megabytes", type=float, default=25.0, help="at 1 Gbit/s; in proportion")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def main() -> int:
    job = read_job()
    if reason := why_not():
        print(f"benchmarks.wire: {reason}", file=sys.stderr)
        return 2
    arms = job.arms.split(",")
    results = []
    console = Console(width=None if sys.stdout.isatty() else 130)
    for machines in map(int, job.machines.split(",")):
        for rate in job.rates.split(","):
            # The same seconds on every wire.
            size = int(job.megabytes * 1e6 * rate_bytes_per_s(rate) / rate_bytes_per_s("1gbit"))
            for share in map(float, job.wire.split(",")):
                case = Case(machines, rate, share, size // 40 * 40)
                print(f"{case.name} ...", file=sys.stderr)
                found = summarise(case, run_case(case, arms, job.rounds, job.steps))
                results.append(found)
                if not job.json:
                    console.print(table_of(found))
    if job.json:
        print(json.dumps({"machine": machine_facts(), "cases": results}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
