"""`syncline report`: one file with pictures of where the time went, and how well it learned."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from syncline.cli.output import debug_option
from syncline.config import printable
from syncline.errors import ConfigError
from syncline.files import check_can_be_written

if TYPE_CHECKING:
    from syncline.report.page.run import Run

report_option: Path | None = typer.Option(
    None, "--report", metavar="FILE", help="Write a report at the end: one HTML file."
)
"""The option of commands that run something."""


def report(
    what: list[Path] = typer.Argument(
        ..., metavar="RUN_OR_TRACE_OR_COMPARE...", help="Traces, run folders, compare folders."
    ),
    out: Path = typer.Option(Path("report.html"), "--out", metavar="FILE", help="The file."),
    perfetto: Path | None = typer.Option(
        None, "--perfetto", metavar="FILE", help="Also write one run's trace for ui.perfetto.dev."
    ),
    debug: bool = debug_option,
) -> None:
    """Write a report: one HTML file that opens in a browser without a network.

    [bold]Examples[/bold]

      syncline train examples/digits.toml --ranks 2 --out run --trace run/run.trace

      syncline report run

      syncline simulate examples/digits.toml --ranks 2 --trace predicted.trace

      syncline report run predicted.trace --out both.html

      syncline report run --perfetto run.pftrace

    Where the time of a step went, what would help, with sliders; every rank's step; the
    timeline with its critical path; which exchange shows. A measured run and a simulated
    one of the same job are laid beside each other; runs on different numbers of ranks
    show how the job scales; run folders and compare folders show how well it learned.
    """
    check_can_be_written("--out", out)
    if perfetto is not None:
        check_can_be_written("--perfetto", perfetto)
        if len(what) > 1:
            rule = "a Perfetto trace is of one run"
            fix = "Give one trace, or one run folder that holds a trace."
            raise ConfigError("--perfetto", f"got it with {len(what)} runs", rule, fix)
    for path in what:
        if not path.exists():
            rule = "a report is about traces, run folders and compare folders"
            fix = "Give the path of one that is there."
            raise ConfigError(printable(path), "nothing is there", rule, fix)
    from syncline.report.page.run import read
    from syncline.report.page.write import write_page

    runs, comparisons = read(what)
    traced = [run for run in runs if run.is_traced]
    if perfetto is not None and not traced:
        rule, fix = (
            "tasks come from a trace",
            "Record one: syncline train JOB --out DIR --trace FILE.",
        )
        raise ConfigError("--perfetto", f"{printable(what[0])} holds no trace", rule, fix)
    write_page(runs, out, comparisons)
    print(f"report: {out}")
    if perfetto is not None:
        _write_perfetto(traced[0], perfetto)
        print(f"perfetto: {perfetto}")


def _write_perfetto(run: Run, path: Path) -> None:
    """Write the trace of a run that was read, and the critical path that is known already."""
    from syncline.perf.trace import Trace
    from syncline.report.perfetto import write_perfetto

    assert run.explanation is not None
    write_perfetto(Trace(tuple(run.graph.tasks), run.header), path, run.explanation.path)
