"""The checkpoints of a run, as one rank writes and reads them.

One holds the parameters that represent the run. With strategies where each rank trains its own
replica, a rank may also save its own parameters and state (`plan.keeps_own`).
"""

from __future__ import annotations

import logging
from pathlib import Path

from torch import nn

from syncline import checkpoint
from syncline.config import Job
from syncline.contract import Saved
from syncline.engine.replica import Replica
from syncline.errors import ConfigError
from syncline.run_folder import CHECKPOINTS, own_checkpoints

log = logging.getLogger("syncline")


class RunCheckpoints:
    """Saves a rank's part of a run, and restores it."""

    def __init__(self, folder: Path, job: Job, model: nn.Module, rank: int) -> None:
        """`job` is resolved."""
        self._folder = folder
        self._job = job
        self._model = model
        self._rank = rank

    def load(self) -> checkpoint.Checkpoint:
        """Read the newest checkpoint and load its model; refuse one of another job."""
        path = checkpoint.newest(self._folder / CHECKPOINTS)
        if path is None:
            raise ConfigError(
                "--resume",
                f"there is no checkpoint in {self._folder}",
                "a run resumes from one",
                "Start without --resume.",
            )
        saved = checkpoint.load(path)
        checkpoint.check_same_job(path, saved.job.resolved(), self._job)
        self._model.load_state_dict(saved.model)
        return saved

    def restore(self, replica: Replica, saved: checkpoint.Checkpoint) -> None:
        """Set the replica to the step of `saved`, with the parameters and state it had then."""
        own = self._load_own(replica, saved.step) or saved
        if own is not saved:
            replica.load_own(own.model)
        replica.load_optimizer_state(own.optimizer)
        # A rank without a checkpoint of its own is new in this run. It starts from the parameters
        # that represent the run, without the strategy's state, which belongs to another rank.
        is_new = replica.plan.keeps_own and own is saved
        if is_new and self._rank < saved.job.run.ranks:
            log.warning(
                "rank %d has no checkpoint of its own at step %d: it was lost before, or an older "
                "version wrote none. It begins with the parameters that represent the run.",
                self._rank,
                saved.step,
            )
        replica.saved = Saved({} if is_new else own.strategy, saved.model)
        replica.step_number = saved.step

    def _load_own(self, replica: Replica, step: int) -> checkpoint.Checkpoint | None:
        """Read this rank's own checkpoint of a step; None if there is none."""
        path = checkpoint.path_of(own_checkpoints(self._folder, self._rank), step)
        if not replica.plan.keeps_own or not path.exists():
            return None
        return checkpoint.load(path)

    def save(self, replica: Replica, step: int, *, is_wanted: bool) -> None:
        """Write a checkpoint of what the model holds now. Every rank calls it.

        The optimizer state is collected from all ranks; the rank with `is_wanted` writes the file.
        """
        self._save(replica, step, self._folder / CHECKPOINTS, is_wanted=is_wanted)

    def save_own(self, replica: Replica, step: int) -> None:
        """Write this rank's own checkpoint."""
        folder = own_checkpoints(self._folder, self._rank)
        self._save(replica, step, folder, is_wanted=True)

    def _save(self, replica: Replica, step: int, folder: Path, *, is_wanted: bool) -> None:
        optimizer_state = replica.optimizer_state(is_wanted=is_wanted)
        if is_wanted:
            model, strategy = self._model.state_dict(), replica.run.state()
            saved = checkpoint.Checkpoint(step, self._job, model, optimizer_state, strategy)
            checkpoint.save(folder, saved)
