"""Evaluation on the test samples, cut into fixed parts.

A part gives the same bits on every rank, so the result does not depend on the number of ranks.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import nn

from syncline.comm.base import Communicator, Partials, small_sum
from syncline.comm.tree import shard_range
from syncline.data import Split
from syncline.engine.lane import Lane
from syncline.losses import Loss, Score
from syncline.recipe import batch_of
from syncline.samples import seed_generators
from syncline.seeds import seed_for

# Samples of a part. The loss of a part is one sum, so another number changes the last bits of the
# test loss. 256 is enough to keep kernels busy, and activations need little memory.
EVALUATION_BATCH = 256


def evaluate(
    model: nn.Module, split: Split, loss: Loss, numbers: range | None
) -> np.ndarray[Any, Any]:
    """Return the score of each part, as rows of a table.

    `numbers` are the parts to compute, None for all; the rows of the others hold zero.
    """
    num_samples = len(split)
    parts = range(0, num_samples, EVALUATION_BATCH)
    results = np.zeros((len(parts), len(Score._fields)))
    model.eval()
    with torch.no_grad():
        for number in range(len(parts)) if numbers is None else numbers:
            rows = np.arange(parts[number], min(parts[number] + EVALUATION_BATCH, num_samples))
            # A model or data that draw random numbers draw the same on whichever rank this is.
            seed_generators(seed_for(0, "evaluation", number))
            images, labels = batch_of(split, rows)
            results[number] = loss.score(model(images), labels)
    model.train()
    return results


class SharedEvaluation:
    """Evaluation shared by all ranks of a communicator: each computes some of the parts."""

    def __init__(self, comm: Communicator, lane: Lane) -> None:
        self._comm = comm
        self._lane = lane
        self._table: Partials | None = None

    def evaluate(self, model: nn.Module, split: Split, loss: Loss) -> tuple[float, float | None]:
        """Return mean loss and accuracy, the same on every rank. Every rank calls it.

        Accuracy is None where it has no meaning: without integer targets that name classes.
        """
        num_parts = -(-len(split) // EVALUATION_BATCH)
        mine = range(*shard_range(num_parts, self._comm.size, self._comm.position))
        results = self._sum(torch.from_numpy(evaluate(model, split, loss, mine)))
        return _means_of(results)

    def _sum(self, numbers: torch.Tensor) -> torch.Tensor:
        """Sum a table over ranks. Exact: in each row all ranks but one have zero."""
        if self._table is None:
            self._table = small_sum(self._comm, numbers.numel(), numbers.dtype)
        partials = self._table
        partials.sums[0].mine.copy_(numbers.reshape(-1))
        self._lane.submit(self._comm.all_reduce, partials)
        self._lane.drain()
        return partials.result.view(numbers.shape).clone()


def evaluate_alone(model: nn.Module, split: Split, loss: Loss) -> tuple[float, float | None]:
    """Return mean loss and accuracy over all parts, computed by this rank alone."""
    return _means_of(torch.from_numpy(evaluate(model, split, loss, None)))


def _means_of(results: torch.Tensor) -> tuple[float, float | None]:
    total = Score(*results.sum(dim=0).tolist())
    loss = total.loss / total.weight if total.weight else math.nan
    return loss, total.correct / total.counted if total.counted else None
