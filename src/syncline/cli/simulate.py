"""`syncline simulate`: predict a job's run on a cluster, with the strategy's own code."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import typer
from rich.console import Console
from rich.progress import Progress

from syncline.cli.output import debug_option
from syncline.cli.report import report_option
from syncline.cli.run import check_ranks
from syncline.cli.train import check_names
from syncline.cluster import PRESETS, Cluster, cluster_of, conditions_of, known_facts
from syncline.cluster_file import find_cluster
from syncline.config import Job, read_job
from syncline.errors import ConfigError
from syncline.files import check_can_be_written, explained
from syncline.report.clusters import print_clusters
from syncline.report.simulated import Simulation, print_simulation, to_json_dict
from syncline.run_folder import finite

if TYPE_CHECKING:
    from syncline.cluster_facts import ClusterFacts
    from syncline.perf.explain import Explanation
    from syncline.sim.interval import Interval
    from syncline.sim.outcome import Outcome
    from syncline.workload import Workload

_INTERVAL_S = 30.0
"""An interval is found without being asked for if it takes no longer."""
_EXPLAINED = 1000
"""A run is explained without being asked for if its ranks take no more steps together."""


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
    report: Path | None = report_option,
    write_workload: Path | None = typer.Option(
        None, "--write-workload", metavar="FILE", help="Write the layers' times and sizes."
    ),
    interval: bool | None = typer.Option(
        None,
        "--interval/--no-interval",
        help="Say how far the step may be off; takes some more simulations.",
        show_default=f"if that takes {_INTERVAL_S:g} s at most",
    ),
    explain: bool | None = typer.Option(
        None,
        "--explain/--no-explain",
        help="Say what a step is spent on, and what would help.",
        show_default=f"up to {_EXPLAINED} steps of all ranks together",
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
    facts = find_cluster(cluster_name or job.cluster.preset)
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
    if report is not None:
        check_can_be_written("--report", report)
    if write_workload is not None:
        check_can_be_written("--write-workload", write_workload)
    found = None
    if not learn or workload is not None or write_workload is not None:
        found = _find_workload(job, cluster, workload, write_workload)
    wanted = None if learn else steps
    explains = explain
    if explains is None:
        total = job.run.steps if learn else steps
        explains = total is not None and cluster.ranks * total <= _EXPLAINED
    asks = explains or trace is not None or report is not None
    outcome = _run(job, cluster, found, wanted, show=not as_json, traces=asks)
    interval_found, why = _find_interval(job, cluster, facts, found, outcome, interval)
    outcome = _with_interval(outcome, interval_found)
    if trace is not None and outcome.trace is not None:
        with explained(trace):
            outcome.trace.write(trace)
    reasons = _explained(outcome, is_asked=explain is True) if explains else None
    simulation = Simulation(job, outcome, interval_found, why, reasons, trace, report)
    if report is not None:
        _write_report(simulation, report)
    if as_json:
        print(json.dumps(finite(to_json_dict(simulation)), allow_nan=False))
    else:
        print_simulation(simulation, Console(highlight=False))


def _with_interval(outcome: Outcome, interval: Interval | None) -> Outcome:
    """Let the trace say how far the step may be off."""
    if outcome.trace is None or interval is None:
        return outcome
    ends = (interval.low_s, interval.high_s)
    header = msgspec.structs.replace(outcome.trace.header, interval_s=ends)
    return dataclasses.replace(outcome, trace=msgspec.structs.replace(outcome.trace, header=header))


def _write_report(simulation: Simulation, path: Path) -> None:
    from syncline.report.page.simulation import run_of_simulation
    from syncline.report.page.write import write_page

    write_page([run_of_simulation(simulation)], path)


def _explained(outcome: Outcome, *, is_asked: bool) -> Explanation | None:
    """Explain what was simulated; a run that cannot be explained is one that nobody asked for."""
    from syncline.perf.explain import explain

    if outcome.trace is None:
        return None
    try:
        return explain(outcome.trace, "the simulation's trace")
    except ConfigError:
        if is_asked:
            raise
        return None


def _find_interval(
    job: Job,
    cluster: Cluster,
    facts: ClusterFacts,
    workload: Workload | None,
    outcome: Outcome,
    wanted: bool | None,
) -> tuple[Interval | None, str]:
    """Return where the step's time lies, or None and why that is not said."""
    from syncline.sim.interval import count_simulations, find_interval, given_keys
    from syncline.sim.job import STEPS, find_workload, simulate_job, with_choices

    if wanted is False or not outcome.step_s:
        return None, ""
    found = find_workload(job, cluster) if workload is None else workload
    facts, given = known_facts(facts), given_keys(job.cluster)
    chosen, _ = with_choices(job, cluster, found)
    steps = max(2, min(outcome.steps, STEPS))

    def step_of(other: Cluster, its: Workload) -> float:
        return simulate_job(chosen, other, steps=steps, workload=its).step_s

    began_s = time.perf_counter()
    middle_s = step_of(cluster, found)
    count = count_simulations(cluster, found, facts, given)
    takes_s = count * (time.perf_counter() - began_s)
    if wanted is None and takes_s > _INTERVAL_S:
        why = f"{count} more simulations would take {takes_s:.0f} s; --interval runs them"
        return None, f"no interval was found: {why}"
    interval = find_interval(
        step_of,
        cluster,
        found,
        facts,
        given,
        threads=job.run.threads,
        middle_s=middle_s,
        around_s=outcome.step_s,
    )
    return interval, ""


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
