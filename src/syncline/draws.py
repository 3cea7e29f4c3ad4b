"""Batches that a function draws, by shard: for loops without a DataLoader.

Before each call the generators of torch, Python and numpy are seeded by (seed, step, shard), as
before a batch of a DataLoader is fetched. So a shard's batch does not depend on the rank that draws
it. There is no end and no order: a position is the number of steps that were taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset

from syncline.engine.digests import tensor_digest
from syncline.errors import UsageError
from syncline.loader import FlatLoader, ShardedLoader
from syncline.samples import Order, seed_generators
from syncline.seeds import seed_for
from syncline.step_batches import Dealt, Step

_ENDLESS = 1 << 50
"""Batches in an epoch: more than any run draws."""


class Streams:
    """Numbers the drawn loaders of a session, so that no two of them draw the same batches.

    `shard(draw)` may be written into a `for` line, and is then called for each epoch.
    """

    def __init__(self) -> None:
        self._next = 0

    def take(self) -> int:
        self._next += 1
        return self._next - 1

    def go_on_after(self, stream: int) -> None:
        """Number the next loaders after one that a saved position belongs to."""
        self._next = max(self._next, stream + 1)


class Draws(Dataset[Any]):
    """A data set whose every batch is a call of the user's function."""

    def __init__(self, draw: Callable[[], Any]) -> None:
        self._draw = draw
        self._is_checked = False

    def __len__(self) -> int:
        return _ENDLESS

    def __getitems__(self, number: int) -> Any:
        """Draw a batch, with the generators as they are. A list of one: the batch is not cut."""
        if not self._is_checked:
            self._check()
            self._is_checked = True
        return [self._draw()]

    def _check(self) -> None:
        """Refuse a function that draws something else from generators with the same seeds."""
        value = torch.initial_seed()
        first = _digests(self._draw())
        seed_generators(value)
        second = _digests(self._draw())
        seed_generators(value)
        if first != second:
            raise UsageError(
                "the function given to shard() returned two different batches for one seed, so "
                "what a shard gets would depend on the number of ranks. Draw from torch's, "
                "Python's or numpy's global generator, which are seeded before each call: not from "
                "a generator of your own, and not by counting calls."
            )


def _digests(batch: Any) -> list[str]:
    return [tensor_digest(one) for one in map(_as_tensor, tree_leaves(batch)) if one is not None]


def _as_tensor(leaf: Any) -> torch.Tensor | None:
    try:
        return torch.as_tensor(leaf)
    except (TypeError, ValueError, RuntimeError):
        return None  # a text, for example: what it holds is not compared


def _only(batches: list[Any]) -> Any:
    return batches[0]


class _NoOrder(Order):
    """Batches by number, without an end."""

    @property
    def num_batches(self) -> int:
        return _ENDLESS

    def draw(self, epoch: int) -> Any:
        return range(_ENDLESS)


class DrawnSteps(ShardedLoader):
    """Iterates over steps without an end; `next()` gives the next step as well."""

    def __init__(
        self,
        draw: Callable[[], Any],
        deal: Callable[[], Dealt],
        seed: int,
        streams: Streams,
        *,
        accumulate: int = 1,
    ) -> None:
        self._streams = streams
        self._given_seed = seed
        self._under_next: Iterator[Step] | None = None
        loader = DataLoader(Draws(draw), batch_size=1, collate_fn=_only)
        super().__init__(loader, deal, seed, accumulate=accumulate)
        self._order = _NoOrder(loader, seed)
        self._become(streams.take())

    def _become(self, stream: int) -> None:
        self._stream = stream
        self.seed = seed_for(self._given_seed, "stream", stream)

    def __next__(self) -> Step:
        if self._under_next is None:
            self._is_by_next = True
            self._under_next = iter(self)
        return next(self._under_next)

    @property
    def num_steps(self) -> int:
        raise UsageError(
            "a function that draws batches draws without an end, so an epoch has no number of "
            "steps. End the loop yourself, after the same step on every rank."
        )

    def _facts(self, dealt: Dealt) -> dict[str, Any]:
        return {
            "seed": self._given_seed,
            "shards": dealt.shards,
            "accumulate": self.accumulate,
            "is_drawn": True,
        }

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"stream": self._stream}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._under_next = None
        self._become(state["stream"])
        self._streams.go_on_after(self._stream)


class DrawnBatches(FlatLoader):
    """Iterates over this rank's drawn batches; `next()` gives the next batch as well."""

    def __init__(self, steps: DrawnSteps) -> None:
        super().__init__(steps)
        self._under_next: Iterator[Any] | None = None

    def __next__(self) -> Any:
        if self._under_next is None:
            self._steps._is_by_next = True
            self._under_next = iter(self)
        return next(self._under_next)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._under_next = None
