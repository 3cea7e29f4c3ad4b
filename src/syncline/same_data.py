"""Checks that every rank loaded the same samples of a user's own data.

A function that draws from a generator of its own, or files that differ between machines, would
otherwise give ranks different samples in silence. Lengths and a few samples are compared.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch

from syncline.comm.base import Communicator, exchange_bytes
from syncline.data import DataSet, Split
from syncline.engine.lane import Lane
from syncline.errors import ConfigError
from syncline.recipe import batch_of
from syncline.samples import seed_generators
from syncline.seeds import seed_for

_SAMPLES = 8
"""Samples of a split that are compared: few, since reading one may take long."""


def check_same_data(name: str, digest: str, comm: Communicator, lane: Lane) -> None:
    """Raise ConfigError if ranks hold different data. Every rank calls it, with its digest."""
    with comm.traffic.apart():
        digests = lane.call(exchange_bytes, comm, digest.encode())
    for rank, theirs in zip(comm.ranks, digests, strict=True):
        if theirs != digests[0]:
            raise ConfigError(
                "data.name",
                f"{name} returned other samples on rank {rank} than on rank 0",
                "every rank must load the same data",
                "Seed random numbers in the function (torch, numpy and random are seeded before "
                "the call), and give all machines the same files.",
            )


def digest_of_data(dataset: DataSet) -> str:
    """Return a digest of the splits' lengths and of a few samples of each."""
    digest = hashlib.sha256()
    for split in (dataset.train, dataset.test):
        if split is not None:
            _add(digest, split)
    return digest.hexdigest()


def _add(digest: hashlib._Hash, split: Split) -> None:
    rows = sorted({*np.linspace(0, len(split) - 1, _SAMPLES).astype(np.int64).tolist()})
    digest.update(f"{len(split)};".encode())
    for row in rows:
        seed_generators(seed_for(0, "compare", row))
        for tensor in batch_of(split, np.array([row])):
            digest.update(f"{tensor.dtype} {tuple(tensor.shape)};".encode())
            flat = tensor.detach().contiguous().reshape(-1)
            digest.update(flat.view(torch.uint8).numpy().data)
