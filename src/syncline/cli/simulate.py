"""`syncline simulate`: predict a job's run on a cluster, with the strategy's own code."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from syncline.cli.output import debug_option
from syncline.cli.run import check_ranks
from syncline.cli.train import check_names
from syncline.cluster import PRESETS, Cluster, cluster_of, conditions_of
from syncline.cluster_file import find_cluster
from syncline.config import Job, read_job
from syncline.files import check_can_be_written, explained
from syncline.report.clusters import print_clusters
from syncline.run_folder import finite

if TYPE_CHECKING:
    from syncline.sim.run import Outcome
    from syncline.workload import Workload


def _list_clusters(wanted: bool) -> None:
    if wanted:
        print_clusters(Console(highlight=False))
        raise typer.Exit


def simulate(
    job_file: Path = typer.Argument(..., metavar="JOB.toml", help="What to train, on what, how."),
    ranks: int | None = typer.Option(
        None, "--ranks", "-n", help="How many ranks; wins over the file."
    ),
    machines: int | None = typer.Option(
        None,
        "--machines",
        help="On how many machines.",
        show_default="one a rank, or the cluster's",
    ),
    cluster_name: str | None = typer.Option(
        None, "--cluster", metavar="NAME_OR_FILE", help="A preset or a cluster file; see below."
    ),
    sets: list[str] = typer.Option(
        [], "--set", metavar="KEY=VALUE", help="Override a setting; repeat for more."
    ),
    steps: int = typer.Option(10, "--steps", min=2, help="Steps to time, where nothing is learnt."),
    learn: bool = typer.Option(False, "--learn", help="Compute as well, for the job's steps."),
    trace: Path | None = typer.Option(None, "--trace", help="Write every task to this file."),
    workload: Path | None = typer.Option(
        None, "--workload", metavar="FILE", help="Take the layers' times and sizes from this file."
    ),
    write_workload: Path | None = typer.Option(
        None, "--write-workload", metavar="FILE", help="Write the layers' times and sizes."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print the result as one JSON object."),
    list_clusters: bool = typer.Option(
        False, "--list-clusters", callback=_list_clusters, is_eager=True, help="Show the presets."
    ),
    debug: bool = debug_option,
) -> None:
    """Say how fast a job would be on a cluster, and how well it would learn.

    [bold]Examples[/bold]

      syncline simulate examples/digits.toml --ranks 64 --set strategy.shards=64

      syncline simulate examples/digits.toml --ranks 8 --machines 2 --cluster 10gbit

      syncline simulate examples/digits.toml --ranks 8 --learn --json

    The strategy's own code runs on a virtual clock, all ranks in this one process.
    Layers take the time of their floating-point operations at cluster.flops_per_s;
    or on a cluster.device such as v100; or what --workload FILE says, which
    measure layers or --write-workload FILE wrote. No data is loaded.
    Messages share the links of a cluster: --cluster names a preset (--list-clusters),
    a file of your own (docs/clusters.md), or this-machine, once syncline measure links
    has run. It wins over the preset in \\[cluster]; that table's other settings win over
    it. Jitter, slow ranks and faults are settings of that table, too.

    [bold]--learn[/bold] does the arithmetic on the job's data: loss, accuracy and weights
    are those of a real run on as many ranks, bit for bit where it is synchronous.
    """
    job = read_job(job_file, sets)
    if ranks is not None:
        check_ranks("--ranks", ranks)
    job.check()
    facts = None if cluster_name is None else find_cluster(cluster_name)
    if cluster_name in PRESETS:
        settings = msgspec.structs.replace(job.cluster, preset=cluster_name)
        job = msgspec.structs.replace(job, cluster=settings)
    cluster = cluster_of(job.cluster, job.run.ranks if ranks is None else ranks, machines, facts)
    by_machine = cluster.by_machine
    job = job.resolved(cluster.ranks, by_machine)
    check_names(job, needs_data=learn)
    conditions = conditions_of(job.cluster, job.run.seed, job.faults)
    workers = job.strategy.own.workers(by_machine)
    conditions.check(cluster.ranks, cluster.machines, workers=workers)
    if trace is not None:
        check_can_be_written("--trace", trace)
    if write_workload is not None:
        check_can_be_written("--write-workload", write_workload)
    found = None
    if workload is not None or write_workload is not None:
        found = _find_workload(job, cluster, workload, write_workload)
    wanted = None if learn else steps
    outcome = _run(job, cluster, found, wanted, show=not as_json, traces=trace is not None)
    if trace is not None and outcome.trace is not None:
        with explained(trace):
            outcome.trace.write(trace)
    if as_json:
        print(json.dumps(finite(to_json_dict(job, outcome)), allow_nan=False))
    else:
        print_outcome(job, outcome, trace, Console(highlight=False))


def _find_workload(job: Job, cluster: Cluster, path: Path | None, written: Path | None) -> Workload:
    """Read the workload, or count it; write it, if `written` is a path."""
    from syncline import workload
    from syncline.sim.job import find_workload

    found = find_workload(job, cluster, path)
    if written is not None:
        with explained(written):
            workload.write(found, written)
    return found


def _run(
    job: Job,
    cluster: Cluster,
    workload: Workload | None,
    steps: int | None,
    *,
    show: bool,
    traces: bool,
) -> Outcome:
    """Simulate, with a progress bar on a terminal; `steps` None learns for all the job's steps."""
    from syncline.sim.job import simulate_job

    is_shown = show and sys.stderr.isatty()
    with Progress(console=Console(stderr=True), disable=not is_shown, transient=True) as bar:
        task = bar.add_task(f"{job.run.ranks} ranks", total=steps or job.run.steps)
        return simulate_job(
            job,
            cluster,
            learns=steps is None,
            steps=steps or 0,
            workload=workload,
            traces=traces,
            on_step=lambda step: bar.update(task, completed=step),
        )


