"""What a strategy is: what happens to one bucket between two moments, and nothing else.

A bucket's gradient has just become ready (backward); its parameters are about to be read (next
forward). A strategy says what happens in between, in blocking, straight-line code. When that
code runs, over which wires and on which clock is somebody else's business.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from syncline.bucket import Bucket, Step
from syncline.comm.base import Communicator

if TYPE_CHECKING:
    pass


class Spreadable(Protocol):
    """What a strategy may ask of a replica, in real or in virtual time."""

    buckets: list[Bucket]

    def lay_out(self, comm: Communicator) -> None:
        """Put parameters and gradients into a communicator's memory, one strip per position."""


class Strategy(Protocol):
    """One way to spread SGD over ranks. All hooks run on the comm lane, in one fixed order."""

    def check(self, world_size: int, shards: int) -> None:
        """Refuse what cannot work, before anything starts."""

    def start(self, replica: Spreadable, comm: Communicator) -> None:
        """Lay out the replica and allocate state. Every rank calls it."""

    def gradient_ready(self, bucket: Bucket) -> None:
        """Backward has finished this bucket on this rank. Last layers come first."""

    def step_entered(self, step: Step) -> None:
        """This rank has entered `optimizer.step()`; every gradient is ready."""

    def before_use(self, bucket: Bucket) -> None:
        """The bucket's parameters will be read next. First layers come first."""

    def state(self) -> dict[str, torch.Tensor]:
        """Return what a checkpoint must hold besides parameters and optimizer state."""

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        """Take over what `state` returned, perhaps on another number of ranks."""
