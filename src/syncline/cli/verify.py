"""`syncline verify`: run a few steps on several numbers of ranks, and compare all bits."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import typer
from rich.console import Console

from syncline.cli.output import debug_option, say
from syncline.cli.run import check_ranks
from syncline.cli.train import check_names, try_functions
from syncline.cli.worker import load, verify_rank
from syncline.config import Job, printable, read_job
from syncline.errors import ConfigError
from syncline.launch.env import Verification, read_world, verification_environment
from syncline.launch.local import launch
from syncline.launch.outcome import Outcome
from syncline.verify.compare import Difference, Recorded, first_difference, is_like, read_run

_SAID_LINES = 20
"""Lines of a failed run that are shown: the end of a traceback."""


def verify(
    target: Path = typer.Argument(..., metavar="JOB_OR_SCRIPT", help="JOB.toml or a script."),
    arguments: list[str] | None = typer.Argument(
        None, help="For the script, after --, as they are."
    ),
    ranks: str = typer.Option("1,2,4", "--ranks", "-n", help="The numbers of ranks to compare."),
    steps: int = typer.Option(
        5, "--steps", min=1, help="Steps to compare one by one; as many follow at full speed."
    ),
    sets: list[str] = typer.Option(
        [], "--set", metavar="KEY=VALUE", help="Override a setting of a job; repeat for more."
    ),
    threads: int = typer.Option(1, "--threads", min=1, help="Intra-op threads of a script's rank."),
    as_json: bool = typer.Option(False, "--json", help="Print the result as one JSON object."),
    debug: bool = debug_option,
) -> None:
    """Say whether a job or a script has the same bits on any number of ranks.

    [bold]Examples[/bold]

      syncline verify examples/digits.toml

      syncline verify script.py --ranks 1,2,3 --steps 10

      syncline verify script.py --ranks 1,2 -- --lr 0.1

    It runs a few steps on each number of ranks, with the exchange overlapped and
    inline, and compares a digest of every parameter and buffer after every step;
    then as many steps at full speed, and once more after the last. If bits differ
    it names the first step, the first parameter and a likely reason.
    Nothing is kept: a job's runs write to a temporary folder, and a script is ended
    after its last step.

    [bold]Exit status[/bold]: 0 all bits are equal, 1 they differ, 2 it could not be tried.
    """
    world = read_world()
    if world.size > 1:
        rule, fix = "it starts ranks itself", "Start it outside of the launcher."
        found = f"started as rank {world.rank} of {world.size} by {world.launcher}"
        raise ConfigError("syncline verify", found, rule, fix)
    counts = _counts(ranks)
    if target.suffix == ".toml":
        trial: _Trial = _JobTrial(target, sets, arguments or [], counts)
    else:
        trial = _ScriptTrial(target, sets, arguments or [], threads)
    runs: list[Recorded] = []
    with tempfile.TemporaryDirectory(prefix="syncline-verify-") as folder:
        for count in counts:
            for overlap in (True, False):
                if not overlap and runs[-1].facts[0]["fixes_overlap"]:
                    continue  # the strategy decides: a second run would be the first again
                if not as_json and sys.stderr.isatty():
                    say(f"running {count} rank{'s' * (count > 1)} ...")
                wanted = Path(folder) / f"{count}-{overlap}"
                wanted.mkdir()
                runs.append(_run(trial, count, overlap, steps, wanted))
    difference = first_difference(runs)
    if as_json:
        print(json.dumps(to_json_dict(trial, runs, difference)))
    else:
        _print(trial, runs, difference, steps, Console(highlight=False))
    raise typer.Exit(0 if difference is None else 1)


class _Trial:
    """What is run on several numbers of ranks."""

    def __init__(self, name: str, notes: Sequence[str] = ()) -> None:
        self.name = name
        self.notes = notes

    def launch(self, ranks: int, wanted: Verification) -> Outcome:
        """Run it on this many ranks."""
        raise NotImplementedError


class _JobTrial(_Trial):
    """A job, by the built-in loop."""

    def __init__(
        self, path: Path, sets: Sequence[str], arguments: Sequence[str], counts: Sequence[int]
    ) -> None:
        if arguments:
            found, rule = f"got {' '.join(arguments)}", "a job takes no arguments"
            raise ConfigError("verify", found, rule, "Use --set KEY=VALUE.")
        job = read_job(path, sets)
        if not job.strategy.own.is_synchronous or job.strategy.own.splits_layers:
            raise ConfigError(
                "strategy.name",
                f'got "{job.strategy.name}"',
                "its ranks hold different parameters, on purpose",
                'Verify a synchronous strategy, for example --set strategy.name="synchronous".',
            )
        notes = []
        if job.strategy.shards is None:
            shards = _least_shards(job, max(counts))
            job = _with(job, "strategy", shards=shards)
            notes.append(
                f"strategy.shards is not set: {shards} were used here. Set it, or training on "
                "another number of ranks sums in another order."
            )
        # An evaluation or a checkpoint changes no bit; both are written to a folder that is lost.
        job = _with(job, "run", evaluate_every=None, checkpoint_every=None)
        self._job = msgspec.structs.replace(job, faults=())
        resolved = {count: self._job.resolved(count) for count in counts}
        check_names(resolved[counts[0]])
        try_functions(resolved[counts[0]])
        load(job.run.threads)
        super().__init__(printable(path), notes)

    def launch(self, ranks: int, wanted: Verification) -> Outcome:
        job = self._job
        if not job.strategy.own.fixes_overlap:
            job = _with(job, "strategy", overlap=wanted.overlap)
        work = functools.partial(verify_rank, job.resolved(ranks), Path(wanted.folder) / "run")
        extra = verification_environment(wanted)
        return launch(work, ranks, threads=job.run.threads, extra_env=extra)


class _ScriptTrial(_Trial):
    """A user's own loop."""

    def __init__(
        self, path: Path, sets: Sequence[str], arguments: Sequence[str], threads: int
    ) -> None:
        if not path.is_file():
            found = "this is a folder" if path.is_dir() else "there is no such file"
            rule, fix = "JOB.toml or a Python script is verified", "Look at its path."
            raise ConfigError(printable(path), found, rule, fix)
        if sets:
            rule, fix = "only a job has settings", "Pass arguments to a script after --."
            raise ConfigError("--set", f"got {sets[0]} with {path.name}", rule, fix)
        self._command = [sys.executable, str(path), *arguments]
        self._threads = threads
        super().__init__(printable(path))

    def launch(self, ranks: int, wanted: Verification) -> Outcome:
        extra = verification_environment(wanted)
        return launch(self._command, ranks, threads=self._threads, extra_env=extra)


