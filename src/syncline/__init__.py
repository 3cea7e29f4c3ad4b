"""Distributed SGD for PyTorch: the same bits on any number of ranks, ahead of DDP.

Three lines turn an ordinary loop into a distributed one:

    syncline.init(threads=1)
    syncline.distribute(model, optimizer, shards=8)  # the same bits on 1 to 8 ranks
    for x, y in syncline.shard(loader): ...

Names are loaded on first use, so that the command line starts without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what type checkers and editors see: the same names as in _HOMES below
    from syncline.api import (
        barrier,
        clip_grad_norm_,
        clip_grad_value_,
        discard_gradients,
        distribute,
        init,
        load_optimizer_state,
        optimizer_state,
        rank,
        step_ended,
        sum_over_ranks,
        world_size,
    )
    from syncline.config import Job, read_job
    from syncline.errors import SynclineError
    from syncline.replica import Replica
    from syncline.seeds import seed_for
    from syncline.sharding import shard, shards

__version__ = "0.2.0"

_HOMES = {
    "barrier": "syncline.api",
    "clip_grad_norm_": "syncline.api",
    "clip_grad_value_": "syncline.api",
    "discard_gradients": "syncline.api",
    "distribute": "syncline.api",
    "init": "syncline.api",
    "load_optimizer_state": "syncline.api",
    "optimizer_state": "syncline.api",
    "rank": "syncline.api",
    "shard": "syncline.sharding",
    "shards": "syncline.sharding",
    "step_ended": "syncline.api",
    "sum_over_ranks": "syncline.api",
    "world_size": "syncline.api",
    "Replica": "syncline.replica",
    "SynclineError": "syncline.errors",
    "seed_for": "syncline.seeds",
    "Job": "syncline.config",
    "read_job": "syncline.config",
}

__all__ = [
    "Job",
    "Replica",
    "SynclineError",
    "__version__",
    "barrier",
    "clip_grad_norm_",
    "clip_grad_value_",
    "discard_gradients",
    "distribute",
    "init",
    "load_optimizer_state",
    "optimizer_state",
    "rank",
    "read_job",
    "seed_for",
    "shard",
    "shards",
    "step_ended",
    "sum_over_ranks",
    "world_size",
]

if not TYPE_CHECKING:  # a type checker would take it for any name at all

    def __getattr__(name: str) -> Any:
        home = _HOMES.get(name)
        if home is None:
            raise AttributeError(f"module 'syncline' has no attribute {name!r}")
        return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return __all__
