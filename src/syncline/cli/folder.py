"""Which run folder a command is about, whether it may be used, and the job written into it."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import msgspec

from syncline.config import Job, job_to_toml, printable, read_job, what_changed
from syncline.errors import ConfigError
from syncline.files import write_atomically
from syncline.run_folder import JOB, has_checkpoint, holds_a_run


def choose_folder(job_file: Path, job: Job, out: Path | None, unique: str | None) -> Path:
    """Find the run folder: `--out`, then run.out, then a fresh one below runs/, which is created.

    `unique` replaces the time in the fresh name where several ranks must agree on it: then it is
    the name that is fresh, and rank 0 creates the folder.
    """
    if out is not None:
        return out
    if job.run.out is not None:
        return Path(job.run.out)
    runs = Path("runs")
    if unique is not None:
        return runs / f"{job_file.stem}-{unique}"
    stem = f"{job_file.stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    for number in itertools.count(1):
        folder = runs / (stem if number == 1 else f"{stem}-{number}")
        try:
            # Creating claims it: another run may be looking for a name in this very second.
            folder.mkdir(parents=True)
        except FileExistsError:
            if runs.is_dir():
                continue
            raise _not_writable(runs, "file exists") from None
        except OSError as error:
            raise _not_writable(folder, _reason(error)) from None
        return folder
    raise AssertionError("there is always another number")


def require_named_folder(job: Job, out: Path | None) -> Path:
    """Return the folder to resume from: it must have been named."""
    if out is None and job.run.out is None:
        raise ConfigError(
            "--resume",
            "no run folder is named",
            "a run goes on where its checkpoints are",
            "Add --out DIR.",
        )
    return out or Path(job.run.out or "")


def check_folder(folder: Path, resume: bool) -> None:
    """Refuse a folder that holds another run, or nothing to resume from."""
    shown = printable(folder)
    if folder.exists() and not folder.is_dir():
        raise ConfigError("--out", f"{shown} is a file", "a run needs a folder", "Name another.")
    if resume:
        if not has_checkpoint(folder):
            raise ConfigError(
                "--resume",
                f"{shown} holds no checkpoint",
                "a run goes on from its last one",
                "Look at the path, or start the run again without --resume in a new folder.",
            )
    elif holds_a_run(folder):
        raise ConfigError(
            "--out",
            f"{shown} already holds a run",
            "runs are not overwritten",
            "Add --resume to go on with it, or name another folder.",
        )


def go_on_with(job: Job, folder: Path) -> Job:
    """Check that `job` is the one the folder was started with; take its automatic shards.

    The number of ranks may change from one start to the next, the number of shards may not, unless
    ranks take steps on their own: left to itself it stays what it was.
    """
    before = read_job(folder / JOB)
    if job.strategy.shards is None and not job.strategy.parts:
        same = msgspec.structs.replace(job.strategy, shards=before.strategy.shards)
        job = msgspec.structs.replace(job, strategy=same)
    for key, old, new in what_changed(before, job):
        raise ConfigError(
            key,
            f"got {printable(new)} to go on with a run that had {printable(old)}",
            "this would no longer be the same run",
            "Set it back, or start a new run in another folder.",
        )
    return job


def write_job(job: Job, folder: Path) -> None:
    """Create the folder and put the job there: whole or not at all."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / JOB, job_to_toml(job).encode())
    except OSError as error:
        raise _not_writable(folder, _reason(error)) from None


def _not_writable(folder: Path, reason: str) -> ConfigError:
    return ConfigError(
        "--out",
        f"{printable(folder)} cannot be written ({reason})",
        "the run writes its results there",
        "Name another folder.",
    )


def _reason(error: OSError) -> str:
    return (error.strerror or type(error).__name__).lower()
