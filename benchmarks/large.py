"""How long simulations of many ranks take: `python -m benchmarks.large`.

Ten steps of resnet-50, sizes only, one rank on a machine, 25 Gbit/s, with fast links, each run in a
process of its own: seconds from its start to its end, processor time and the most memory it held,
beside our limits. Then runs small enough for exact links too, and how far the fast ones' steps
are from theirs. Exit status 1 if a limit is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from benchmarks.command import machine_facts

JOB = """
[model]
name = "resnet-50"
classes = 1000

[data]
name = "synthetic"
batch = 32

[optimizer]
lr = 0.1

[run]
steps = 10

[cluster]
preset = "25gbit"
flops_per_s = 5e12
"""
PER_RANK = 32
"""Samples."""
MOST_BYTES = 2e9
MOST_APART = 0.01
"""Of a step, between fast and exact links."""
JITTER = ("cluster.jitter=lognormal", "cluster.jitter_sigma=0.3")
SEEDS = 3
"""Of runs with jitter: what comes to a rank at the same time may come in another order, and a run
then goes another way. Steps are the mean over these runs."""


class Case(NamedTuple):
    strategy: str
    ranks: int
    limit_s: float
    sets: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return ", ".join([self.strategy, *(one.split(".")[-1] for one in self.sets[:1])])


PERIOD_1 = ("strategy.local.period=1",)
CASES = (
    Case("synchronous", 1024, 20),
    Case("synchronous", 1024, 60, JITTER),
    Case("gossip", 256, 20),
    Case("server", 256, 120),
    Case("elastic", 256, 120),
    Case("local", 256, 120, PERIOD_1),
    Case("local", 256, 120, ("strategy.local.period=5",)),
)
SMALL = (
    Case("synchronous", 128, 0),
    Case("synchronous", 128, 0, JITTER),
    Case("local", 64, 0, PERIOD_1),
    Case("gossip", 64, 0),
    Case("gossip", 64, 0, JITTER),
    *(Case(name, 12, 0, sets) for name in ("server", "elastic") for sets in ((), JITTER)),
)
"""What exact links simulate within about a minute."""


def run(case: Case, links: str, job: Path, seed: int = 0) -> dict[str, Any]:
    """Simulate in a process of its own; return what it printed, its times and its memory."""
    sets = (
        f"strategy.name={case.strategy}",
        f"data.batch={PER_RANK * case.ranks}",
        f"cluster.links={links}",
        f"run.seed={seed}",
        *case.sets,
    )
    command = [sys.executable, "-m", "syncline", "simulate", str(job), "--json"]
    command += ["--ranks", str(case.ranks), *(word for one in sets for word in ("--set", one))]
    started_s = time.perf_counter()
    with tempfile.TemporaryFile("w+") as out:
        child = subprocess.Popen(command, stdout=out)
        _, status, used = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode:
            raise SystemExit(f"benchmarks.large: {' '.join(command)} failed")
        out.seek(0)
        found = json.load(out)
    return {
        "case": case.name,
        "ranks": case.ranks,
        "links": links,
        "step_s": found["step_s"],
        "wall_s": time.perf_counter() - started_s,
        "cpu_s": used.ru_utime + used.ru_stime,
        "peak_bytes": used.ru_maxrss * 1024,
    }


def tables_of(large: Sequence[dict[str, Any]], small: Sequence[dict[str, Any]]) -> list[Table]:
    times = Table(title="10 steps of resnet-50, sizes only, fast links")
    for column in ("strategy", "ranks", "seconds", "limit", "processor", "memory, GB", "goal"):
        times.add_column(column, justify="left" if column == "strategy" else "right")
    for row in large:
        times.add_row(
            *(row["case"], str(row["ranks"]), f"{row['wall_s']:.1f}", f"{row['limit_s']:.0f}"),
            *(f"{row['cpu_s']:.1f}", f"{row['peak_bytes'] / 1e9:.2f}"),
            "met" if row["is_met"] else "MISSED",
        )
    steps = Table(title="fast against exact links")
    for column in ("strategy", "ranks", "step, ms: exact", "fast", "apart", "goal"):
        steps.add_column(column, justify="left" if column == "strategy" else "right")
    for row in small:
        steps.add_row(
            *(row["case"], str(row["ranks"]), f"{row['exact_s'] * 1e3:.3f}"),
            *(f"{row['fast_s'] * 1e3:.3f}", f"{row['apart']:+.3%}"),
            "met" if row["is_met"] else "MISSED",
        )
    return [times, steps]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.large", description=__doc__)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    large, small = [], []
    with tempfile.TemporaryDirectory() as name:
        job = Path(name) / "job.toml"
        job.write_text(JOB)
        for case in CASES:
            row = run(case, "fast", job) | {"limit_s": case.limit_s}
            row["is_met"] = row["wall_s"] <= case.limit_s and row["peak_bytes"] < MOST_BYTES
            print(f"{case.name}, {case.ranks} ranks: {row['wall_s']:.1f} s", file=sys.stderr)
            large.append(row)
        for case in SMALL:
            seeds = range(SEEDS if case.sets[:2] == JITTER else 1)
            rows = {
                links: [run(case, links, job, seed) for seed in seeds]
                for links in ("fast", "exact")
            }
            fast, exact = (
                rows[links][0] | {"step_s": statistics.fmean(row["step_s"] for row in rows[links])}
                for links in ("fast", "exact")
            )
            apart = fast["step_s"] / exact["step_s"] - 1
            print(f"{case.name}, {case.ranks} ranks: {apart:+.3%}", file=sys.stderr)
            small.append(
                {
                    **{"case": case.name, "ranks": case.ranks, "apart": apart},
                    **{"fast_s": fast["step_s"], "exact_s": exact["step_s"]},
                    **{"exact_wall_s": exact["wall_s"], "is_met": abs(apart) <= MOST_APART},
                }
            )
    if asked.json:
        found = {"machine": machine_facts(), "large": large, "against_exact": small}
        print(json.dumps(found, indent=2))
    else:
        console = Console(width=None if sys.stdout.isatty() else 110)
        for table in tables_of(large, small):
            console.print(table)
    return 0 if all(row["is_met"] for row in [*large, *small]) else 1


if __name__ == "__main__":
    sys.exit(main())
