"""What `distribute` returns, as a script sees it: the methods and facts that are public.

The class behind it is `engine/replica.py`. Its other attributes belong to the engine and change
without notice; editors and type checkers show these.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer


class Replica(Protocol):
    """A model and its optimizer, spread over ranks."""

    model: nn.Module
    optimizer: Optimizer
    shards: int
    """How many shards a step has, over all ranks."""
    my_shards: range
    """The shards that this rank computes."""
    waited_s: float
    """Time that this rank has waited for communication."""

    @property
    def step_number(self) -> int:
        """How many steps this rank has taken."""
        ...

    @property
    def losses(self) -> list[float]:
        """The losses told in the last step, by shard; NaN for a shard without. Waits for them."""
        ...

    def begin_shard(self, shard: int) -> None:
        """Say which shard the next forward and backward belong to. `shards()` does it for you."""

    def tell_loss(self, loss: float) -> None:
        """Send this shard's loss to all ranks with the step: `losses` then has those of all."""

    def synchronize(self) -> None:
        """Wait until every parameter and buffer is up to date."""

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale the step's gradients so that their global norm is at most `max_norm`."""
        ...

    def discard_gradients(self) -> None:
        """Drop this step's gradients. Call it on every rank, or on none."""

    def optimizer_state(self, *, is_wanted: bool = True) -> dict[str, dict[str, Any]]:
        """Return the whole optimizer state by parameter name. Every rank calls it.

        A rank that does not need it passes `is_wanted=False`; it only takes part.
        """
        ...

    def load_optimizer_state(self, state: dict[str, dict[str, Any]]) -> None:
        """Load the whole optimizer state, by parameter name."""

    def whole(self, *, is_wanted: bool = True) -> AbstractContextManager[None]:
        """Put the parameters that represent the run into the model for the block.

        Every rank enters it. A rank that does not need them passes `is_wanted=False`; it only takes
        part, and its model stays as it is.
        """
        ...

    def describe(self) -> list[str]:
        """Return lines that say what was chosen."""
        ...

    def detach(self) -> None:
        """Undo `distribute`; the model keeps its parameters, in its own memory."""
