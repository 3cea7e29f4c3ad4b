"""`syncline train` in forked ranks: without the seconds that loading torch takes each of them."""

from __future__ import annotations

from ranks import run_ranks
from syncline.config import read_job
from syncline.report.progress import SilentProgress
from syncline.train import train


def train_forked(job_file, out, *sets, ranks=1, trace=None, resume=False):
    """Train as a user's job says, with settings laid over it; return rank 0's summary."""
    job = read_job(job_file, sets)

    def work():
        return train(job, out, resume, SilentProgress(), trace).to_json_dict()

    return run_ranks(ranks, work)[0]
