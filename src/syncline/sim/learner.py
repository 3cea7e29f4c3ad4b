"""What a virtual rank needs of the arithmetic, in a run that learns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from syncline.comm.base import Communicator, Partials
from syncline.contract import ParamGroups, WholeValues
from syncline.engine.bucket import Bucket, StripOptimizer
from syncline.sim.course import Source

if TYPE_CHECKING:
    from syncline.sim.rank import VirtualRank


class Learner(Protocol):
    """Does one rank's arithmetic: the same as a real rank's, on the same data."""

    @property
    def statistics(self) -> Partials | None:
        """Running statistics of norm layers, to be averaged over shards."""

    def lay_out(self, rank: VirtualRank) -> None:
        """Write the initial parameters into the buckets."""

    def optimizer_of(
        self, bucket: Bucket, parameters: torch.Tensor, gradient: torch.Tensor, low: int, high: int
    ) -> StripOptimizer:
        """Return the optimizer of a strip."""

    def compute(self, rank: VirtualRank, shard: int, source: Source) -> None:
        """Run forward and backward of one shard, on these samples; leave gradients in buckets."""

    def flat_buffers(self) -> torch.Tensor:
        """Return a copy of all buffers, flat."""

    def settings(self, step: int) -> ParamGroups:
        """Return the optimizer's settings in a step of the run."""

    def flags(self, step: int, sources: Sequence[Source]) -> list[float]:
        """Return this rank's flags of a step of the run: see `engine/flags.py`.

        `sources` are the samples that this rank has computed on in it.
        """

    def clip(self, rank: VirtualRank) -> None:
        """Clip the gradient, on the comm lane."""

    def end_step(self, comm: Communicator, others_changed: bool) -> Iterator[None]:
        """Set the averaged statistics and shard 0's other buffers."""

    def load_counts(self, told: Sequence[float]) -> None:
        """Set norm layers' counts of batches, on a rank that only serves."""

    def evaluate(self, rank: VirtualRank, done: int, whole: WholeValues | None) -> None:
        """Evaluate `whole` after `done` steps, or this rank's parameters; it keeps its own."""
