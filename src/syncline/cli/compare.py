"""`syncline compare`: which strategy learns faster in time, on how many ranks."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import typer
from rich.console import Console

from syncline.cli.compared import Shown, print_summary
from syncline.cli.output import debug_option, say
from syncline.cli.run import check_ranks
from syncline.cli.train import check_names, try_functions
from syncline.compare.study import Grid, Scenario, Study, check_study, read_study
from syncline.config.words import shown
from syncline.errors import ConfigError
from syncline.launch.signals import end_cleanly

if TYPE_CHECKING:
    from syncline.compare.cell import Found
    from syncline.compare.grid import Cell, Plan

_FAULTS = "with faults"
"""The scenario that --faults adds to the calm one."""


def compare(
    job_file: Path = typer.Argument(
        ..., metavar="JOB_OR_STUDY.toml", help="What to train; a study also says what to compare."
    ),
    strategies: str | None = typer.Option(
        None, "--strategies", metavar="A,B,...", help="Names of strategies to compare."
    ),
    ranks: str | None = typer.Option(
        None, "--ranks", "-n", metavar="8,16,...", help="Numbers of ranks that compute."
    ),
    out: Path = typer.Option(..., "--out", metavar="DIR", help="The folder of the comparison."),
    cluster: str | None = typer.Option(
        None, "--cluster", metavar="NAME_OR_FILE", help="A preset or a cluster file."
    ),
    ranks_per_machine: int | None = typer.Option(
        None, "--ranks-per-machine", min=1, help="Ranks of each machine.", show_default="1"
    ),
    seeds: int | None = typer.Option(None, "--seeds", min=1, help="Runs of each kind."),
    target: float | None = typer.Option(
        None, "--target", metavar="0.88", help="Accuracy: also find the time to it."
    ),
    tune: int | None = typer.Option(
        None, "--tune", min=1, help="Settings tried for each strategy on each number of ranks."
    ),
    batch_per_rank: int | None = typer.Option(
        None,
        "--batch-per-rank",
        min=1,
        help="Samples of a rank's step.",
        show_default="data.batch over all ranks",
    ),
    samples: int | None = typer.Option(
        None, "--samples", min=1, help="Samples of each run.", show_default="as the job's length"
    ),
    sets: list[str] = typer.Option(
        [], "--set", metavar="KEY=VALUE", help="Override a setting; repeat for more."
    ),
    faults: str | None = typer.Option(
        None, "--faults", metavar="TOML", help="Compare with these faults, too."
    ),
    real: bool = typer.Option(False, "--real", help="Train with real processes on this machine."),
    jobs: int | None = typer.Option(
        None, "--jobs", "-j", min=1, help="Runs at the same time.", show_default="one per core"
    ),
    as_json: bool = typer.Option(False, "--json", help="Print the summary as one JSON object."),
    debug: bool = debug_option,
) -> None:
    """Compare strategies: how fast each one learns in time, on how many ranks.

    [bold]Examples[/bold]

      syncline compare examples/digits.toml --strategies synchronous,gossip,local
      --ranks 2,8 --cluster 10gbit --target 0.9 --out runs/compared

      syncline compare examples/study-jin.toml --out runs/jin

    Every run does real arithmetic on a virtual clock, as syncline simulate --learn does,
    and ends at the same number of samples over all ranks, whoever computes them: where
    no rank waits for the others, a fast one computes more. One shard on each rank that
    computes; ranks that only serve come on top. docs/compare.md has the rules.

    The folder holds points.csv (a row for each evaluation), summary.json and each run's
    own file: started again with the same folder, the command goes on where it was.
    """
    study = _with_options(
        read_study(job_file),
        cluster=cluster,
        ranks_per_machine=ranks_per_machine,
        seeds=seeds,
        target=target,
        tune=tune,
        samples=samples,
    )
    study = _with_sets(study, sets)
    study = _with_grid(study, strategies, ranks, batch_per_rank)
    study = _with_faults(study, faults)
    check_study(study.compare)
    _compare(study, job_file, out, real=real, jobs=jobs, as_json=as_json)


def _compare(
    study: Study, job_file: Path, out: Path, *, real: bool, jobs: int | None, as_json: bool
) -> None:
    from syncline.compare.folder import Comparison, check_folder, with_job_name
    from syncline.compare.grid import Plan

    study = with_job_name(study, job_file)
    check_folder(out, study)
    plan = Plan(study, _samples_of(study), "wall" if real else "virtual")
    end_cleanly()
    comparison = Comparison(plan, out, _runner(out, real=real), _jobs(jobs, real=real))
    _check_jobs(plan)
    progress = Shown(is_shown=not as_json)
    try:
        summary = comparison.go(progress)
    finally:
        progress.end()
    _write_report(out)
    if as_json:
        print(json.dumps(summary, allow_nan=False))
    else:
        print_summary(summary, out, Console(highlight=False))
    if summary["cells"]["failed"]:
        say(f"{summary['cells']['failed']} runs failed; summary.json says why")


def _runner(out: Path, *, real: bool) -> Callable[[Cell], Found]:
    """Return what runs a cell."""
    if real:
        from syncline.compare.real import RealRun

        return RealRun(out)
    from syncline.compare.running import simulate_cell

    return simulate_cell


def _jobs(wanted: int | None, *, real: bool) -> int:
    """Return how many runs there are at the same time; real ones would slow each other down."""
    if real and wanted not in (None, 1):
        rule, fix = "real runs come one after the other", "Leave --jobs away."
        raise ConfigError("--jobs", f"got {wanted} with --real", rule, fix)
    return 1 if real else wanted or len(os.sched_getaffinity(0))


def _write_report(folder: Path) -> None:
    """Write report.html, with all numbers of summary.json in pictures."""
    from syncline.report.page.write import write_report

    write_report([folder], folder / "report.html")


def _check_jobs(plan: Plan) -> None:
    """Make the checks of model and data, once; try functions of the user's own."""
    place = plan.places[0]
    job = plan.cell(place, plan.compare.all_seeds[0]).job
    check_names(job)
    try_functions(job)


