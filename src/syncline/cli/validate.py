"""`syncline validate`: is the simulator right about this job, on this machine?"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from syncline.cli.output import debug_option, say
from syncline.cli.run import check_ranks
from syncline.cli.train import check_names
from syncline.cluster_file import read_cluster
from syncline.config import read_job
from syncline.config.words import shown
from syncline.errors import ConfigError
from syncline.launch.forked import dying_with_parent
from syncline.launch.signals import end_cleanly
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

    Measures layers and links here with 2 ranks (syncline measure layers, measure links,
    and two short runs of the job), simulates the job on each number of ranks, then trains
    with it for some seconds, several times. The job's own table \\[cluster] is left out.
    Use a quiet machine: what else runs on it counts as an error of the simulator.
    """
    runs = Runs(job_file, sets, _numbers(ranks), seconds)
    runs.check()
    facts, times = _read(runs, links, layers)
    end_cleanly()
    with tempfile.TemporaryDirectory(prefix="syncline-validate-") as name:
        folder = Path(name)
        times = runs.measure_layers(folder) if times is None else times
        facts = runs.measure_links(folder / "links.toml") if facts is None else facts
        found = list(_validate(runs, facts, times, rounds, folder))
    if as_json:
        print(json.dumps(finite({"rows": [one.to_json_dict() for one in found]}), allow_nan=False))
    else:
        print_compared(found, Console(highlight=False))


def _read(
    runs: Runs, links: Path | None, layers: Path | None
) -> tuple[ClusterFacts | None, Workload | None]:
    """Read what was measured before."""
    facts = None if links is None else _with_cores(read_cluster(links))
    if layers is None:
        return facts, None
    from syncline import workload
    from syncline.measure.validation import check_layers, on_this_machine

    found = workload.read(layers)
    check_layers(found, on_this_machine(runs.job), runs.wanted)
    return facts, found


def _with_cores(facts: ClusterFacts) -> ClusterFacts:
    """Return the facts with this machine's cores, if they say none."""
    if facts.cores is not None:
        return facts
    return msgspec.structs.replace(facts, cores=len(os.sched_getaffinity(0)))


def _validate(
    runs: Runs, facts: ClusterFacts, times: Workload, rounds: int, folder: Path
) -> Iterator[Compared]:
    """Predict all, then run all; yield each number of ranks when its runs are done."""
    from syncline.measure.validation import compare, on_this_machine, predict

    here = on_this_machine(runs.job)
    predicted = {number: predict(here, number, 1, facts, times) for number in runs.wanted}
    summaries: dict[int, list[dict[str, Any]]] = {number: [] for number in runs.wanted}
    for turn in range(rounds):
        for number in runs.wanted:
            steps = runs.steps_of(predicted[number].outcome.step_s)
            say(f"round {turn + 1} of {rounds}: {number} ranks, {steps} steps ...")
            summaries[number].append(runs.train(number, steps, folder / f"{number}-{turn}"))
    for number in runs.wanted:
        yield compare(predicted[number], summaries[number])


class Runs:
    """A job, and the commands of ours that measure and run it, each in a process of its own."""

    def __init__(
        self, job_file: Path, sets: Sequence[str], wanted: Sequence[int], seconds: float
    ) -> None:
        """`wanted` are numbers of ranks; a run takes about so many seconds."""
        self.job = read_job(job_file, sets)
        self.wanted = wanted
        self._file, self._seconds = job_file, seconds
        # A run that is only timed evaluates and saves at its end alone.
        names = [
            one for one in ("evaluate_every", "checkpoint_every") if getattr(self.job.run, one)
        ]
        self._sets = [*sets, *(f"run.{name}=" for name in names)]
        period = getattr(self.job.strategy.own, "period", 1)
        self._least_steps = max(_LEAST_STEPS, self.job.optimizer.warmup_steps + 1)
        if isinstance(period, int):
            self._least_steps = max(self._least_steps, period)

    def check(self) -> None:
        """Refuse what a run would refuse, before anything is measured."""
        for number in self.wanted:
            sets = [*self._sets, f"run.steps={self._least_steps}"]
            check_names(read_job(self._file, sets).resolved(number))

    def measure_layers(self, folder: Path) -> Workload:
        """Measure in a plain loop, then as they take in a run of two ranks."""
        from syncline import workload
        from syncline.measure.as_run import as_run
        from syncline.measure.validation import shard_samples
        from syncline.perf.trace import Trace

        out, trace = folder / "layers.json", folder / "run.trace"
        samples = ",".join(map(str, shard_samples(self.job, self.wanted)))
        say(f"measuring layers, {CALIBRATED_ON} ranks at once ...")
        more = [
            "--ranks",
            f"{CALIBRATED_ON}",
            "--samples",
            samples,
            "--seconds",
            f"{self._seconds}",
        ]
        self._ask(("measure", "layers"), [*more, "--out", str(out)], f"run.ranks={self.wanted[0]}")
        say(f"a run of {CALIBRATED_ON} ranks, and another with a trace ...")
        plain = self.train(CALIBRATED_ON, self._least_steps, folder / "plain")
        more = ["--trace", str(trace)]
        self.train(CALIBRATED_ON, self._least_steps, folder / "traced", more)
        return as_run(workload.read(out), Trace.read(trace), plain["step_s"])

    def measure_links(self, out: Path) -> ClusterFacts:
        say(f"measuring links, {CALIBRATED_ON} ranks ...")
        _ask(["measure", "links", "--ranks", f"{CALIBRATED_ON}", "--out", str(out), "--json"])
        return read_cluster(out)

    def steps_of(self, step_s: float) -> int:
        """Return how many steps a run takes, if one takes so long."""
        steps = round(self._seconds / max(step_s, 1e-6))
        return max(self._least_steps, min(_MOST_STEPS, steps))

    def train(self, ranks: int, steps: int, out: Path, more: Sequence[str] = ()) -> dict[str, Any]:
        """Train for real; return the summary."""
        more = [*more, "--ranks", str(ranks), "--out", str(out)]
        found: dict[str, Any] = json.loads(self._ask(("train",), more, f"run.steps={steps}"))
        return found

    def _ask(self, words: Sequence[str], more: Sequence[str], *sets: str) -> str:
        given = [word for one in (*self._sets, *sets) for word in ("--set", one)]
        return _ask([*words, str(self._file), *given, *more, "--json"])


def _ask(words: Sequence[str]) -> str:
    """Run a command of ours; return its last line. One that fails has said why: end as it did."""
    command = [sys.executable, "-m", "syncline", *words]
    running = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, preexec_fn=dying_with_parent()
    )
    try:
        out, _ = running.communicate()
    except BaseException:
        running.terminate()
        running.wait()
        raise
    if running.returncode or not out:
        say(f"syncline {shlex.join(words)} failed")
        raise typer.Exit(running.returncode or 1)
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
    from syncline.measure.validation import SHARES

    is_step, is_share = figure.name == "step_s", figure.name in SHARES

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
