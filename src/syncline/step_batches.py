"""This rank's batches of one step, shard by shard."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from syncline.engine.replica import Replica
from syncline.errors import UsageError
from syncline.samples import seed_generators, seed_torch
from syncline.seeds import seed_for


class Dealt(NamedTuple):
    """How a step's shards are dealt, and the models that are told which shard is computed."""

    shards: int
    mine: range
    replicas: Sequence[Replica] = ()


class Step:
    """This rank's shards of one step. It can be iterated over again: for each model in turn."""

    def __init__(
        self,
        dealt: Dealt,
        accumulate: int,
        seed: int,
        number: int,
        batches: Iterator[Any],
        *,
        is_fetched_here: bool,
    ) -> None:
        """A shard has `accumulate` batches; `number` counts the steps of all epochs.

        `is_fetched_here`: `batches` fetches in this process, and seeds its generators.
        """
        self._dealt = dealt
        self._seed = seed
        self._number = number
        self._batches = batches
        self._is_fetched_here = is_fetched_here
        self._given: list[Any] = []
        self._places = [(s, part) for s in dealt.mine for part in range(accumulate)]
        self._steps_before = {id(r): r.step_number for r in dealt.replicas}
        self._pass: Iterator[Any] | None = None
        self._finished: list[Replica] = []
        """The models that had taken their step before the present pass over the shards."""

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[Any]:
        self._pass = self.give()
        return self._pass

    def __next__(self) -> Any:
        return next(self._pass or iter(self))

    def give(self, *, is_flat: bool = False) -> Iterator[Any]:
        """Yield the batches; `is_flat` if `optimizer.step()` comes after each, not after all."""
        self._end_pass()
        if self._dealt.shards > 1 and torch.is_grad_enabled():
            late = {id(replica) for replica in self._late()}
            self._finished = [r for r in self._dealt.replicas if id(r) not in late]
        for number, (shard, part) in enumerate(self._places):
            is_new = number == len(self._given)
            is_first = not self._given
            if is_new:
                self._given.append(next(self._batches))
            if part == 0 and torch.is_grad_enabled():  # validation delivers no gradients
                for replica in self._dealt.replicas:
                    replica.buffers.put_back()
                    if is_first and self._dealt.shards > 1 and not replica.has_gradient:
                        replica.tell_buffers()
                    replica.begin_shard(shard, is_flat=is_flat)
            place = (shard, part) if part else (shard,)
            value = seed_for(self._seed, "dropout", self._number, *place)
            if is_new and self._is_fetched_here:
                seed_torch(value)  # the others were seeded for this batch, to fetch it
            else:
                seed_generators(value)
            yield self._given[number]
        self._end_pass()

    def _end_pass(self) -> None:
        """Let models that had taken their step keep the buffers that all ranks have."""
        for replica in self._finished:
            replica.loop.gradients.end_later_pass()
        self._finished = []

    def finish(self) -> None:
        """Fetch what the user's loop did not take, so that data stays in order."""
        self._end_pass()
        while len(self._given) < len(self._places):
            self._given.append(next(self._batches))
        self._given = []

    @property
    def is_all_given(self) -> bool:
        """Whether the loop got all batches, or none."""
        return len(self._given) in (0, len(self._places))

    def is_taken(self) -> bool:
        """Say whether the step was taken; refuse if it is half done."""
        replicas = self._dealt.replicas
        if not replicas:
            return len(self._given) == len(self._places)
        late = self._late()
        if any(replica.has_gradient for replica in late):
            raise UsageError(
                "the loader's state_dict() came in the middle of a step: gradients of its first "
                f"{len(self._given)} of {len(self._places)} batches wait for optimizer.step(). "
                "Call it after the step (a loop over shard(loader) is there if loader.ends_step)."
            )
        return len(late) < len(replicas)

    def leave(self) -> None:
        """Show all ranks the same buffers if a loop is left in the middle of a step."""
        for replica in self._late():
            if replica.comm.size > 1 and not replica.has_own and replica.has_gradient:
                replica.buffers.set_aside()

    def is_begun(self) -> bool:
        """Say whether any model got a gradient or took its step."""
        late = self._late()
        return len(late) < len(self._dealt.replicas) or any(
            replica.has_gradient for replica in late
        )

    def _late(self) -> list[Replica]:
        """Return the replicas that have not taken this step yet."""
        before = self._steps_before
        return [r for r in self._dealt.replicas if r.step_number == before[id(r)]]
