"""What a trace says of the run, besides its tasks: the same for both clocks."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence

import torch

from syncline.comm.base import Communicator
from syncline.contract import Strategy
from syncline.engine.bucket import Bucket
from syncline.perf.trace import BucketFacts, Header


def header_of(
    strategy: Strategy, comm: Communicator, buckets: Sequence[Bucket], shards: int
) -> Header:
    """Return what is known of a run's layout; `comm` has all ranks."""
    try:
        version = importlib.metadata.version("syncline")
    except importlib.metadata.PackageNotFoundError:
        version = "not installed"
    facts = [
        BucketFacts(bucket.size_bytes, tuple(slot.name for slot in bucket.slots))
        for bucket in buckets
    ]
    return Header(
        syncline=version,
        torch=str(torch.__version__),
        strategy=type(strategy).__name__.lower(),
        machines=tuple(tuple(machine) for machine in comm.machines),
        shards=shards,
        buckets=tuple(facts),
    )