def _run(trial: _Trial, ranks: int, overlap: bool, steps: int, folder: Path) -> Recorded:
    """Run on this many ranks and return what they recorded."""
    said = folder / "said"
    with _streams_to(said):
        outcome = trial.launch(ranks, Verification(str(folder), steps, overlap))
    if outcome.stopped_by is not None:
        raise typer.Exit(outcome.exit_code)
    found = read_run(folder, ranks, overlap)
    where = f"on {ranks} rank{'' if ranks == 1 else 's'}"
    for facts in found.facts:
        if not facts["is_synchronous"]:
            raise ConfigError(
                "strategy",
                f"got {facts['strategy']}",
                "its ranks hold different parameters, on purpose",
                "Verify a script with a synchronous strategy.",
            )
    if outcome.exit_code:
        for line in said.read_text(errors="replace").splitlines()[-_SAID_LINES:]:
            print(line, file=sys.stderr)
        rule = f"it must run {where} to be compared"
        fix = "Its last lines are above."
        raise ConfigError(trial.name, f"it ended with an error {where}", rule, fix)
    if not found.num_steps:
        what = "it ended without a step" if found.facts else "it never called distribute()"
        fix = "Call init() and distribute(), and take steps with the optimizer."
        raise ConfigError(trial.name, f"{what} {where}", "the bits after steps are compared", fix)
    if any(facts["ranks"] != ranks for facts in found.facts):
        rule = "every rank must join the job"
        raise ConfigError(trial.name, f"its ranks {where} ran alone", rule, "Call syncline.init().")
    return found


