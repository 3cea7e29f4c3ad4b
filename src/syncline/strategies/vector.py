"""The parameters that a rank mixes at once: those of one bucket, or of the whole model.

By default each bucket is mixed by itself, while others are still on their way. As Jin et al. 2016
(arXiv 1611.04581) published it, all parameters are one vector of one version, and the look-ahead of
Nesterov's momentum is not mixed. PyTorch's SGD holds y, the point at which the next gradient is
taken. With its velocity b (`momentum_buffer`), momentum m and learning rate lr the parameters are

    x = y + lr m b.

A rank mixes x, and y moves by the same distance. b is never mixed.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

import torch

from syncline.comm.base import Communicator, even_cuts
from syncline.contract import Model, ParamGroups, Plan, Saved, World
from syncline.engine.bucket import Bucket, view_of
from syncline.errors import ConfigError, UsageError
from syncline.sizes import InOne, Size
from syncline.strategies.replicas import plan_own_replicas, run_values
from syncline.strategies.rule_trial import is_sgd
from syncline.strategies.settings import PublishedSettings


def plan_vectors(
    world: World, sizes: Sequence[Size], shards: int, settings: PublishedSettings
) -> Plan:
    """Return a plan in which each rank holds its own parameters; as published, in one vector."""
    plan = plan_own_replicas(world, shards, settings)
    if not settings.as_published:
        return plan
    types = sorted({size.dtype for size in sizes})
    if len(types) > 1:
        raise ConfigError(
            f"{settings.table}.as_published",
            f"got true with parameters of {' and '.join(types)}",
            "one vector has one type",
            "Use one type, or as_published = false.",
        )
    family = dataclasses.replace(plan.families[0], buckets=InOne())
    return dataclasses.replace(plan, families=(family,), overlap=False)


def make_vectors(model: Model, comm: Communicator, settings: PublishedSettings) -> list[Vector]:
    """Return a vector for each bucket; as published, one of all buckets. Every rank calls it."""
    if not settings.as_published:
        return [Vector(comm, [bucket], is_whole=False) for bucket in model.buckets]
    if not is_sgd(model):
        raise UsageError(
            f"{settings.table}.as_published mixes the parameters of torch.optim.SGD, and knows "
            "no other optimizer's look-ahead. Use SGD, or as_published=False."
        )
    return [Vector(comm, model.buckets, is_whole=True)]


class Vector:
    """Some buckets' parameters, in one piece of memory."""

    def __init__(self, comm: Communicator, buckets: Sequence[Bucket], *, is_whole: bool) -> None:
        """Every rank calls it, if `is_whole`."""
        self.buckets = tuple(buckets)
        self.last = self.buckets[-1]
        """The bucket that is updated last."""
        self.dtype = self.last.dtype
        self._ends = tuple(
            itertools.accumulate((bucket.num_elements for bucket in buckets), initial=0)
        )
        self.num_elements = self._ends[-1]
        self._is_copy = is_whole
        self.memory = self.last.parameters.memory
        """Where the parameters lie for others: the model's memory, or a copy without look-ahead."""
        self._ahead = 0.0
        """By how many velocities the model is ahead of its parameters: lr x momentum."""
        if is_whole:
            self.memory = comm.allocate(self.num_elements, self.dtype)
            self.read()

    def update_settings(self, groups: ParamGroups) -> None:
        """Note the settings of this step."""
        if self._is_copy:
            self._ahead = _look_ahead(groups)

    def read(self) -> torch.Tensor:
        """Return the parameters as they are now, in `memory`."""
        if self._is_copy:
            for bucket in self.buckets:
                part = self.part(self.memory.mine, bucket)
                part.copy_(bucket.parameters.memory.mine)
                self._add_velocity(bucket, part, self._ahead)
        return self.memory.mine

    def write(self) -> None:
        """Give the model the parameters in `memory`, after they were mixed."""
        if self._is_copy:
            for bucket in self.buckets:
                mine = bucket.parameters.memory.mine
                mine.copy_(self.part(self.memory.mine, bucket))
                self._add_velocity(bucket, mine, -self._ahead)
                if bucket.has_copy:  # the engine has copied all buckets but the last one before
                    bucket.in_use.memory.mine.copy_(mine)

    def part(self, flat: torch.Tensor, bucket: Bucket) -> torch.Tensor:
        """Return a bucket's part of a flat tensor that is laid out like the vector."""
        start = self.start_of(bucket)
        return flat[start : start + bucket.num_elements]

    def start_of(self, bucket: Bucket) -> int:
        """Return where a bucket's part begins."""
        return self._ends[self.buckets.index(bucket)]

    def cut(self, model: Model, owns: Sequence[bool]) -> tuple[int, ...]:
        """Cut the vector into strips, one for each position; empty ones where `owns` is false."""
        if len(self.buckets) == 1:
            return model.cut(self.last, owns)
        ends = even_cuts(self.num_elements, sum(owns))
        return tuple(ends[count] for count in itertools.accumulate(owns, initial=0))

    def run_values(self, saved: Saved) -> torch.Tensor:
        """Return the parameters that represented the saved run; at a fresh start, the rank's."""
        if not saved.parameters:
            return self.memory.mine
        return torch.cat([run_values(bucket, saved) for bucket in self.buckets])

    # State, saved by parameter: buckets may be others when the run goes on.

    def names(self) -> list[str]:
        return [slot.name for bucket in self.buckets for slot in bucket.slots]

    def save(self, kind: str, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the values of each parameter in a tensor laid out like the vector."""
        return {
            f"{kind}/{slot.name}": view_of(self.part(flat, bucket), slot).clone()
            for bucket in self.buckets
            for slot in bucket.slots
        }

    def load(self, kind: str, flat: torch.Tensor, state: Mapping[str, torch.Tensor]) -> bool:
        """Load what `save` returned; say whether there was something to load."""
        found = False
        for bucket in self.buckets:
            for slot in bucket.slots:
                if f"{kind}/{slot.name}" in state:
                    found = True
                    view_of(self.part(flat, bucket), slot).copy_(state[f"{kind}/{slot.name}"])
        return found

    def save_look_ahead(self) -> dict[str, torch.Tensor]:
        """Return what `read` needs before the first step of a run that goes on."""
        return {"ahead": torch.tensor(self._ahead, dtype=torch.float64)} if self._is_copy else {}

    def load_look_ahead(self, state: Mapping[str, torch.Tensor]) -> None:
        if "ahead" in state:
            self._ahead = float(state["ahead"])

    def _add_velocity(self, bucket: Bucket, values: torch.Tensor, times: float) -> None:
        if not times:
            return
        for slot in bucket.slots:
            for start, stop, state in bucket.optimizer.held_of(slot):
                velocity = state.get("momentum_buffer")
                if velocity is not None:
                    values[start:stop].add_(velocity.reshape(-1), alpha=times)


def _look_ahead(groups: ParamGroups) -> float:
    """Return by how many velocities SGD with these settings is ahead of its parameters."""
    found = {float(one["lr"]) * one["momentum"] if one["nesterov"] else 0.0 for one in groups}
    if len(found) > 1:
        raise UsageError(
            "as_published mixes all parameters as one vector, but the optimizer's groups have "
            "different lr or momentum. Give all groups the same, or use as_published=False."
        )
    return found.pop() if found else 0.0
