"""`syncline validate`: is the simulator right about this job, on this machine?"""

from __future__ import annotations

import contextlib
import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.table import Table

from syncline.cli.output import debug_option, say
from syncline.cli.run import check_ranks
from syncline.cli.train import check_names
from syncline.cluster_file import read_cluster
from syncline.config import Job, read_job
from syncline.config.words import shown
from syncline.errors import ConfigError
from syncline.run_folder import finite

if TYPE_CHECKING:
    from syncline.cluster_facts import ClusterFacts
    from syncline.measure.validation import Compared, Figure
    from syncline.workload import Workload

CALIBRATED_ON = 2
"""Ranks that measure layers and links, whatever is predicted."""
_LEAST_STEPS, _MOST_STEPS = 20, 2000
_NAMES = {
    "step_s": "step, ms",
    "samples_per_s": "samples/s",
    "exposed_communication": "exposed communication",
    "sent_bytes": "sent by a rank in a step, MB",
}
_UNITS = {"step_s": 1e-3, "sent_bytes": 1e6}


def validate(
    job_file: Path = typer.Argument(..., metavar="JOB.toml", help="What to predict and to run."),
    ranks: str = typer.Option("2,4", "--ranks", "-n", metavar="2,4", help="Numbers of ranks."),
    seconds: float = typer.Option(
        10.0, "--seconds", min=0.1, help="How long each run takes, and measuring layers."
    ),
    rounds: int = typer.Option(3, "--rounds", min=1, help="Runs of each number of ranks."),
    layers: Path | None = typer.Option(
        None, "--layers", metavar="FILE", help="What measure layers wrote; else it is measured."
    ),
    links: Path | None = typer.Option(
        None, "--links", metavar="FILE", help="What measure links wrote; else it is measured."
    ),
    sets: list[str] = typer.Option(
        [], "--set", metavar="KEY=VALUE", help="Override a setting; repeat for more."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print the result as one JSON object."),
    debug: bool = debug_option,
) -> None:
    """Predict a job's speed on this machine, run it for real, and say how far off it was.

    [bold]Examples[/bold]

      syncline validate examples/digits.toml

      syncline validate examples/digits.toml --ranks 2,3,4 --set strategy.name=elastic

      syncline validate examples/digits.toml --links this-machine.toml --layers cnn.json

    Measures layers and links here with 2 ranks (syncline measure layers, measure links),
    simulates the job on each number of ranks, then trains with it for some seconds,
    several times. The job's own table \\[cluster] is left out. Use a quiet machine: what
    else runs on it counts as an error of the simulator.
    """
    wanted = _numbers(ranks)
    job = read_job(job_file, sets)
    for number in wanted:
        check_names(job.resolved(number))
    for path, read in ((layers, _read_layers), (links, read_cluster)):
        if path is not None:
            read(path)
    given = [word for one in sets for word in ("--set", one)]
    with tempfile.TemporaryDirectory(prefix="syncline-validate-") as name:
        folder = Path(name)
        if layers is None:
            layers = folder / "layers.json"
            _measure_layers(job_file, given, job, wanted, seconds, layers)
        if links is None:
            links = folder / "links.toml"
            say(f"measuring links, {CALIBRATED_ON} ranks ...")
            _ask(["measure", "links", "--ranks", f"{CALIBRATED_ON}", "--out", str(links), "--json"])
        known = (read_cluster(links), _read_layers(layers))
        found = list(_validate(job_file, given, job, wanted, known, seconds, rounds, folder))
    if as_json:
        print(json.dumps(finite({"rows": [one.to_json_dict() for one in found]}), allow_nan=False))
    else:
        print_compared(found, Console(highlight=False))


def _read_layers(path: Path) -> Workload:
    from syncline import workload

    return workload.read(path)


def _validate(
    job_file: Path,
    given: Sequence[str],
    job: Job,
    wanted: Sequence[int],
    known: tuple[ClusterFacts, Workload],
    seconds: float,
    rounds: int,
    folder: Path,
) -> Iterator[Compared]:
    """Predict all, then run all; yield each number of ranks when its runs are done."""
    from syncline.measure.validation import compare, on_this_machine, predict

    here, (facts, times) = on_this_machine(job), known
    predicted = {number: predict(here, number, 1, facts, times) for number in wanted}
    runs: dict[int, list[dict[str, Any]]] = {number: [] for number in wanted}
    for turn in range(rounds):
        for number in wanted:
            steps = round(seconds / max(predicted[number].outcome.step_s, 1e-6))
            steps = min(_MOST_STEPS, max(_LEAST_STEPS, steps))
            say(f"round {turn + 1} of {rounds}: {number} ranks, {steps} steps ...")
            out = folder / f"{number}-{turn}"
            more = ["--set", f"run.steps={steps}", "--set", "run.evaluate_every="]
            more += ["--set", "run.checkpoint_every=", "--out", str(out), "--json"]
            words = ["train", str(job_file), "--ranks", str(number), *given, *more]
            runs[number].append(json.loads(_ask(words)))
    for number in wanted:
        yield compare(predicted[number], runs[number])


def _measure_layers(
    job_file: Path,
    given: Sequence[str],
    job: Job,
    wanted: Sequence[int],
    seconds: float,
    layers: Path,
) -> None:
    from syncline.measure.validation import shard_samples

    samples = ",".join(map(str, shard_samples(job, wanted)))
    say(f"measuring layers, {CALIBRATED_ON} ranks at once ...")
    first = ["--ranks", str(CALIBRATED_ON), "--set", f"run.ranks={wanted[0]}"]
    more = ["--seconds", str(seconds), "--samples", samples, "--out", str(layers), "--json"]
    _ask(["measure", "layers", str(job_file), *given, *first, *more])


def _ask(words: Sequence[str]) -> str:
    """Run a command of ours; return its last line. One that fails has said why: end as it did."""
    command = [sys.executable, "-m", "syncline", *words]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        out, _ = running.communicate()
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            running.terminate()
        running.wait()
        raise
    if running.returncode:
        say(f"syncline {shlex.join(words)} failed")
        raise typer.Exit(running.returncode)
    return out.splitlines()[-1]


def _numbers(text: str) -> list[int]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) >= 1 for word in words):
        rule = "this is a list of whole numbers, 1 or more"
        raise ConfigError("--ranks", f"got {shown(text)}", rule, "Write for example --ranks 2,4.")
    found = sorted({int(word) for word in words})
    for number in found:
        check_ranks("--ranks", number)
    return found


def print_compared(found: Sequence[Compared], console: Console) -> None:
    """Print every figure, said beforehand and measured."""
    table = Table("ranks", "", "predicted", "nine in ten", "measured", "error")
    for one in found:
        for figure in one.figures:
            table.add_row(*_row(one, figure))
    console.print(table)
    inside = sum(one.is_inside for one in found)
    console.print(f"{inside} of {len(found)} steps lie in their interval")


def _row(one: Compared, figure: Figure) -> tuple[str, ...]:
    unit = _UNITS.get(figure.name, 1.0)
    is_step, is_share = figure.name == "step_s", figure.name == "exposed_communication"

    def text(value: float) -> str:
        return f"{value:.1%}" if is_share else f"{value / unit:.4g}"

    interval = (one.interval.low_s / unit, one.interval.high_s / unit)
    return (
        str(one.ranks) if is_step else "",
        _NAMES[figure.name],
        text(figure.predicted),
        f"{interval[0]:.4g} to {interval[1]:.4g}" if is_step else "",
        f"{text(figure.measured)} ({text(figure.least)} to {text(figure.most)})",
        f"{figure.error * 100:+.1f} points" if is_share else f"{figure.error:+.1%}",
    )
