"""One rank of `syncline train`: `python -m syncline.cli.worker RUN_FOLDER [options]`.

Started by the launcher; under torchrun `syncline train` calls `work` itself. A rank that fails
names itself in one line and leaves at once, without waiting for threads that are stuck in C++.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from syncline.cli.folder import JOB
from syncline.cli.output import report, say, show_tracebacks
from syncline.config import Job, read_job
from syncline.errors import RankFailed, SynclineError
from syncline.launch.env import read_world
from syncline.launch.signals import end_promptly, leave
from syncline.report.progress import progress_for

if TYPE_CHECKING:
    from syncline.train import Summary


def work(
    job: Job, folder: Path, *, resume: bool, trace: Path | None = None, quiet: bool = False
) -> Summary:
    """Train as the rank the environment says. Returns only if all went well."""
    world = read_world()
    rank = world.rank
    progress = progress_for(rank, sys.stderr, quiet)
    end_promptly(progress.close)
    try:
        # Here, not above: torch takes seconds, and the launching process does without.
        from syncline.train import train

        summary = train(job, folder, resume, progress, trace)
    except SynclineError as error:
        progress.close()
        is_said = isinstance(error, RankFailed) and error.is_logged
        # Bad input is bad on every rank that our launcher starts from one folder: say it once.
        is_said_by_rank_0 = error.exit_code == 2 and rank != 0 and world.launcher == "syncline"
        if is_said or is_said_by_rank_0:
            leave(error.exit_code)
        leave(report(error, who=f"rank {rank}: "))
    except BaseException as error:
        progress.close()
        say(f"rank {rank}: {type(error).__name__}: {error}")
        traceback.print_exc()
        leave(1)
    progress.close()
    return summary


def main() -> None:
    """Read the job from the run folder and train."""
    parser = argparse.ArgumentParser(prog="python -m syncline.cli.worker")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--trace", type=Path, help="write when each rank did what")
    parser.add_argument("--quiet", action="store_true", help="show no progress")
    parser.add_argument("--debug", action="store_true")
    given = parser.parse_args()
    show_tracebacks(given.debug)
    try:
        job = read_job(given.folder / JOB)
    except SynclineError as error:
        sys.exit(report(error))
    work(job, given.folder, resume=given.resume, trace=given.trace, quiet=given.quiet)


if __name__ == "__main__":
    main()
