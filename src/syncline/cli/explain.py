"""`syncline explain`: say what the time of a recorded run went into, and what would help."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from syncline.cli.output import debug_option
from syncline.config import printable
from syncline.perf.trace import Trace, find_trace
from syncline.run_curve import read_curve
from syncline.run_folder import finite

if TYPE_CHECKING:
    from syncline.perf.explain import Explanation


def explain(
    where: list[Path] = typer.Argument(
        ..., metavar="TRACE_OR_RUN...", help="Traces, or run folders that hold one."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print all numbers as one JSON object."),
    debug: bool = debug_option,
) -> None:
    """Say what the steps of a recorded run were spent on, and what would make them shorter.

    [bold]Examples[/bold]

      syncline simulate examples/digits.toml --ranks 8 --trace run.trace

      syncline explain run.trace

      syncline train examples/digits.toml --ranks 2 --out run --trace run/run.trace

      syncline explain run --json

    The parts of a step add up to the step. The critical path goes from the end of the
    run to its beginning, across ranks. Then the run is timed again with other costs:
    faster wires, no latency, faster compute, no slow ranks, free input. Of several runs,
    a simulated one is compared with the measured one of the same job.
    """
    from syncline.perf.beside import beside
    from syncline.perf.explain import in_words

    found = [_explained(path) for path in where]
    if as_json:
        runs = [numbers for _, numbers in found]
        said = runs[0] if len(runs) == 1 else beside(runs)
        print(json.dumps(finite(said), allow_nan=False))
        return
    for path, (explanation, _) in zip(where, found, strict=True):
        if len(where) > 1:
            print(f"{printable(path)}:")
        print(in_words(explanation))
        if len(where) > 1:
            print()
    for pair in beside([numbers for _, numbers in found])["predicted"]:
        print(_pair(where, pair))


def _explained(where: Path) -> tuple[Explanation, dict[str, Any]]:
    """Return what is known of a run, and its numbers."""
    from syncline.perf.explain import explain as explained
    from syncline.perf.numbers import to_json_dict

    path = find_trace(where)
    found = explained(Trace.read(path), printable(path))
    numbers = to_json_dict(found)
    if where.is_dir():
        numbers["run"] = read_curve(where)
    return found, numbers


def _pair(where: list[Path], pair: dict[str, Any]) -> str:
    """Say in a line how right a prediction was."""
    step = pair["step"]
    names = [printable(where[pair[key]]) for key in ("simulated", "measured")]
    return (
        f"{names[0]} predicts {names[1]}: median step {step['predicted_s'] * 1e3:.4g} ms, measured "
        f"{step['measured_s'] * 1e3:.4g} ms ({step['error']:+.1%}); weighted by time tasks are off "
        f"by {pair['error']:.0%}"
    )
