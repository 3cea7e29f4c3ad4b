"""The loggers by name, and how a target is written: NAME or NAME:WHERE.

Each name is that of the package it needs, and of the extra that installs it. Nothing is imported.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable

from syncline.errors import ConfigError

LOGGERS = {
    "tensorboard": "a folder; left out, the folder tensorboard in the run folder",
    "wandb": "PROJECT or ENTITY/PROJECT; left out, what W&B's own settings say",
    "mlflow": "a tracking URI; left out, what MLflow's own settings say",
}
"""What WHERE is."""


def parts_of(target: str) -> tuple[str, str]:
    """Return a target's name, and where it writes; empty if the target does not say.

    >>> parts_of("mlflow:sqlite:///runs.db")
    ('mlflow', 'sqlite:///runs.db')
    """
    name, _, where = target.partition(":")
    return name, where


def check_installed(targets: Iterable[str], key: str = "run.log") -> None:
    """Refuse a logger whose package is not installed."""
    for target in targets:
        name, _ = parts_of(target)
        if importlib.util.find_spec(name) is None:
            raise ConfigError(
                key,
                f'got "{name}"',
                f"the package {name} is not installed here",
                f"Install it: pip install 'syncline[{name}]'.",
            )
