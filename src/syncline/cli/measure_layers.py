"""`syncline measure layers`: a job's layers, input and update on this machine, as a workload."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from syncline.cli.measured_ranks import measure_on_ranks
from syncline.cli.output import debug_option, say
from syncline.cli.run import check_ranks
from syncline.cli.train import check_names, try_functions
from syncline.cli.worker import load
from syncline.config import Job, read_job
from syncline.errors import ConfigError
from syncline.files import check_can_be_written, explained
from syncline.launch.env import thread_environment
from syncline.run_folder import finite

if TYPE_CHECKING:
    from syncline.measure.layers import Measured

SECONDS = 20.0


def layers(
    job_file: Path = typer.Argument(..., metavar="JOB.toml", help="What to measure."),
    out: Path | None = typer.Option(
        None, "--out", metavar="FILE", help="Write the workload, for simulate --workload FILE."
    ),
    samples: str | None = typer.Option(
        None,
        "--samples",
        metavar="1,2,4,...",
        help="Numbers of samples of a forward, besides a shard's.",
        show_default="powers of 2 below a shard's",
    ),
    seconds: float = typer.Option(
        SECONDS, "--seconds", min=0.0, help="How long to measure; longer if a step is slow."
    ),
    ranks: int = typer.Option(
        1, "--ranks", "-n", help="Processes that compute at the same time on this machine."
    ),
    sets: list[str] = typer.Option(
        [], "--set", metavar="KEY=VALUE", help="Override a setting; repeat for more."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print the result as one JSON object."),
    debug: bool = debug_option,
) -> None:
    """Measure how long each layer of a job's model takes on this machine.

    [bold]Examples[/bold]

      syncline measure layers examples/digits.toml --out cnn.json

      syncline simulate examples/digits.toml --ranks 8 --workload cnn.json

      syncline measure layers examples/digits.toml --samples 8,16,32 --ranks 2

    Forward and backward of every layer, reading a batch and the optimizer's update,
    with the job's own data, loss, optimizer and threads: medians of many steps.
    With [bold]--ranks[/bold] so many processes compute at the same time, and share cores and
    memory as ranks of a machine do.
    """
    job = read_job(job_file, sets)
    check_ranks("--ranks", ranks)
    job = job.resolved(job.run.ranks)
    check_names(job)
    wanted = None if samples is None else _numbers(samples)
    if out is not None:
        check_can_be_written("--out", out)
    try_functions(job)
    if ranks > 1:
        load(job.run.threads)  # once, for all of them
    else:
        os.environ |= thread_environment(job.run.threads)  # before torch reads it
    found = _measure(job, wanted, seconds, ranks, shows=not as_json)
    if out is not None:
        from syncline import workload

        with explained(out):
            workload.write(found.workload, out)
    if as_json:
        print(json.dumps(finite(to_json_dict(found)), allow_nan=False))
    else:
        print_measured(found, out, Console(highlight=False))


def _numbers(text: str) -> list[int]:
    """Return numbers of samples from a list such as 1,2,4."""
    found = [int(one) for one in text.split(",") if one.strip().isascii() and one.strip().isdigit()]
    if len(found) < len(text.split(",")) or min(found) < 1 or max(found) >= 2**31:
        rule = "this is a list of whole numbers, 1 or more"
        raise ConfigError("--samples", f"got {text!r}", rule, "Write for example --samples 1,2,4.")
    return found


def _measure(
    job: Job, samples: list[int] | None, seconds: float, ranks: int, *, shows: bool
) -> Measured:
    """Measure, with a progress bar on a terminal."""
    from syncline.measure.layers import measure_layers

    if ranks > 1:
        if shows and sys.stderr.isatty():
            say(f"{ranks} processes measure for {seconds:g} s ...")
        return measure_on_ranks(job, samples, seconds, ranks)
    is_shown = shows and sys.stderr.isatty()
    with Progress(console=Console(stderr=True), disable=not is_shown, transient=True) as bar:
        task = bar.add_task("measuring", total=seconds)
        return measure_layers(
            job,
            samples,
            seconds,
            on_round=lambda rounds, spent_s: bar.update(
                task, completed=spent_s, description=f"round {rounds}"
            ),
        )


def to_json_dict(found: Measured) -> dict[str, Any]:
    """Return what was measured as plain data."""
    from syncline.measure.efficiency import efficiencies

    return {
        "rounds": found.rounds,
        "efficiencies": [msgspec.to_builtins(one) for one in efficiencies(found.workload)],
        "totals": [msgspec.to_builtins(total) for total in found.totals],
        "left_out": list(found.left_out),
        "workload": msgspec.to_builtins(found.workload),
    }


def print_measured(found: Measured, out: Path | None, console: Console) -> None:
    """Print the layers, whole steps by number of samples, and what is beside them."""
    workload = found.workload
    facts = workload.machine
    where = f"{facts['processor']}, {facts['threads']} threads, {facts['ranks']} ranks at once"
    console.print(f"{workload.name}, {workload.samples} samples, {found.rounds} rounds: {where}")
    table = Table("layer", "kind", "parameters MB", "forward ms", "backward ms", "spread")
    for layer in workload.layers:
        times = (f"{layer.forward_s * 1e3:.4g}", f"{layer.backward_s * 1e3:.4g}")
        size = f"{layer.size_bytes / 1e6:.3g}"
        table.add_row(layer.name or "-", layer.kind, size, *times, f"{layer.spread or 0:.1%}")
    console.print(table)
    table = Table("samples", "forward ms", "backward ms", "spread", "read ms", "layers' sum")
    for one in found.totals:
        seconds = (one.forward_s, one.backward_s)
        table.add_row(
            str(one.samples),
            *(f"{each * 1e3:.4g}" for each in seconds),
            f"{one.spread:.1%}",
            f"{one.read_s * 1e3:.4g}",
            f"{one.difference:+.1%}",
        )
    console.print(table)
    for line in _efficiency_lines(found):
        console.print(line)
    update_s, spread = workload.update_s or 0.0, workload.update_spread or 0.0
    console.print(f"update: {update_s * 1e3:.4g} ms (spread {spread:.1%})")
    for line in found.left_out:
        console.print(f"left out, samples {line}")
    if out is not None:
        console.print(f"workload: {out}")


def _efficiency_lines(found: Measured) -> Iterator[str]:
    """Yield what each kind of layer reaches in forward, and how much less with few samples."""
    from syncline.measure.efficiency import efficiencies

    for one in efficiencies(found.workload):
        reached = one.by_samples[found.workload.samples or 1] / 1e9
        yield (
            f"{one.kind}: {reached:.3g} GFLOP/s in forward; half of {one.flops_per_s / 1e9:.3g} "
            f"at {one.half_samples:.2g} samples, within {one.residual:.0%}"
        )
