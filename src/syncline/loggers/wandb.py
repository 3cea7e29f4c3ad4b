"""Weights & Biases, online or offline as its own settings say (WANDB_MODE, `wandb login`)."""

from __future__ import annotations

from collections.abc import Sequence

import wandb

from syncline.loggers.base import Line, Opening


class WandB:
    """A run of W&B. `step` is the horizontal axis: W&B's own counter takes no step twice."""

    def __init__(self, opening: Opening) -> None:
        entity, _, project = opening.where.rpartition("/")
        self._run = wandb.init(
            entity=entity or None,
            project=project or None,
            dir=opening.folder,
            name=opening.title,
            config=dict(opening.config),
            id=opening.identity,
            resume="allow" if opening.identity else None,
            settings=wandb.Settings(console="off", silent=True),
        )
        self._run.define_metric("*", step_metric="step")
        self.identity: str | None = self._run.id

    def write(self, lines: Sequence[Line]) -> None:
        for step, values in lines:
            self._run.log({**values, "step": step})

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))
