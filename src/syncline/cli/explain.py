"""`syncline explain`: say what the time of a recorded run went into, and what would help."""

from __future__ import annotations

import json
from pathlib import Path

import typer

from syncline.cli.output import debug_option
from syncline.config import printable
from syncline.errors import ConfigError
from syncline.files import check_can_be_written
from syncline.run_folder import finite


def explain(
    where: Path = typer.Argument(
        ..., metavar="TRACE_OR_RUN", help="A trace, or a run folder that holds one."
    ),
    perfetto: Path | None = typer.Option(
        None, "--perfetto", metavar="FILE", help="Also write a trace for ui.perfetto.dev."
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

      syncline explain run --perfetto run.pftrace

    The parts of a step add up to the step. The critical path goes from the end of the
    run to its beginning, across ranks. Then the run is timed again with other costs:
    faster wires, no latency, faster compute, no slow ranks, free input.
    --perfetto writes the trace and its critical path for https://ui.perfetto.dev.
    """
    from syncline.perf.explain import explain as explained
    from syncline.perf.explain import in_words, to_json_dict
    from syncline.perf.trace import Trace

    path = find_trace(where)
    if perfetto is not None:
        check_can_be_written("--perfetto", perfetto)
    trace = Trace.read(path)
    found = explained(trace, printable(path))
    if perfetto is not None:
        from syncline.report.perfetto import write_perfetto

        write_perfetto(trace, perfetto, found.path)
    if as_json:
        print(json.dumps(finite(to_json_dict(found)), allow_nan=False))
    else:
        print(in_words(found))
        if perfetto is not None:
            print(f"\nperfetto: {perfetto}")


def find_trace(where: Path) -> Path:
    """Return a trace, or the one that a folder holds."""
    if not where.is_dir():
        return where
    found = sorted(path for end in ("trace", "trace.gz") for path in where.glob(f"*.{end}"))
    if len(found) == 1:
        return found[0]
    rule = "one trace is explained at a time"
    if not found:
        fix = f"syncline train JOB --out DIR --trace {printable(where / 'run.trace')}"
        raise ConfigError(printable(where), "no trace is there", rule, f"Record one: {fix}.")
    names = ", ".join(path.name for path in found)
    holds = f"this folder holds {len(found)} traces ({names})"
    raise ConfigError(printable(where), holds, rule, "Give the path of one of them.")