def _samples_of(study: Study) -> int:
    """Return how many samples a run has, as the study or the job's length says."""
    if study.compare.samples is not None:
        return study.compare.samples
    from syncline.config.reading import job_of_tables

    strategy = {"name": "synchronous"}
    tables = {**study.tables, "strategy": strategy}
    own = [one for one in study.compare.set if not one.strip().startswith("strategy.")]
    job = job_of_tables(tables, study.source, own)
    if job.run.steps is not None:
        return job.run.steps * job.data.batch
    check_names(job)
    from syncline.recipe import load_data

    assert job.run.epochs is not None
    return job.run.epochs * len(load_data(job).train)


def _with_options(study: Study, **given: Any) -> Study:
    """Return the study with the options that were given."""
    if (target := given["target"]) is not None and not 0 < target <= 1:
        rule, fix = "an accuracy lies between 0 and 1", "Write for example --target 0.88."
        raise ConfigError("--target", f"got {target:g}", rule, fix)
    known = {key: one for key, one in given.items() if one is not None}
    return _replaced(study, **known)


def _with_sets(study: Study, sets: list[str]) -> Study:
    for one in sets:
        key, equals, _ = one.partition("=")
        if not equals or not key.strip():
            rule, fix = "it takes KEY=VALUE", "Write for example --set optimizer.lr=0.1."
            raise ConfigError("--set", f"got {shown(one)}", rule, fix)
        if key.strip() in _OF_GRID:
            rule, fix = "the grid says it", f"Use {_OF_GRID[key.strip()]}."
            raise ConfigError("--set", f"got {shown(one)}", rule, fix)
    return _replaced(study, set=(*study.compare.set, *sets))


_OF_GRID = {
    "strategy.name": "--strategies",
    "run.ranks": "--ranks",
    "run.seed": "--seeds",
    "strategy.shards": "--ranks: each rank that computes has one shard",
    "data.batch": "--batch-per-rank, or data.batch in the file",
}


def _with_grid(
    study: Study, strategies: str | None, ranks: str | None, batch_per_rank: int | None
) -> Study:
    """Return the study with the grid that options describe; a study's own is kept without."""
    if strategies is None and ranks is None and batch_per_rank is None:
        return study
    if study.compare.grid:
        key = next(
            key
            for key, one in (
                ("--strategies", strategies),
                ("--ranks", ranks),
                ("--batch-per-rank", batch_per_rank),
            )
            if one is not None
        )
        rule, fix = "a study says it in its grids", "Leave it away, or change the study."
        raise ConfigError(key, "given with a study", rule, fix)
    if strategies is None or ranks is None:
        key = "--strategies" if strategies is None else "--ranks"
        rule = "a comparison has both --strategies and --ranks"
        fix = "Write for example --strategies synchronous,gossip --ranks 8,16."
        raise ConfigError(key, "it is not there", rule, fix)
    rule = "fixed batch over all ranks" if batch_per_rank is None else "fixed batch on each rank"
    grid = Grid(
        name=rule,
        strategies=tuple(dict.fromkeys(one.strip() for one in strategies.split(","))),
        ranks=tuple(_numbers(ranks)),
        batch_per_rank=batch_per_rank,
    )
    return _replaced(study, grid=(grid,))


def _numbers(text: str) -> list[int]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) >= 1 for word in words):
        rule = "this is a list of whole numbers, 1 or more"
        raise ConfigError("--ranks", f"got {shown(text)}", rule, "Write for example --ranks 8,16.")
    found = sorted({int(word) for word in words})
    for number in found:
        check_ranks("--ranks", number)
    return found


def _with_faults(study: Study, faults: str | None) -> Study:
    if faults is None:
        return study
    scenario = Scenario(name=_FAULTS, set=(f"faults={faults}",), words=faults)
    return _replaced(study, scenario=(*study.compare.scenario, scenario))


def _replaced(study: Study, **given: Any) -> Study:
    compare = msgspec.structs.replace(study.compare, **given)
    return msgspec.structs.replace(study, compare=compare)