@contextlib.contextmanager
def _streams_to(path: Path) -> Iterator[None]:
    """Send what this process and its ranks print to a file: many runs would print it many times."""
    sys.stdout.flush()
    sys.stderr.flush()
    saved = [os.dup(number) for number in (1, 2)]
    with path.open("wb") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, old in zip((1, 2), saved, strict=True):
            os.dup2(old, number)
            os.close(old)


def _counts(text: str) -> list[int]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() for word in words):
        rule, fix = "it lists numbers of ranks", "Write for example --ranks 1,2,4."
        raise ConfigError("--ranks", f"got {text!r}", rule, fix)
    counts = sorted({int(word) for word in words})
    check_ranks("--ranks", counts[0])
    return counts


def _least_shards(job: Job, ranks: int) -> int:
    """Return the least number of equal shards that gives each of so many ranks one."""
    batch = job.data.batch
    return next((n for n in range(ranks, batch + 1) if batch % n == 0), ranks)


def _with(job: Job, table: str, **values: Any) -> Job:
    changed = msgspec.structs.replace(getattr(job, table), **values)
    return msgspec.structs.replace(job, **{table: changed})


def to_json_dict(
    trial: _Trial, runs: Sequence[Recorded], difference: Difference | None
) -> dict[str, Any]:
    """Return the result as plain data."""
    base = runs[0]
    found = None
    if difference is not None:
        found = {
            "run": difference.run,
            "base": difference.base,
            "step": difference.step,
            "model": difference.model,
            "parameter": difference.names[0] if difference.names else None,
            "parameters": len(difference.names),
            "reason": difference.reason,
        }
    return {
        "is_equal": difference is None,
        "steps": base.num_steps,
        "shards": base.facts[0]["shards"],
        "runs": [
            {
                "ranks": run.ranks,
                "overlap": run.facts[0]["overlap"],
                "steps": run.num_steps,
                "weights": run.weights,
                "is_equal": is_like(base, run),
            }
            for run in runs
        ],
        "difference": found,
        "notes": list(trial.notes),
    }


def _print(
    trial: _Trial,
    runs: Sequence[Recorded],
    difference: Difference | None,
    steps: int,
    console: Console,
) -> None:
    write: Callable[[str], None] = functools.partial(console.print, soft_wrap=True, markup=False)
    base = runs[0]
    shards = base.facts[0]["shards"]
    write(f"{trial.name}: {base.num_steps} steps, {shards} shard{'s' * (shards != 1)}")
    write("")
    write("ranks  exchange    weights           bits")
    for run in runs:
        how = "overlapped" if run.facts[0]["overlap"] else "inline"
        bits = "the first run" if run is base else "equal" if is_like(base, run) else "different"
        write(f"{run.ranks:>5}  {how:<10}  {run.weights}  {bits}")
    write("")
    if difference is None:
        one_by_one = min(steps, base.num_steps)
        more = base.num_steps - one_by_one
        at_speed = f", and after {more} more at full speed" if more else ""
        write(f"All bits are equal after each of {one_by_one} steps{at_speed}.")
    else:
        write(f"{difference.run}: {_place(difference)} differs from {difference.base}.")
        write(f"Likely reason: {difference.reason}")
    for note in trial.notes:
        write(note)


def _place(difference: Difference) -> str:
    """Say where bits differ first."""
    when = f"after step {difference.step}" if difference.step else "before the first step"
    of_model = f" of model {difference.model}" if difference.model else ""
    if not difference.names:
        return f"step {difference.step}{of_model}"
    others = len(difference.names) - 1
    more = f" (and {others} other{'s' * (others > 1)})" if others else ""
    return f"{difference.names[0]}{of_model}{more}, {when},"
