"""Lets a run choose settings of its strategy from times that it measures at its start."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec
import numpy as np
import torch
from torch import nn

from syncline.comm.base import Communicator
from syncline.config import Job
from syncline.engine.lane import Lane
from syncline.input import Input
from syncline.losses import Loss
from syncline.recipe import batch_of
from syncline.report.progress import Progress
from syncline.session import Session
from syncline.strategies.settings import OwnSettings


class Chosen(Protocol):
    """What was chosen, and the reasons, in lines."""

    @property
    def settings(self) -> OwnSettings: ...

    @property
    def table(self) -> Sequence[str]: ...


class Choose(Protocol):
    """Returns the same choice on every rank.

    Every rank calls it, with the samples of a shard and a function for the loss of their outputs.
    """

    def __call__(
        self,
        job: Job,
        model: nn.Module,
        batch: torch.Tensor,
        loss: Callable[[torch.Tensor], torch.Tensor],
        comm: Communicator,
        lane: Lane,
    ) -> Chosen: ...


def with_chosen_settings(
    job: Job,
    choose: Choose,
    model: nn.Module,
    loss: Loss,
    batches: Input,
    session: Session,
    progress: Progress,
) -> Job:
    """Return the job with the settings that were chosen, and note the reasons."""
    samples = batches.order.batch // batches.order.shards
    images, labels = batch_of(batches.data.train, np.arange(samples))
    chosen = choose(
        *(job, model, images, lambda output: loss(output, labels), session.comm, session.lane)
    )
    for line in chosen.table:
        progress.note(line)
    strategy = msgspec.structs.replace(job.strategy, settings=chosen.settings)
    return msgspec.structs.replace(job, strategy=strategy)