def to_json_dict(job: Job, outcome: Outcome) -> dict[str, Any]:
    """Return the figures as plain data."""
    found: dict[str, Any] = {
        "strategy": job.strategy.name,
        "ranks": outcome.ranks,
        "machines": outcome.machines,
        "shards": outcome.shards,
        "steps": outcome.steps,
        "step_s": outcome.step_s,
        "samples_per_s": outcome.samples_per_s,
        "alone_s": outcome.alone_s,
        "speed_up": outcome.speed_up,
        "efficiency": outcome.efficiency,
        "exposed_communication": outcome.exposed_communication,
        "exposed_input": outcome.exposed_input,
        "input_wait_s": outcome.input_wait_s,
        "layout": outcome.layout,
        "sent_bytes": outcome.sent_bytes,
        "peak_memory_bytes": outcome.peak_memory_bytes,
        "mean_peak_memory_bytes": outcome.mean_peak_memory_bytes,
        "memory_share_bytes": outcome.memory_share_bytes,
        "wall_s": outcome.wall_s,
        "gone": outcome.gone,
        "links": outcome.links,
        "link_slack": outcome.link_slack,
    }
    if outcome.choice:
        found["choice"] = list(outcome.choice)
    if outcome.weights_sha256 is not None:
        found |= {
            "loss": outcome.loss,
            "test_loss": outcome.test_loss,
            "accuracy": outcome.accuracy,
            "weights_sha256": outcome.weights_sha256,
            "curve": [dataclasses.asdict(point) for point in outcome.curve],
        }
    return found


def print_outcome(job: Job, outcome: Outcome, trace: Path | None, console: Console) -> None:
    """Print what was found as a table."""
    from syncline.perf.explain import short

    where = f"{outcome.ranks} ranks on {outcome.machines} machines"
    for line in outcome.choice:
        console.print(line, soft_wrap=True)
    console.print(f"{job.model.name}, {job.strategy.name}, {where}, simulated:")
    table = Table(show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_row("step", f"{outcome.step_s * 1e3:.3g} ms")
    table.add_row("samples/s", short(outcome.samples_per_s))
    table.add_row("one rank alone, the same batch", f"{outcome.alone_s * 1e3:.3g} ms")
    table.add_row("speed-up against it", f"{outcome.speed_up:.2f}")
    table.add_row("efficiency", f"{outcome.efficiency:.1%}")
    table.add_row("exposed communication", f"{outcome.exposed_communication:.1%}")
    if outcome.exposed_input:
        table.add_row("waiting for input", f"{outcome.exposed_input:.1%}")
    table.add_row("sent by a rank in a step", f"{outcome.sent_bytes / 1e6:.3g} MB")
    if outcome.peak_memory_bytes is not None and outcome.mean_peak_memory_bytes is not None:
        most, mean = outcome.peak_memory_bytes / 1e6, outcome.mean_peak_memory_bytes / 1e6
        table.add_row("peak memory of tensors, a rank", f"{short(most)} MB (mean {short(mean)})")
    slack = outcome.link_slack
    about = "" if slack is None else f" (approximate, slack {slack:.1%})"
    table.add_row("links", f"{outcome.links}{about}")
    if outcome.weights_sha256 is not None:
        table.add_row("loss of the last step", f"{outcome.loss:.4f}")
        if outcome.accuracy is not None:
            table.add_row("accuracy", f"{outcome.accuracy:.2%}")
        table.add_row("weights", outcome.weights_sha256[:16])
    console.print(table)
    if len(outcome.curve) > 1:
        console.print(_curve(outcome))
    for rank, how in outcome.gone.items():
        console.print(f"rank {rank} {how}; the others went on without it")
    if trace is not None:
        console.print(f"trace: {trace}")


def _curve(outcome: Outcome) -> Table:
    """Return what evaluations found as a table."""
    table = Table("step", "samples", "virtual s", "sent MB", "loss", "test loss", "accuracy")
    for point in outcome.curve:
        test_loss = "" if point.test_loss is None else f"{point.test_loss:.4f}"
        accuracy = "" if point.accuracy is None else f"{point.accuracy:.2%}"
        table.add_row(
            *(f"{point.step:,}", f"{point.samples:,}", f"{point.time_s:.4g}"),
            *(f"{point.total_sent_bytes / 1e6:.4g}", f"{point.loss:.4f}", test_loss, accuracy),
        )
    return table
