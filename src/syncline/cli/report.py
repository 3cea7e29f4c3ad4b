"""`syncline report`: one file with pictures of where the time went, and how well it learned."""

from __future__ import annotations

from pathlib import Path

import typer

from syncline.cli.output import debug_option
from syncline.config import printable
from syncline.errors import ConfigError
from syncline.files import check_can_be_written

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
    from syncline.report.page.write import write_report

    write_report(what, out)
    print(f"report: {out}")
    if perfetto is not None:
        from syncline.perf.trace import Trace, find_trace
        from syncline.report.perfetto import write_perfetto

        write_perfetto(Trace.read(find_trace(what[0])), perfetto)
        print(f"perfetto: {perfetto}")
