"""Layered SGD in its published setting: `python -m benchmarks.lsgd`.

Yu et al. 2019 (arXiv 1906.05936) trained resnet-50 on up to 64 machines with four GPUs each.
Conventional SGD all-reduces each gradient tensor over all workers, in line. Layered SGD reduces
inside machines, exchanges between leaders while workers load the next batch, and broadcasts. Both
are predicted with three forms of all-reduce by the closed formulas of `syncline.perf.formulas`: the
simulator has one of the three, and merges tensors into buckets.

Efficiency is samples a second and worker, against four workers of the same method. No measurement
is compared: the published efficiencies are unverified. `lsgd_constants.py` has all assumptions.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.lsgd_constants import (
    BATCH,
    CONSTANTS,
    FLOWS,
    PER_MACHINE,
    PUBLISHED,
    WORKERS,
)
from syncline.cluster import Link
from syncline.models import build
from syncline.perf.formulas import (
    LayeredParts,
    StepParts,
    halving_doubling_s,
    recursive_doubling_s,
    ring_s,
)

Values = Mapping[str, float]
VALUES: Values = {name: constant.value for name, constant in CONSTANTS.items()}
FORMS: dict[str, Callable[[float, int, Link], float]] = {
    "ring": ring_s,
    "recursive doubling": recursive_doubling_s,
    "halving-doubling": halving_doubling_s,
}
INPUTS_S = (0.0, 0.01, 0.05, 0.1, 0.15, 0.3)
"""Input times at which the gain is shown."""


@functools.cache
def tensor_bytes() -> tuple[int, ...]:
    """Return the bytes of each gradient of resnet-50; each is exchanged by itself."""
    with torch.device("meta"):
        model = build("resnet-50", (3, 224, 224), 1000)
    return tuple(4 * one.numel() for one in model.parameters())


def parts_of(form: str, workers: int, values: Values) -> LayeredParts:
    """Return the parts of a step, of conventional and of layered SGD."""
    inside = Link(
        latency_s=values["inside_latency_s"], rate_bytes_per_s=values["inside_rate_bytes_per_s"]
    )
    machines = workers // PER_MACHINE
    rate = values["rate_bytes_per_s"]
    shared = Link(latency_s=values["latency_s"], rate_bytes_per_s=rate / FLOWS[form])
    own = Link(latency_s=values["latency_s"], rate_bytes_per_s=rate)
    rounds = math.ceil(math.log2(PER_MACHINE + 1))  # a tree of the workers and their leader
    tree_s = sum(rounds * (inside.latency_s + inside.moving_s(one)) for one in tensor_bytes())
    compute_s = BATCH / values["samples_per_s"]
    step = StepParts(
        forward_s=compute_s / 3,
        backward_s=compute_s * 2 / 3,
        input_s=values["input_s"],
        update_s=sum(tensor_bytes()) / values["update_bytes_per_s"],
        exchange_s=_exchange_s(form, workers, shared if machines > 1 else inside),
    )
    leaders_s = _exchange_s(form, machines, own)
    return LayeredParts(step=step, reduce_s=tree_s, leaders_s=leaders_s, broadcast_s=tree_s)


def _exchange_s(form: str, ranks: int, link: Link) -> float:
    """Return the time of an all-reduce of every tensor, one after the other."""
    if ranks == 1:
        return 0.0
    return sum(FORMS[form](size, ranks, link) for size in tensor_bytes())


def curves_of(form: str, values: Values) -> dict[str, list[float]]:
    """Return the efficiency of both methods by number of workers."""
    parts = [parts_of(form, workers, values) for workers in WORKERS]
    steps = {
        "conventional": [one.step.in_line_s for one in parts],
        "layered": [one.layered_s for one in parts],
    }
    return {method: [times[0] / one for one in times] for method, times in steps.items()}


def gains_of(form: str, workers: int) -> list[dict[str, float]]:
    """Return by input time what layered SGD saves of a step, and what of that the input hides."""
    found = []
    for input_s in INPUTS_S:
        parts = parts_of(form, workers, {**VALUES, "input_s": input_s})
        hidden_s = min(parts.leaders_s, input_s)
        found.append({"input_s": input_s, "gain_s": parts.gain_s, "hidden_s": hidden_s})
    return found


def range_of(form: str) -> dict[str, tuple[float, float]]:
    """Return the efficiencies at most workers, with each constant at its ends, one at a time."""
    every = [
        curves_of(form, {**VALUES, name: value})
        for name, one in CONSTANTS.items()
        for value in (one.low, one.high)
    ]
    ends = {method: [one[method][-1] for one in every] for method in ("conventional", "layered")}
    return {method: (min(found), max(found)) for method, found in ends.items()}


def run_all() -> dict[str, Any]:
    return {
        "workers": WORKERS,
        "curves": {form: curves_of(form, VALUES) for form in FORMS},
        "ranges": {form: range_of(form) for form in FORMS},
        "gains": {form: gains_of(form, WORKERS[-1]) for form in FORMS},
        "published": {f"{method} {many}": one for (method, many), one in PUBLISHED.items()},
    }


def tables_of(result: Mapping[str, Any]) -> list[Table]:
    curves = Table(title="efficiency against four workers of the same method, %")
    for column in ("all-reduce", "", *map(str, result["workers"]), "range at 256"):
        curves.add_column(column, justify="right")
    for form, methods in result["curves"].items():
        for method, found in methods.items():
            low, high = result["ranges"][form][method]
            cells = (f"{100 * one:.1f}" for one in found)
            curves.add_row(form, method, *cells, f"{100 * low:.0f} to {100 * high:.0f}")
    gains = Table(title="what layered saves of a step at 256 workers, ms (hidden behind input)")
    for column in ("all-reduce", *(f"input {1e3 * one:g} ms" for one in INPUTS_S)):
        gains.add_column(column, justify="right")
    for form, found in result["gains"].items():
        cells = (f"{1e3 * one['gain_s']:.0f} ({1e3 * one['hidden_s']:.0f})" for one in found)
        gains.add_row(form, *cells)
    return [curves, gains]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.lsgd",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true")
    job = parser.parse_args(arguments)
    result = run_all()
    if job.json:
        print(json.dumps(result, indent=2))
        return 0
    console = Console(width=None if sys.stdout.isatty() else 130)
    for table in tables_of(result):
        console.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
