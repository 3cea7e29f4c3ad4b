"""Compare the weights of this version and of another commit, bit for bit.

`python -m benchmarks.hashes --against REV` trains a fixed list of small jobs with both versions'
command lines and compares the hashes of the weights: with the other version's, and with the other
runs of the same job in this version. The exit status is 1 if a synchronous run differs or fails.
Asynchronous strategies are run in virtual time, where they are repeatable; they are shown and
do not count. A strategy that the other commit does not know is compared within this version only.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.command import add_against, end_cleanly
from benchmarks.hash_jobs import BASE, JOBS, RUNS, Run
from benchmarks.versions import THIS, Version, VersionError, version_of

RUN_TIMEOUT_S = 120.0  # a run takes seconds; a machine may have other work
SHOWN_DIGITS = 12


@dataclass(frozen=True)
class Outcome:
    """What came of a run on one version: the weights' hash, or why there is none."""

    sha256: str | None = None
    failure: str | None = None


@dataclass(frozen=True)
class Row:
    """One run on both versions. `other` is None where the other does not know the strategy."""

    name: str
    counts: bool
    this: Outcome
    other: Outcome | None
    job_sha256: str | None
    """What the other runs of the job have in this version; None with an asynchronous strategy."""

    @property
    def is_equal(self) -> bool:
        mine = self.this.sha256
        return (
            mine is not None
            and (self.other is None or self.other.sha256 == mine)
            and self.job_sha256 in (None, mine)
        )


def commands(run: Run, job_file: Path, out: Path) -> list[list[str]]:
    """Return the command lines of a run, one after the other; the last prints the result."""
    sets = [*JOBS[run.job], *run.sets, f"strategy.name={run.strategy}"]

    def line(ranks: int, more: Sequence[str]) -> list[str]:
        words = [sys.executable, "-m", "syncline", run.verb, str(job_file), "--json"]
        words += ["--ranks", str(ranks)]
        return words + [word for one in [*sets, *more] for word in ("--set", one)]

    if run.verb == "simulate":
        return [[*line(run.ranks, ()), "--learn"]]
    folder = ["--out", str(out)]
    if run.start is None:
        return [[*line(run.ranks, ()), *folder]]
    first = [*line(run.start.ranks, run.start.sets), *folder]
    return [first, [*line(run.ranks, ()), *folder, "--resume"]]


def train(run: Run, versions: Sequence[Version], folder: Path) -> list[Outcome]:
    """Run the same on all versions at the same time."""
    job_file = folder / "job.toml"
    job_file.write_text(BASE)
    lines = [commands(run, job_file, folder / version.name / run.name) for version in versions]
    outcomes = [Outcome() for _ in versions]
    for part in range(len(lines[0])):
        is_last = part == len(lines[0]) - 1
        may_fail = not is_last and run.start is not None and run.start.is_killed
        ended = _run_together([line[part] for line in lines], versions, folder)
        outcomes = [
            before if before.failure else _read(status, out, err, is_last, may_fail)
            for before, (status, out, err) in zip(outcomes, ended, strict=True)
        ]
    return outcomes


def _run_together(
    lines: Sequence[Sequence[str]], versions: Sequence[Version], folder: Path
) -> list[tuple[int, str, str]]:
    """Run one command line of each version; return status, stdout and stderr of each."""
    with contextlib.ExitStack() as stack:
        # Files rather than pipes: nobody reads while the first of them is waited for.
        files = [
            [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in "oe"] for _ in versions
        ]
        started = []
        for line, version, (out, err) in zip(lines, versions, files, strict=True):
            process = subprocess.Popen(
                line,
                cwd=folder,
                env=version.environment(),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
            )
            # The launcher takes its ranks along when it is killed.
            stack.callback(process.wait)
            stack.callback(process.kill)
            started.append(process)
        for process in started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(RUN_TIMEOUT_S)
            process.kill()
        texts = []
        for process, pair in zip(started, files, strict=True):
            for file in pair:
                file.seek(0)
            texts.append((process.wait(), *(file.read() for file in pair)))
        return texts


def _read(status: int, out: str, err: str, is_last: bool, may_fail: bool) -> Outcome:
    if status and not may_fail:
        said = err.strip().splitlines()
        return Outcome(failure=f"status {status}: {said[-1] if said else 'nothing was printed'}")
    if may_fail and not status:
        return Outcome(failure="a rank was to be killed, and the run ended well")
    return Outcome(json.loads(out)["weights_sha256"]) if is_last else Outcome()


