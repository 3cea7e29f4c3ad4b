"""One rank of `syncline train`.

Our launcher forks ranks that call `work`; under torchrun `syncline train` calls it itself. A rank
that fails prints one line with its number and ends at once, without waiting for threads that are
stuck in C++.
"""

from __future__ import annotations

import gc
import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from syncline.cli.output import is_debug, report, say
from syncline.config import Job
from syncline.errors import RankFailed, RunStopped, SynclineError
from syncline.launch.env import read_world, thread_environment
from syncline.launch.local import STOPPED
from syncline.launch.signals import end_promptly, leave
from syncline.report.progress import SilentProgress, progress_for
from syncline.resources import explain

if TYPE_CHECKING:
    from syncline.run_folder import Summary


def load(threads: int) -> None:
    """Load what every rank needs, once, in the process that ranks are forked from."""
    # OpenMP and MKL read this when they are loaded. They must start no thread before the fork.
    os.environ |= thread_environment(threads)
    import syncline.train  # noqa: F401

    # A garbage collection in a rank would write to every loaded object, and so copy its page.
    gc.collect()
    gc.freeze()


def try_own(job: Job) -> None:
    """Try the job's own functions, in a process that is thrown away. Returns if they work."""
    end_promptly()
    try:
        from syncline.own_functions_trial import try_job

        try_job(job)
    except SynclineError as error:
        leave(report(error))


def verify_rank(job: Job, folder: Path) -> None:
    """Train as a rank that `syncline verify` started; it ends after the steps that are wanted."""
    end_promptly()
    try:
        from syncline.session import close_session
        from syncline.train import train
        from syncline.verify.recording import StepsVerified

        try:
            run = msgspec.structs.replace(job.run, log=())
            train(msgspec.structs.replace(job, run=run), folder, False, SilentProgress())
        except StepsVerified:
            close_session()
    except SynclineError as error:
        leave(report(error, who=f"rank {read_world().rank}: "))


def _choice(job: Job) -> dict[str, Any]:
    """Return the function that chooses the strategy's settings, if something is to choose."""
    if not job.strategy.own.must_choose:
        return {}
    from syncline.cli.choose import choose_groups  # it loads the simulator

    return {"choose": choose_groups}


def work(job: Job, folder: Path, *, resume: bool, trace: Path | None = None) -> Summary:
    """Train as the rank that the environment names. Returns only if training succeeded."""
    world = read_world()
    rank = world.rank
    progress = progress_for(rank, sys.stderr)
    try:
        end_promptly(progress.close)
        # Imported here: torch takes seconds to load, and a wrong key in the job is found before.
        from syncline.train import train

        summary = train(job, folder, resume, progress, trace, **_choice(job))
    except SynclineError as error:
        progress.close()
        is_logged = isinstance(error, RankFailed) and error.is_logged
        # All ranks of our launcher read the same input: only rank 0 reports that it is bad.
        is_said_by_rank_0 = error.exit_code == 2 and rank != 0 and world.launcher == "syncline"
        if not (error.is_said or is_logged or is_said_by_rank_0):
            report(error, who=f"rank {rank}: ")
        is_stopped = isinstance(error, RunStopped) and world.launcher == "syncline"
        leave(STOPPED if is_stopped else error.exit_code)
    except BaseException as error:
        progress.close()
        why = explain(error)
        say(f"rank {rank}: {why or f'{type(error).__name__}: {error}'}")
        if why is None or is_debug():
            traceback.print_exc()
        leave(1)
    progress.close()
    return summary
