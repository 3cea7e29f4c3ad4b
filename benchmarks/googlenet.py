"""GoogLeNet on K80 and 10 GbE, predicted against published speed: `python -m benchmarks.googlenet`.

B-Caffe's authors measured images/s of a GPU on 2, 4 and 8 nodes with two GPUs each: an exchange for
each layer (wait-free backpropagation), merged exchanges, and one all-reduce after backward. All
nine are predicted by one rule, with constants that were written down before
(`googlenet_constants.py`):

- a node is a rank; alone its step takes 32 images / 81.68 images/s. Backward of its layers is in
  the log; all else of the step, forward, input, update, the node's inner sum, hides nothing;
- an exchange of S bytes takes a + b S, from the network's own table for that number of nodes, plus
  copies between device and host, scaling, and a call;
- strategies `wait_free`, `merged` and `all_reduce` run on the virtual clock.

Beside it: "free communication", the speed of one node; and what the logged exchanges of the same
runs say, where there are any. Exit status 1 if a goal is missed, 2 without the logs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import googlenet_constants as constants
from benchmarks.googlenet_model import (
    NODES,
    PUBLISHED,
    VALUES,
    computed_s,
    exchange_of,
    fit,
    interval_of,
    logged_s,
    read_table,
    sensitivity_of,
    simulated_s,
    step_alone_s,
    workload_of,
)
from syncline.measure.imports.bcaffe import read_logged_layers
from syncline.measure.imports.source import read_source

TRACES = Path(__file__).parents[2] / "shared" / "traces" / "bcaffe_googlenet"
LOGS = {
    ("wait_free", 2): "tmp2comm.log",
    ("wait_free", 4): "tmp4comm.log",
    ("wait_free", 8): "tmp8comm.log",
    ("merged", 4): "tmp4ocomm.log",
    ("merged", 8): "tmp8ocomm.log",
}
"""Logs with the times of exchanges. The last column of tmp8comm.log is not of merged exchanges."""


def predict(traces: Path) -> dict[str, Any]:
    """Return all cells: published, predicted, from the logs, and with free communication."""
    alone_s = step_alone_s(VALUES)
    workload = workload_of(traces / constants.LAYERS_FROM, alone_s)
    networks = {nodes: fit(read_table(traces / f"allreduce{nodes}.log")) for nodes in NODES}
    cells = []
    for method, speeds in PUBLISHED.items():
        for nodes, published in zip(NODES, speeds, strict=True):
            exchange = exchange_of(networks[nodes], VALUES)
            step_s = simulated_s(workload, method, nodes, exchange)
            speed = constants.SAMPLES_PER_GPU / step_s
            cell = {
                "method": method,
                "nodes": nodes,
                "published": published,
                "predicted": speed,
                "interval": interval_of(workload, method, networks[nodes], speed),
                "formula": constants.SAMPLES_PER_GPU
                / computed_s(workload, method, exchange, alone_s),
                "free": VALUES["ALONE_SAMPLES_PER_S"],
            }
            if (method, nodes) in LOGS:
                layers = read_logged_layers(read_source(traces / LOGS[method, nodes]))
                cell["logged"] = constants.SAMPLES_PER_GPU / logged_s(layers, method, alone_s)
            for key in ("predicted", "free", "logged"):
                if key in cell:
                    cell[f"{key}_error"] = cell[key] / published - 1
            cells.append(cell)
    lines = {nodes: dataclasses.asdict(line) for nodes, line in networks.items()}
    sensitivity = sensitivity_of(workload, networks)
    return {"cells": cells, "networks": lines, "sensitivity": sensitivity} | _goals(cells)


def _goals(cells: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Hold the cells against the goals, which were fixed beforehand."""
    errors = [abs(cell["predicted_error"]) for cell in cells]
    free = [abs(cell["free_error"]) for cell in cells]
    one = [abs(cell["predicted_error"]) for cell in cells if cell["method"] == "all_reduce"]
    (logged,) = (
        abs(cell["logged_error"])
        for cell in cells
        if (cell["method"], cell["nodes"]) == ("wait_free", 8)
    )
    mean, mean_free = sum(errors) / len(errors), sum(free) / len(free)
    reached = {
        "largest error": (max(errors), 0.12),
        "mean error": (mean, 0.07),
        "largest error, one all-reduce": (max(one), 0.08),
        "wait_free on 8 nodes, from its log": (logged, 0.10),
        "mean error over that of free communication": (mean / mean_free, 1 / 3),
    }
    held = sum(
        low <= cell["published"] <= high for cell in cells for low, high in [cell["interval"]]
    )
    return {
        "mean_error": mean,
        "mean_free_error": mean_free,
        "in_interval": held,
        "goals": {
            name: {"reached": found, "at_most": most, "is_met": found <= most}
            for name, (found, most) in reached.items()
        },
    }


def tables_of(result: Mapping[str, Any]) -> list[Table]:
    cells = Table(title="GoogLeNet, K80, 10 GbE: images/s of a GPU")
    for column in ("nodes", "published", "predicted", "range", "", "from its log", "", "free", ""):
        cells.add_column(column, justify="right")
    for cell in result["cells"]:
        low, high = cell["interval"]
        logged = "logged" in cell
        cells.add_row(
            f"{cell['method']} {cell['nodes']}",
            f"{cell['published']:.2f}",
            f"{cell['predicted']:.2f}",
            f"{low:.1f} to {high:.1f}",
            f"{cell['predicted_error']:+.1%}",
            f"{cell['logged']:.2f}" if logged else "no log",
            f"{cell['logged_error']:+.1%}" if logged else "",
            f"{cell['free']:.2f}",
            f"{cell['free_error']:+.1%}",
        )
    changes = Table(title="with one thing changed, by the formulas")
    for column in ("change", "mean error", "largest"):
        changes.add_column(column)
    for name, change in result["sensitivity"].items():
        changes.add_row(name, f"{change['mean']:.1%}", f"{change['largest']:.1%}")
    goals = Table(title="goals")
    for column in ("goal", "at most", "reached", ""):
        goals.add_column(column)
    for name, goal in result["goals"].items():
        met = "met" if goal["is_met"] else "MISSED"
        goals.add_row(name, f"{goal['at_most']:.3f}", f"{goal['reached']:.3f}", met)
    return [cells, changes, goals]


def read_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.googlenet",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--traces", type=Path, default=TRACES, metavar="DIR", help="B-Caffe's folder logdata"
    )
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(arguments)


def missing_from(traces: Path) -> str | None:
    """Return the name of a log that is not there."""
    tables = (f"allreduce{nodes}.log" for nodes in NODES)
    wanted = (constants.LAYERS_FROM, *LOGS.values(), *tables)
    return next((name for name in wanted if not (traces / name).is_file()), None)


def main(arguments: Sequence[str] | None = None) -> int:
    """Predict and print; return the exit status."""
    job = read_arguments(arguments)
    if name := missing_from(job.traces):
        print(
            f"benchmarks.googlenet: there is no {job.traces / name}. Clone"
            " github.com/shyhuai/B-Caffe at 1e8a70d and give --traces B-Caffe/logdata.",
            file=sys.stderr,
        )
        return 2
    result = predict(job.traces)
    if job.json:
        print(json.dumps(result, indent=2))
    else:
        console = Console(width=None if sys.stdout.isatty() else 130)
        for table in tables_of(result):
            console.print(table)
        console.print(
            f"mean error {result['mean_error']:.1%}, of free communication"
            f" {result['mean_free_error']:.1%}; {result['in_interval']} of 9 published speeds lie"
            " in the range"
        )
    return 0 if all(goal["is_met"] for goal in result["goals"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
