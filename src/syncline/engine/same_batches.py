"""Warns if every rank trains on the same samples, as a loop over the plain loader does."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence

import torch

from syncline.comm.base import Communicator, exchange_bytes
from syncline.engine.bucket import Slot
from syncline.engine.digests import tensor_digest
from syncline.engine.parameters import raw_grad

log = logging.getLogger("syncline")

_UNKNOWN = b"?"


def warn_of_same_batches(slots: Sequence[Slot], comm: Communicator, *, is_told: bool) -> None:
    """Log a warning if all ranks have the same gradients in `.grad`, after their first backward.

    Every rank calls it, on the comm lane. `is_told` says that a loader of ours gave the batch.
    """
    if comm.size == 1:
        return
    found = exchange_bytes(comm, _UNKNOWN if is_told else _digest(slots))
    if len(set(found)) == 1 and found[0] != _UNKNOWN and comm.position == 0:
        log.warning(
            "all %d ranks have the same gradients after their first batch: they seem to train on "
            "the same samples. Loop over syncline.shard(loader), or give each rank its own part by "
            "syncline.rank().",
            comm.size,
        )


def _digest(slots: Sequence[Slot]) -> bytes:
    with torch.no_grad():
        gradients = [
            gradient for slot in slots if (gradient := raw_grad(slot.parameter)) is not None
        ]
        if not any(bool(gradient.any()) for gradient in gradients):
            return _UNKNOWN  # zeros are equal whatever the samples
        text = "".join(map(tensor_digest, gradients))
    return hashlib.sha256(text.encode()).digest()
