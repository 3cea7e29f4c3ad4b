"""Distributed SGD for PyTorch: the same bits on any number of workers, ahead of DDP.

Three lines turn an ordinary loop into a distributed one:

    syncline.init()
    syncline.distribute(model, optimizer)
    for x, y in syncline.shard(loader): ...

Names are loaded on first use, so that the command line starts without torch.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "clip_grad_norm_": "syncline.api",
    "clip_grad_value_": "syncline.api",
    "discard_gradients": "syncline.api",
    "distribute": "syncline.api",
    "init": "syncline.api",
    "load_optimizer_state": "syncline.api",
    "optimizer_state": "syncline.api",
    "rank": "syncline.api",
    "shard": "syncline.api",
    "shards": "syncline.api",
    "step_ended": "syncline.api",
    "world_size": "syncline.api",
    "SynclineError": "syncline.errors",
    "seed_for": "syncline.seeds",
    "Job": "syncline.config",
    "read_job": "syncline.config",
}

__all__ = sorted([*_HOMES, "__version__"])


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'syncline' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return __all__
