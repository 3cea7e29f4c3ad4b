"""What a strategy is: what happens to one bucket between two moments, and nothing else.

A bucket's gradient has just become ready (backward); its parameters are about to be read (next
forward). A strategy says what happens in between, in blocking, straight-line code. When that
code runs, over which wires and on which clock is somebody else's business.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from syncline.comm.base import Communicator
from syncline.comm.tree import LeafPlan, Spread, plan_leaves, shard_range
from syncline.engine.bucket import Bucket, Slot, Step, Update
from syncline.engine.state import State, gather_optimizer_state
from syncline.errors import ConfigError


class Spreadable(Protocol):
    """What a strategy may ask of a replica, in real or in virtual time."""

    slots: list[Slot]
    buckets: list[Bucket]

    def cut(self, bucket: Bucket, comm: Communicator, num_owners: int) -> tuple[int, ...]:
        """Cut a bucket into strips that the optimizer can update one by one.

        Those of the first `num_owners` positions hold everything.
        """

    def flat_buffers(self) -> torch.Tensor:
        """Return a copy of all buffers that hold numbers, flat; empty in virtual time's sizes."""

    def update_of(
        self, bucket: Bucket, parameters: torch.Tensor, gradient: torch.Tensor, low: int, high: int
    ) -> Update:
        """Make the user's optimizer for elements `low` to `high` of memory laid out as a bucket."""


@dataclass(frozen=True)
class Share:
    """A rank's part in every step."""

    group: Communicator
    mine: range
    """The shards that it computes; none on a rank that only serves others."""
    summed: range
    """The shards whose gradients are added up with its own."""
    spread: Spread
    leaves: dict[int, LeafPlan]
    """Where the gradient of each of its shards goes, by the shard's place in `summed`."""


class Strategy:
    """One way to spread SGD over ranks. All hooks run on the comm lane, in one fixed order."""

    def check(self, world_size: int, shards: int) -> None:
        """Refuse what cannot work, before anything starts."""
        workers = self.num_workers(world_size)
        if shards < workers:
            raise ConfigError(
                "strategy.shards",
                f"got {shards} with {workers} ranks",
                "each rank needs a shard",
                f"Use at least {workers} shards, or at most {shards} ranks.",
            )

    def num_workers(self, world_size: int) -> int:
        """Return how many ranks compute: the first ones."""
        return world_size

    def group(self, comm: Communicator) -> Communicator:
        """Return the ranks that hold one set of parameters and add up their gradients."""
        return comm

    def share(self, comm: Communicator, shards: int) -> Share:
        """Work out this rank's part."""
        workers = self.num_workers(comm.size)
        order = sorted(comm.ranks).index(comm.ranks[comm.position])
        mine = range(*shard_range(shards, workers, order)) if order < workers else range(0)
        group = self.group(comm)
        summed = range(shards) if group is comm else mine or range(1)
        spread = Spread.even(len(summed), group.ranks)
        return Share(group, mine, summed, spread, plan_leaves(spread.nodes[group.position])[0])

    def state_group(self, comm: Communicator) -> Communicator:
        """Return the ranks that hold the optimizer's state together, each its strips."""
        return self.group(comm)

    def gather_state(self, replica: Spreadable, comm: Communicator, *, is_wanted: bool) -> State:
        """Return the optimizer's whole state. Every rank that is there calls it."""
        return gather_optimizer_state(replica.slots, replica.buckets, self.state_group(comm))

    def start(self, replica: Spreadable, comm: Communicator) -> None:
        """Allocate state; the buckets are laid out. Every rank calls it."""

    def admit(self) -> None:
        """Let other ranks come: all is in place, saved state too. Every rank calls it."""

    def gradient_ready(self, bucket: Bucket) -> None:
        """Backward has finished this bucket on this rank. Last layers come first."""

    def step_entered(self, step: Step) -> None:
        """This rank has entered `optimizer.step()`; every gradient is ready."""

    def before_use(self, bucket: Bucket) -> None:
        """The bucket's parameters will be read next. First layers come first."""

    def discard(self, bucket: Bucket) -> None:
        """There will be no step for the gradient that was ready: it is dropped on every rank."""

    is_taken = False
    """Whether it drives a model already: a strategy keeps state for one."""

    is_apart = False
    """Whether each rank has parameters of its own; then `collect` says which count."""

    def gather(self, *, is_wanted: bool) -> tuple[list[torch.Tensor], torch.Tensor] | None:
        """Return what stands for the run as a whole: buckets' values, and buffers.

        None where that is this rank's own model, or not wanted. Every rank that is there calls it.
        """
        return None

    def meet(self) -> None:
        """Wait for all ranks that are not gone, where ranks otherwise do not wait."""

    def missing(self) -> list[int]:
        """Return the ranks that were not there when the whole was put together last."""
        return []

    def stay(self) -> None:
        """Before this rank leaves: serve the others until they leave too, if they need it."""

    def serve_workers(self) -> None:
        """Serve the others until every rank that computes has left."""

    keeps_own = False
    """Whether a rank that goes on from a checkpoint wants what was its own, beside the whole."""

    def may_lose(self, world_size: int) -> range:
        """Return the ranks without whom the others go on."""
        return range(0)

    def describe(self) -> list[str]:
        """Say with which settings it runs, for people."""
        return []

    def report(self) -> dict[str, Any]:
        """Return what this rank has to tell about the run, as plain data."""
        return {}

    def state(self) -> dict[str, torch.Tensor]:
        """Return what a checkpoint must hold besides parameters and optimizer state."""
        return {}

    def load_state(self, state: dict[str, torch.Tensor], whole: dict[str, torch.Tensor]) -> None:
        """Take over what `state` returned, before the start; perhaps on other ranks than then.

        `whole` is the model that stood for the run as a whole, by parameter name.
        """
