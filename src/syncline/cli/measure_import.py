"""`syncline measure import`: a workload file from what somebody else has measured."""

from __future__ import annotations

from pathlib import Path

import typer

from syncline.cli.output import debug_option
from syncline.config.words import shown
from syncline.errors import ConfigError
from syncline.files import check_can_be_written, explained


def import_file(
    file: Path = typer.Argument(..., metavar="FILE", help="A table, log, profile or trace."),
    out: Path = typer.Option(..., "--out", metavar="FILE", help="The workload file to write."),
    unit: str | None = typer.Option(
        None, "--unit", help="Of times in a layer table: us, ms or s.", show_default="us"
    ),
    format: str | None = typer.Option(
        None, "--format", metavar="NAME", help="How the file is written; default: by its content."
    ),
    samples: int | None = typer.Option(
        None, "--samples", help="Samples of one forward; simulate --workload needs it."
    ),
    debug: bool = debug_option,
) -> None:
    """Write a workload from a file of layer times.

    Formats: layer-table (Id Name Forward Backward Comm Size), bcaffe (B-Caffe's
    logs), pipedream (its profile graphs), torch-profiler (export_chrome_trace).

      syncline measure import alexnet.txt --samples 1024 --out alexnet.json

      syncline simulate job.toml --workload alexnet.json
    """
    from syncline import workload
    from syncline.measure.imports import import_workload

    if samples is not None and not 1 <= samples <= 2**31:
        rule, fix = "one forward has 1 sample or more", "Give the batch that was measured."
        raise ConfigError("--samples", f"got {samples}", rule, fix)
    check_can_be_written("--out", out)
    if out.exists() and out.samefile(file):
        rule, fix = "the imported file is kept", "Name another file."
        raise ConfigError("--out", f"got {shown(str(out))} twice", rule, fix)
    name, found = import_workload(file, format=format, unit=unit, samples=samples)
    with explained(out):
        workload.write(found.workload, out)
    made = found.workload
    print(
        f"{out}: {name}, {len(made.layers)} layers, {made.size_bytes / 1e6:.4g} MB of parameters, "
        f"forward {made.forward_s * 1e3:.4g} ms, backward {made.backward_s * 1e3:.4g} ms, "
        f"input {made.input_s * 1e3:.4g} ms"
    )
    for note in found.notes:
        print(f"  {note}")
    if samples is None:
        print("  simulate --workload needs to know the samples of one forward: --samples N")
