"""The checkpoints of a run, as one rank writes and reads them.

One holds the parameters that represent the run. With strategies where each rank trains its own
replica, a rank may also save its own parameters and state (`plan.keeps_own`).

A resumed run: rank 0 chooses the checkpoint, every rank reads the same file, and all compare what
they have read before anything starts. Folders may be copies, and listings of folders may be old.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import msgspec
from torch import nn

from syncline import checkpoint
from syncline.comm.base import Communicator, exchange_bytes
from syncline.config import Job
from syncline.contract import Saved
from syncline.engine.lane import Lane
from syncline.engine.replica import Replica
from syncline.errors import CheckpointError, ConfigError
from syncline.run_folder import CHECKPOINTS, Summary, finished, own_checkpoints

log = logging.getLogger("syncline")


class _Choice(msgspec.Struct):
    """What rank 0 tells the others: the checkpoint, and the result if the run is finished."""

    step: int
    digest: str
    summary: dict[str, Any] | None


class _Found(msgspec.Struct):
    """What a rank has read of rank 0's checkpoint, or why it cannot."""

    digest: str = ""
    why_not: str = ""


class RunCheckpoints:
    """Saves a rank's part of a run, and restores it."""

    def __init__(self, folder: Path, job: Job, model: nn.Module, rank: int) -> None:
        """`job` is resolved."""
        self._folder = folder
        self.job = job
        self._model = model
        self._rank = rank
        self._parameters = [name for name, _ in model.named_parameters()]

    # Resuming.

    def choose(self, *, may_defer: bool) -> checkpoint.Checkpoint | None:
        """Read the newest checkpoint that this rank sees; refuse one of another job.

        With `may_defer` return None instead: rank 0 is on another machine, and chooses.
        """
        try:
            return self._load_newest()
        except (ConfigError, CheckpointError):
            if not may_defer:
                raise
            return None

    def _load_newest(self) -> checkpoint.Checkpoint:
        path = checkpoint.newest(self._folder / CHECKPOINTS)
        if path is None:
            raise ConfigError(
                "--resume",
                f"there is no checkpoint in {self._folder}",
                "a run resumes from one",
                "Start without --resume.",
            )
        saved = self._load(path)
        checkpoint.check_owner(path, saved, None, saved.step)
        if saved.format != checkpoint.FORMAT and self._rank == 0:
            log.warning(
                "rank 0: %s: written by an older version (format %d), whose digest covers the "
                "numbers only, not the step and the settings.",
                path,
                saved.format,
            )
        return saved

    def agree(
        self, chosen: checkpoint.Checkpoint | None, total: int, comm: Communicator, lane: Lane
    ) -> tuple[checkpoint.Checkpoint, Summary | None]:
        """Load rank 0's choice on every rank; return it, and the result of a finished run.

        `chosen` is what `choose` returned. All ranks raise the same error if one of them reads
        something else, or if the run has taken more than `total` steps.
        """
        mine = b""
        if self._rank == 0:
            assert chosen is not None
            mine = msgspec.json.encode(self._choice(chosen, total))
        choice = msgspec.json.decode(_exchange(mine, comm, lane)[0], type=_Choice)
        found = _Found()
        saved = chosen if chosen is not None and chosen.step == choice.step else None
        if saved is None:
            try:
                saved = self._load(checkpoint.path_of(self._folder / CHECKPOINTS, choice.step))
            except CheckpointError as error:
                found.why_not = str(error)
        found.digest = "" if saved is None else saved.digest
        answers = _exchange(msgspec.json.encode(found), comm, lane)
        for rank, answer in answers.items():
            self._compare(rank, msgspec.json.decode(answer, type=_Found), choice)
        assert saved is not None
        if saved.step > total:
            raise self._common(_too_short(saved.step, total, self.job))
        self._model.load_state_dict(saved.model)
        result = choice.summary
        return saved, None if result is None else Summary.from_json_dict(result)

    def _choice(self, chosen: checkpoint.Checkpoint, total: int) -> _Choice:
        summary = finished(self._folder, total) if chosen.step == total else None
        if summary is not None and summary.weights_sha256 != checkpoint.digest_of(chosen.model):
            summary = None  # it is not of this run: write it again
        plain = None if summary is None else summary.to_json_dict()
        return _Choice(chosen.step, chosen.digest, plain)

    def _compare(self, rank: int, found: _Found, choice: _Choice) -> None:
        """Refuse to start if a rank has read something else than rank 0."""
        if found.digest == choice.digest:
            return
        path = checkpoint.path_of(self._folder / CHECKPOINTS, choice.step)
        what = found.why_not or f"it reads one with digest {found.digest[:16]}."
        raise self._common(
            CheckpointError(
                f"{path}: rank 0 resumes from step {choice.step} with digest {choice.digest[:16]}, "
                f"but rank {rank} does not: {what} Give every machine the same run folder."
            )
        )

    def _common(self, error: ConfigError | CheckpointError) -> ConfigError | CheckpointError:
        """Mark an error that every rank raises: rank 0 prints it."""
        error.is_orderly, error.is_said = True, self._rank != 0
        return error

    def _load(self, path: Path) -> checkpoint.Checkpoint:
        saved = checkpoint.load(path)
        # A job is saved as it was resolved, on the machines of then.
        was = saved.job if saved.job.strategy.shards is not None else saved.job.resolved()
        checkpoint.check_same_job(path, was, self.job)
        return saved

    def restore(self, replica: Replica, saved: checkpoint.Checkpoint) -> None:
        """Set the replica to the step of `saved`, with the parameters and state it had then."""
        own = self._load_own(replica, saved) or saved
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

    def _load_own(
        self, replica: Replica, saved: checkpoint.Checkpoint
    ) -> checkpoint.Checkpoint | None:
        """Read this rank's own checkpoint of a step; None if there is none."""
        if not replica.plan.keeps_own:
            return None
        path = checkpoint.path_of(own_checkpoints(self._folder, self._rank), saved.step)
        if not path.exists():
            return None
        own = self._load(path)
        checkpoint.check_owner(path, own, self._rank, saved.step)
        return own

    # Saving.

    def save(self, replica: Replica, step: int, *, is_wanted: bool) -> None:
        """Write a checkpoint of what the model holds now. Every rank calls it.

        The optimizer state is collected from all ranks; the rank with `is_wanted` writes the file.
        """
        saved = self._collect(replica, step, is_wanted=is_wanted)
        if saved is None:
            return
        folder = self._folder / CHECKPOINTS
        # The last checkpoint with finite numbers stays, however many follow it.
        is_good = checkpoint.is_good(saved, self._parameters)
        good = None if is_good else checkpoint.newest_good(folder, self._parameters)
        checkpoint.save(folder, saved, spared=[] if good is None else [good])

    def save_own(self, replica: Replica, step: int) -> None:
        """Write this rank's own checkpoint."""
        saved = self._collect(replica, step, is_wanted=True, rank=self._rank)
        assert saved is not None
        folder = own_checkpoints(self._folder, self._rank)
        # A rank keeps its own part of every checkpoint of the run that is kept.
        spared = [folder / path.name for path in checkpoint.files_in(self._folder / CHECKPOINTS)]
        checkpoint.save(folder, saved, spared)

    def _collect(
        self, replica: Replica, step: int, *, is_wanted: bool, rank: int | None = None
    ) -> checkpoint.Checkpoint | None:
        optimizer_state = replica.optimizer_state(is_wanted=is_wanted)
        if not is_wanted:
            return None
        model, strategy = self._model.state_dict(), replica.run.state()
        return checkpoint.Checkpoint(step, self.job, model, optimizer_state, strategy, rank)

    def describe_last_good(self) -> str:
        """Return a sentence that names the last checkpoint that a run can go on from."""
        path = checkpoint.newest_good(self._folder / CHECKPOINTS, self._parameters)
        if path is None:
            return "No checkpoint was saved before."
        return f"The last good checkpoint is {path}."


def _exchange(mine: bytes, comm: Communicator, lane: Lane) -> dict[int, bytes]:
    """Return every rank's message, by rank. Every rank calls it."""
    with comm.traffic.apart():
        messages = lane.call(exchange_bytes, comm, mine)
    return dict(sorted(zip(comm.ranks, messages, strict=True)))


def _too_short(step: int, total: int, job: Job) -> ConfigError:
    is_in_steps = job.run.steps is not None
    got = f"{total}" if is_in_steps else f"{job.run.epochs} ({total} steps)"
    return ConfigError(
        "run.steps" if is_in_steps else "run.epochs",
        f"got {got} to go on with a run that has taken {step} steps",
        "steps are not taken back",
        f"Use {step} steps or more, or start a new run in another folder.",
    )
