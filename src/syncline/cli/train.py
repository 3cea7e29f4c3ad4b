"""`syncline train`: check a job without torch, prepare its run folder, start its ranks."""

from __future__ import annotations

import contextlib
import functools
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import typer
from rich.console import Console

from syncline import data, losses, models
from syncline.cli import folder as folders
from syncline.cli.output import debug_option, say
from syncline.cli.report import report_option
from syncline.cli.run import check_ranks
from syncline.cli.worker import load, try_own, work
from syncline.config import Job, job_to_toml, read_job
from syncline.config.words import toml_value
from syncline.errors import ConfigError
from syncline.files import check_can_be_written
from syncline.launch.env import LaunchedRank, read_world
from syncline.launch.local import BAD_INPUT, STOPPED, launch
from syncline.loggers.names import check_installed
from syncline.own_functions import is_own
from syncline.report.result import print_result
from syncline.run_folder import finite, has_checkpoint, read_summary
from syncline.strategies.registry import STRATEGIES


def train(
    job_file: Path = typer.Argument(..., metavar="JOB.toml", help="What to train, on what, how."),
    ranks: int | None = typer.Option(
        None, "--ranks", "-n", help="How many processes; wins over the file."
    ),
    sets: list[str] = typer.Option(
        [], "--set", metavar="KEY=VALUE", help="Override a setting; repeat for more."
    ),
    out: Path | None = typer.Option(
        None, "--out", help="The run folder.", show_default="runs/JOB-TIME"
    ),
    resume: bool = typer.Option(False, "--resume", help="Go on from the folder's last checkpoint."),
    trace: Path | None = typer.Option(
        None, "--trace", metavar="FILE", help="Write when each rank did what."
    ),
    report: Path | None = report_option,
    log: list[str] = typer.Option(
        [], "--log", metavar="LOGGER", help="tensorboard, wandb or mlflow; repeat for more."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print the result as one JSON object."),
    print_job: bool = typer.Option(False, "--print-job", help="Print the resolved job and stop."),
    debug: bool = debug_option,
) -> None:
    """Train what a job file describes.

    [bold]Examples[/bold]

      syncline train examples/digits.toml --ranks 2

      syncline train examples/digits.toml --set run.steps=30 --json

      syncline train examples/digits.toml --out runs/mine --resume

    [bold]The job[/bold] has five tables: model, data, optimizer, strategy and run;
    examples/digits.toml explains their settings, --print-job shows them all as
    they will be. --set takes a TOML value or a bare word; with an empty one
    (--set optimizer.momentum=) the setting is taken out. A sixth table, cluster,
    is for simulations: training takes no notice of it.

    [bold]Strategies[/bold]: STRATEGY_NAMES. Their settings are in the table
    strategy.NAME; docs/strategies.md explains them.

    [bold]Faults[/bold] on purpose: --set 'faults=[{rank=1, step=5, kind="death"}]'; or
    kind="slow" with factor and steps, kind="pause" with seconds.

    [bold]The run folder[/bold] holds job.toml (the job as it was run), metrics.jsonl,
    summary.json and checkpoints/. It is never overwritten: --resume goes on, on
    any number of ranks, to the weights of a run that was never stopped (strategy synchronous).

    [bold]--report[/bold] writes one HTML file that shows where the time went and how well it
    learned. It needs a trace, which is written to run.trace.gz in the run folder if --trace
    names no other file.

    [bold]--trace[/bold] writes every task of every rank, as JSON lines: forward, backward
    and waits by bucket, where the exchange is overlapped; reduces, gathers and
    steps always, on one clock for all ranks. `syncline explain FILE` reads it.

    [bold]--log[/bold] tensorboard[:FOLDER], wandb[:PROJECT] or mlflow[:URI] gets what metrics.jsonl
    gets, and evaluations. A logger that fails does not end the run.

    Under torchrun and srun the process is a rank itself and starts no others:

      torchrun --standalone --nproc-per-node 2 -m syncline train JOB.toml
    """
    world = read_world()
    if log:
        sets = [*sets, f"run.log={toml_value(log)}"]
    job = read_job(job_file, sets)
    check_installed(job.run.log)
    num_ranks = _ranks(job, ranks, world)
    if resume:
        job = folders.resumed_job(job, _checked_for_resume(job, out), num_ranks)
    job = job.resolved(num_ranks, world.machines if _is_rank(world) else None)
    check_names(job)
    named = out or (None if job.run.out is None else Path(job.run.out))
    if trace is not None and world.rank == 0:
        check_can_be_written("--trace", trace, made=named)
    if report is not None and world.rank == 0:
        check_can_be_written("--report", report, made=named)
    if print_job:
        sys.stdout.write(job_to_toml(job))
        return
    is_rank = _is_rank(world)
    if not is_rank:
        try_functions(job)
    folder = folders.choose_folder(job_file, job, out, world.job_id if is_rank else None)
    job = msgspec.structs.replace(job, run=msgspec.structs.replace(job.run, out=str(folder)))
    if report is not None and trace is None:
        trace = folder / "run.trace.gz"
    with contextlib.ExitStack() as stack:
        if world.rank == 0:
            stack.enter_context(folders.taken(folder, job, resume=resume))
        if is_rank:
            done = work(job, folder, resume=resume, trace=trace)
            summary = finite(done.to_json_dict())
        else:
            as_rank = functools.partial(work, job, folder, resume=resume, trace=trace)
            again = _command_to_resume(job_file, folder, ranks, sets)
            summary = _launch(job, folder, as_rank, again, as_json=as_json)
    if world.rank == 0:
        _print(summary, folder, as_json)
        if report is not None and trace is not None:
            _write_report(folder, trace, report)


# Typer makes the help from the docstring: this puts the registered strategies into it.
assert train.__doc__ is not None
train.__doc__ = train.__doc__.replace("STRATEGY_NAMES", ", ".join(STRATEGIES))


def check_names(job: Job, *, needs_data: bool = True) -> None:
    """Make the checks of model and data that need neither torch nor samples.

    Without `needs_data` the data's files need not be there.
    """
    settings = job.data
    data.check(
        settings.name,
        path=settings.path,
        image_size=settings.image_size,
        sample_shape=settings.sample_shape,
        classes=settings.classes,
        samples=settings.samples,
        seed=job.run.seed,
        options=settings.options,
        needs_files=needs_data,
    )
    losses.check(job.model.loss)
    if is_own(job.model.name):
        models.check_own(job.model.name, job.model.image_size, job.model.classes)
    # If the job does not give the image size, only the ranks know it and check it. Here the size
    # then only has to be large enough for the deepest model.
    size = job.image_size or 4096
    shape = settings.sample_shape or (3, size, size)
    models.check(job.model.name, shape, job.model.classes or 1, job.model.options)


def try_functions(job: Job) -> None:
    """Try the job's own functions in a process of its own, and end if they do not work.

    Ranks are forks of this process, which must not have started threads: so it never calls, or
    even imports, what is not ours.
    """
    is_usual = job.model.loss == losses.DEFAULT
    if is_usual and not is_own(job.model.name) and not is_own(job.data.name):
        return
    threads, stdout = job.run.threads, sys.stderr.fileno()
    load(threads)
    outcome = launch(functools.partial(try_own, job), 1, threads=threads, stdout=stdout)
    if outcome.exit_code:
        raise typer.Exit(outcome.exit_code)


def _checked_for_resume(job: Job, out: Path | None) -> Path:
    folder = folders.require_named_folder(job, out)
    folders.check_folder(folder, resume=True)
    return folder


def _is_rank(world: LaunchedRank) -> bool:
    """Say whether this process is a rank or a launcher: a Slurm job of one task may be either."""
    return world.launcher in ("torchrun", "syncline") or world.size > 1


def _ranks(job: Job, ranks: int | None, world: LaunchedRank) -> int:
    if ranks is not None:
        check_ranks("--ranks", ranks)
    if not _is_rank(world):
        return job.run.ranks if ranks is None else ranks
    if ranks is not None and ranks != world.size:
        raise ConfigError(
            "--ranks",
            f"got {ranks} under {world.launcher}, which started {world.size}",
            "the launcher decides",
            "Leave --ranks away.",
        )
    return world.size


def _command_to_resume(job_file: Path, folder: Path, ranks: int | None, sets: Sequence[str]) -> str:
    """Return the command that goes on with this run: with its settings, without its faults."""
    command = ["syncline", "train", str(job_file)]
    if ranks is not None:
        command += ["--ranks", str(ranks)]
    for setting in sets:
        if setting.split("=")[0].strip() != "faults":  # they would come again
            command += ["--set", setting]
    return shlex.join([*command, "--out", str(folder), "--resume"])


def _launch(
    job: Job, folder: Path, as_rank: Callable[[], object], again: str, *, as_json: bool
) -> dict[str, Any]:
    # With --json stdout has only the JSON object: what ranks print goes to stderr.
    stdout = sys.stderr.fileno() if as_json else None
    go_on = bool(job.strategy.own.may_lose(job.run.ranks))
    threads = job.run.threads
    load(threads)
    said = (BAD_INPUT, STOPPED)
    outcome = launch(
        *(as_rank, job.run.ranks),
        threads=threads,
        stdout=stdout,
        go_on=go_on,
        meets=True,
        said=said,
    )
    if outcome.exit_code:
        if not set(said) & set(outcome.statuses) and has_checkpoint(folder):
            say(f"to go on from the last checkpoint: {again}")
        raise typer.Exit(outcome.exit_code)
    return read_summary(folder)


def _write_report(folder: Path, trace: Path, path: Path) -> None:
    """Write the report about a run that has ended, and say where it is."""
    if not trace.exists():  # a finished run that is resumed takes no step
        say("no report: this run took no step, so that it has no trace")
        return
    from syncline.report.page.run import run_of_folder
    from syncline.report.page.write import write_page

    write_page([run_of_folder(folder, trace)], path)
    say(f"report: {path}")


def _print(summary: dict[str, Any], folder: Path, as_json: bool) -> None:
    if as_json:
        print(json.dumps(summary, allow_nan=False))
    else:
        print_result(summary, folder, Console(highlight=False))
