"""The run folder of `syncline train`: which one it is, whether it may be used, its job.toml."""

from __future__ import annotations

import contextlib
import errno
import itertools
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from syncline.config import Job, job_to_toml, printable, read_job, what_changed
from syncline.errors import ConfigError
from syncline.files import make_folder, write_atomically
from syncline.resources import reason, way_out
from syncline.run_folder import JOB, has_checkpoint, holds_a_run, remove_leftovers
from syncline.run_lock import locked


def choose_folder(job_file: Path, job: Job, out: Path | None, unique: str | None) -> Path:
    """Return the run folder: `--out`, or run.out, or a new one below runs/, which is created.

    The name of a new folder ends in the time. Where several ranks must agree on the name it ends in
    `unique` instead, and rank 0 creates the folder later.
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
            # Creating it reserves the name: another run may start in the same second.
            folder.mkdir(parents=True)
        except FileExistsError:
            if runs.is_dir():
                continue
            raise _not_writable(runs, FileExistsError(errno.EEXIST, "File exists")) from None
        except OSError as error:
            raise _not_writable(folder, error) from None
        return folder
    raise AssertionError("there is always another number")


def require_named_folder(job: Job, out: Path | None) -> Path:
    """Return the folder to resume from; refuse a job and a command that do not name one."""
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


def resumed_job(job: Job, folder: Path, ranks: int) -> Job:
    """Return `job` with the shards of the folder's job; refuse one that is not the same run.

    A run may be resumed on another number of ranks. With the synchronous strategy its shards stay
    what they were, so automatic shards are taken from the folder's job. So are settings that a run
    on as many ranks has chosen.
    """
    before = read_job(folder / JOB)
    if job.strategy.shards is None and job.strategy.own.is_synchronous:
        same = msgspec.structs.replace(job.strategy, shards=before.strategy.shards)
        job = msgspec.structs.replace(job, strategy=same)
    had_chosen, chosen = before.strategy.settings, job.strategy.settings
    is_known = type(had_chosen) is type(chosen) and before.run.ranks == ranks
    if job.strategy.own.must_choose and is_known:
        same = msgspec.structs.replace(job.strategy, settings=had_chosen)
        job = msgspec.structs.replace(job, strategy=same)
    for key, old, new in what_changed(before, job):
        got, had = ("none" if value is None else printable(value) for value in (new, old))
        rule, more = "this would no longer be the same run", ""
        if key in ("run.steps", "run.epochs"):
            rule = "the learning rates of the cosine schedule depend on it"
            more = "; with schedule constant, step or milestones a run can be made longer later"
        found = f"got {got} to go on with a run that had {had}"
        fix = f"Set it back, or start a new run in another folder{more}."
        raise ConfigError(key, found, rule, fix)
    return job


@contextlib.contextmanager
def taken(folder: Path, job: Job, *, resume: bool) -> Iterator[None]:
    """Take a run folder for the block: create and lock it, clean it up and write job.toml.

    Refuse a folder that cannot be used, or that another run uses now.
    """
    check_folder(folder, resume)
    with contextlib.ExitStack() as stack:
        try:
            make_folder(folder)
            stack.enter_context(locked(folder, "--resume" if resume else "--out"))
            check_folder(folder, resume)  # again: a run may just have ended
            remove_leftovers(folder)
            write_atomically(folder / JOB, job_to_toml(job).encode())
        except OSError as error:
            raise _not_writable(folder, error) from None
        yield


def _not_writable(folder: Path, error: OSError) -> ConfigError:
    fix = way_out(error)
    return ConfigError(
        "--out",
        f"{printable(folder)} cannot be written ({reason(error)})",
        "the run writes its results there",
        f"{fix}, or name another folder." if fix else "Name another folder.",
    )
