"""`syncline train` in tests: as a command, or its ranks alone."""

from __future__ import annotations

import os
from pathlib import Path

from command import Started
from ranks import run_ranks
from syncline.config import read_job
from syncline.report.progress import SilentProgress
from syncline.train import train

MLP_ON_DIGITS = """\
[model]
name = "mlp"

[data]
name = "digits"
batch = 64

[optimizer]
lr = 0.05

[strategy]
shards = 4
"""
"""A job that trains in milliseconds, without its table [run]: that is for the test to write."""


def train_forked(job_file, out, *sets, ranks=1, trace=None, resume=False):
    """Train as a user's job says, with settings laid over it; return rank 0's summary."""
    job = read_job(job_file, sets)

    def work():
        return train(job, out, resume, SilentProgress(), trace).to_json_dict()

    return run_ranks(ranks, work)[0]


def start_training(job_file, out, *sets, ranks=1, more=(), traced=False):
    """Start `syncline train` with settings laid over a job."""
    words = [word for one in sets for word in ("--set", one)]
    where = ("--ranks", str(ranks), "--out", str(out), "--json")
    return Started("train", str(job_file), *where, *words, *more, traced=traced)


def ranks_of(launcher):
    """Return the processes of a running `syncline train` by rank, as the kernel knows them."""
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    names = {int(pid): Path(f"/proc/{pid}/comm").read_text().strip() for pid in children}
    return {int(name.removeprefix("syncline:")): pid for pid, name in names.items()}


def are_gone(ranks):
    """Tell whether none of these processes is left, not even as a zombie."""
    return not any(os.path.exists(f"/proc/{pid}") for pid in ranks.values())
