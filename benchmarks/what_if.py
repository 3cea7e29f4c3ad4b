"""What faster wires would bring, and what they brought: `python -m benchmarks.what_if` (as root).

Four machines of the lab train with links of 1 Gbit/s; their traces are timed again with wires twice
as fast. Then the links are set to 2 Gbit/s and the same jobs run for real. Arms take turns. Exit
status 1 if an answer is further than 10 % from the run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from lab.network import Lab, LabError, why_not
from rich.console import Console
from rich.table import Table

from benchmarks.channels import ArmFailed
from benchmarks.clock_machines import Machines
from benchmarks.command import end_cleanly, machine_facts
from benchmarks.prediction_cases import Case, network
from syncline.perf.breakdown import break_down
from syncline.perf.graph import compile_trace, retime
from syncline.perf.trace import Trace
from syncline.perf.what_if import what_if, wires

MACHINES, STEPS = 4, 12
RATES = ("1gbit", "2gbit")
STRATEGIES = ("synchronous", "all_reduce", "wait_free")
MOST_OFF = 0.10


def measure(rounds: int, folder: Path) -> dict[str, dict[str, list[float]]]:
    """Return steps by strategy: recorded, answered, and run for real."""
    job = folder / "job.toml"
    job.write_text(network("even", RATES[0]).job)
    found: dict[str, dict[str, list[float]]] = {
        name: {"before_s": [], "answered_s": [], "measured_s": []} for name in STRATEGIES
    }
    with (
        Lab(MACHINES, RATES[0]) as lab,
        contextlib.closing(Machines(MACHINES, folder / "log", lab)) as machines,
    ):
        for turn in range(rounds):
            for rate in RATES:
                for machine in range(MACHINES):
                    lab.set_rate(machine, rate)
                for name in STRATEGIES:
                    sets = Case(RATES[0], "even", MACHINES, name).sets(STEPS)
                    trace = folder / f"{name}-{rate}-{turn}.trace"
                    out = folder / f"{name}-{rate}-{turn}"
                    machines.train(job, MACHINES, sets, out, trace)
                    graph = compile_trace(Trace.read(trace))
                    step_s = break_down(retime(graph)).step_s
                    if rate == RATES[0]:
                        found[name]["before_s"].append(step_s)
                        answered = break_down(what_if(graph, wires(2))).step_s
                        found[name]["answered_s"].append(answered)
                    else:
                        found[name]["measured_s"].append(step_s)
                    print(f"{turn + 1} {name}, {rate}: {step_s * 1e3:.1f} ms", file=sys.stderr)
    return found


def row_of(name: str, times: dict[str, list[float]]) -> dict[str, Any]:
    middle = {key: statistics.median(values) for key, values in times.items()}
    return {"strategy": name, **middle, "error": middle["answered_s"] / middle["measured_s"] - 1}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.what_if", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    job = parser.parse_args()
    if reason := why_not():
        print(f"benchmarks.what_if: {reason}", file=sys.stderr)
        return 2
    end_cleanly()
    with tempfile.TemporaryDirectory() as name:
        try:
            found = measure(job.rounds, Path(name))
        except (LabError, ArmFailed) as error:
            print(f"benchmarks.what_if: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            return 130
    rows = [row_of(name, times) for name, times in found.items()]
    if job.json:
        print(json.dumps({"machine": machine_facts(), "rows": rows}, indent=1))
    else:
        table = Table("strategy", "1 Gbit/s, ms", "answered, ms", "2 Gbit/s, ms", "error")
        for row in rows:
            times = (f"{row[key] * 1e3:.1f}" for key in ("before_s", "answered_s", "measured_s"))
            table.add_row(row["strategy"], *times, f"{row['error']:+.1%}")
        Console(highlight=False).print(table)
    return int(any(abs(row["error"]) > MOST_OFF for row in rows))


if __name__ == "__main__":
    sys.exit(main())
