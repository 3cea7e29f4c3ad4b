"""The checkpoints of a run as one rank sees them: those of the whole, and its own.

With strategies whose ranks differ each rank also saves what is its own.
"""

from __future__ import annotations

from pathlib import Path

from torch import nn

from syncline import checkpoint
from syncline.config import Job
from syncline.engine.replica import Replica
from syncline.errors import ConfigError
from syncline.run_folder import CHECKPOINTS, own_checkpoints


class RunCheckpoints:
    """Saves a run into its folder, and takes it up again."""

    def __init__(self, folder: Path, job: Job, model: nn.Module, rank: int) -> None:
        """`job` is resolved."""
        self._folder = folder
        self._job = job
        self._model = model
        self._rank = rank

    def load(self) -> checkpoint.Checkpoint:
        """Load the newest checkpoint, its model into ours; refuse one of another job."""
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
        """Put the replica where it was when `saved` was written."""
        own = self._load_own(replica, saved.step) or saved
        if own is not saved:
            replica.load_own(own.model)
        replica.load_optimizer_state(own.optimizer)
        # A rank that is new begins with the whole, and with nothing that was another's own.
        is_new = replica.strategy.keeps_own and own is saved
        state = {} if is_new else own.strategy
        replica.strategy.load_state(state, saved.model)
        replica.step_number = saved.step

    def _load_own(self, replica: Replica, step: int) -> checkpoint.Checkpoint | None:
        """Load what was this rank's own at a step, where ranks differ and there is such a file."""
        path = checkpoint.path_of(own_checkpoints(self._folder, self._rank), step)
        if not replica.strategy.keeps_own or not path.exists():
            return None
        return checkpoint.load(path)

    def save(self, replica: Replica, step: int, *, is_wanted: bool) -> None:
        """Write a checkpoint of what the model holds now. Every rank calls it."""
        self._save(replica, step, self._folder / CHECKPOINTS, is_wanted=is_wanted)

    def save_own(self, replica: Replica, step: int) -> None:
        """Write what is this rank's own."""
        folder = own_checkpoints(self._folder, self._rank)
        self._save(replica, step, folder, is_wanted=True)

    def _save(self, replica: Replica, step: int, folder: Path, *, is_wanted: bool) -> None:
        optimizer_state = replica.optimizer_state(is_wanted=is_wanted)
        if is_wanted:
            model, strategy = self._model.state_dict(), replica.strategy.state()
            saved = checkpoint.Checkpoint(step, self._job, model, optimizer_state, strategy)
            checkpoint.save(folder, saved)