def knows(version: Version, strategy: str, folder: Path) -> bool:
    """Ask a version's command line whether it has a strategy."""
    job_file = folder / "known.toml"
    job_file.write_text(BASE)
    line = [sys.executable, "-m", "syncline", "train", str(job_file), "--print-job"]
    line += ["--set", f"strategy.name={strategy}"]
    return _run_together([line], [version], folder)[0][0] == 0


def compare(runs: Sequence[Run], other: Version, folder: Path) -> list[Row]:
    """Run the list on both versions; say on stderr how far it is."""
    known = {strategy: knows(other, strategy, folder) for strategy in {r.strategy for r in runs}}
    rows: list[Row] = []
    job_hashes: dict[str, str | None] = {}
    for number, run in enumerate(runs, start=1):
        print(f"{number} of {len(runs)}: {run.name}", file=sys.stderr, flush=True)
        versions = [THIS, other] if known[run.strategy] else [THIS]
        outcomes = train(run, versions, folder)
        if run.counts:
            job_hashes.setdefault(run.job, outcomes[0].sha256)
        rows.append(
            Row(
                run.name,
                run.counts,
                outcomes[0],
                outcomes[1] if len(outcomes) == 2 else None,
                job_hashes[run.job] if run.counts else None,
            )
        )
    return rows


def chosen(patterns: Sequence[str]) -> list[Run]:
    """Return the runs whose name fits one of the patterns; all of them without patterns.

    A run of another synchronous strategy brings the first run of its job along: that is what its
    weights are compared with.
    """
    fitting = [
        run
        for run in RUNS
        if not patterns or any(fnmatch.fnmatchcase(run.name, pattern) for pattern in patterns)
    ]
    first = {job: next(run for run in RUNS if run.job == job) for job in JOBS}
    wanted = {first[run.job] for run in fitting if run.counts and run.strategy != "synchronous"}
    return [run for run in RUNS if run in fitting or run in wanted]


def table(rows: Sequence[Row], other: Version) -> Table:
    """Lay out the rows for people."""
    view = Table("run", "this", other.commit[:SHOWN_DIGITS], "equal", title="Weights, SHA-256")
    for row in rows:
        equal = "yes" if row.is_equal else ("NO" if row.counts else "no (does not count)")
        if row.is_equal and row.other is None:
            equal = "yes (unknown there)"
        view.add_row(row.name, _shown(row.this), _shown(row.other), equal)
        if row.job_sha256 not in (None, row.this.sha256):
            view.add_row("", "", "", f"first of this job: {row.job_sha256[:SHOWN_DIGITS]}")
    return view


def _shown(outcome: Outcome | None) -> str:
    if outcome is None:
        return ""
    return outcome.failure or str(outcome.sha256)[:SHOWN_DIGITS]


def read_job(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hashes", description=__doc__)
    add_against(parser)
    parser.add_argument(
        "--only", action="append", default=[], metavar="NAME", help="a run, or a pattern: mlp-*"
    )
    parser.add_argument("--json", action="store_true", help="print one object on stdout")
    job = parser.parse_args(arguments)
    if job.against is None:
        parser.error("--against: say which commit, for example --against HEAD~1")
    if not chosen(job.only):
        names = ", ".join(run.name for run in RUNS)
        parser.error(f"--only: no run is named {' or '.join(job.only)}. Choose from {names}")
    return job


def main() -> int:
    """Run, print, and return 1 if a synchronous run differs or failed."""
    job = read_job()
    end_cleanly()
    try:
        with version_of(job.against) as other, tempfile.TemporaryDirectory() as name:
            rows = compare(chosen(job.only), other, Path(name))
    except VersionError as error:
        print(f"benchmarks.hashes: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    if job.json:
        shown = [asdict(row) | {"is_equal": row.is_equal} for row in rows]
        print(json.dumps({"against": other.commit, "runs": shown}, indent=2))
    else:
        Console(width=None if sys.stdout.isatty() else 130).print(table(rows, other))
    return 0 if all(row.is_equal for row in rows if row.counts) else 1


if __name__ == "__main__":
    sys.exit(main())
