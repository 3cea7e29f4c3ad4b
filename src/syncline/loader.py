"""Data by shard: which samples a shard of a step gets, on whichever rank computes it.

The loader's `batch_size` is the size of one shard; a step takes one batch for each shard. The
order of samples depends on (seed, epoch) alone. Samples that do not fill a whole step are left out,
so that all shards have the same weight.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from syncline.engine.replica import Replica
from syncline.errors import UsageError
from syncline.seeds import seed_for


def epoch_order(num_samples: int, seed: int, epoch: int, *, shuffle: bool = True) -> torch.Tensor:
    """Return the order of samples in an epoch: the same on every rank.

    >>> epoch_order(4, seed=0, epoch=0, shuffle=False).tolist()
    [0, 1, 2, 3]
    """
    if not shuffle:
        return torch.arange(num_samples)
    generator = torch.Generator().manual_seed(seed_for(seed, "order", epoch))
    return torch.randperm(num_samples, generator=generator)


def reseed(seed: int, step: int, shard: int) -> None:
    """Seed torch's generator for one shard of one step: dropout and other random forward code."""
    value = seed_for(seed, "dropout", step, shard)
    if torch.cuda.is_available():
        torch.manual_seed(value)
    else:
        # manual_seed without CUDA's part, which takes a millisecond and keeps a traceback.
        torch.default_generator.manual_seed(value)


class _Batches:
    """A batch sampler: the indices of this rank's shards, step by step."""

    def __init__(self, order: list[int], size: int, shards: int, mine: range) -> None:
        self._order, self._size, self._shards, self._mine = order, size, shards, mine
        self.num_steps = len(order) // (size * shards)

    def __len__(self) -> int:
        return self.num_steps * len(self._mine)

    def __iter__(self) -> Iterator[list[int]]:
        for step in range(self.num_steps):
            for shard in self._mine:
                start = (step * self._shards + shard) * self._size
                yield self._order[start : start + self._size]


class ShardedLoader:
    """Iterates over steps; each step iterates over this rank's shards and informs the replica."""

    def __init__(
        self, loader: DataLoader[Any], shards: int, mine: range, replica: Replica | None, seed: int
    ) -> None:
        if isinstance(loader.dataset, IterableDataset):
            raise UsageError(
                "a data set without indices cannot be cut into shards: which sample is whose? "
                "Give each rank its part yourself, or use a map-style data set."
            )
        if not isinstance(loader.sampler, RandomSampler | SequentialSampler):
            raise UsageError(
                f"the loader's sampler is a {type(loader.sampler).__name__}, but shards need an "
                "order that is the same on every rank. Use shuffle=True or False and no sampler."
            )
        if loader.batch_size is None:
            raise UsageError("the loader has no batch_size, which is the size of one shard")
        self._loader = loader
        self._shards = shards
        self.mine = mine
        self._replica = replica
        self._seed = seed
        self._is_shuffled = isinstance(loader.sampler, RandomSampler)
        self._num_samples = len(loader.dataset)  # type: ignore[arg-type]
        self._size = loader.batch_size
        self.epoch = 0
        self._step = 0
        if len(self) == 0:
            raise UsageError(
                f"{self._num_samples} samples do not fill one step of {shards} shards of "
                f"{loader.batch_size}. Use smaller shards or fewer of them."
            )

    def __len__(self) -> int:
        """Steps in an epoch."""
        return self._num_samples // (self._size * self._shards)

    def __iter__(self) -> Iterator[Iterator[Any]]:
        order = epoch_order(
            self._num_samples, self._seed, self.epoch, shuffle=self._is_shuffled
        ).tolist()
        self.epoch += 1
        loader = self._loader
        batches: DataLoader[Any] = DataLoader(
            loader.dataset,
            batch_sampler=_Batches(order, self._size, self._shards, self.mine),
            num_workers=loader.num_workers,
            collate_fn=loader.collate_fn,
            pin_memory=loader.pin_memory,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            prefetch_factor=loader.prefetch_factor,
            multiprocessing_context=loader.multiprocessing_context,
        )
        iterator = iter(batches)
        for _ in range(len(self)):
            shards = self._one_step(iterator)
            yield shards
            for _ in shards:
                pass  # skip shards that the user's loop did not take, so that data stays in order
            self._step += 1

    def _one_step(self, batches: Iterator[Any]) -> Iterator[Any]:
        for shard in self.mine:
            batch = next(batches)
            if self._replica is not None:
                self._replica.begin_shard(shard)
            reseed(self._seed, self._step, shard)
            yield batch


class FlatLoader:
    """Iterates over batches, one a step, where a rank has one shard a step."""

    def __init__(self, steps: ShardedLoader) -> None:
        self._steps = steps

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[Any]:
        for shards in self._steps:
            yield from shards


class ServingLoader:
    """For a rank that only serves: it yields no data, and ends when all other ranks have ended."""

    def __init__(self, replica: Replica, others: ShardedLoader) -> None:
        """`others` is the loader of a rank that computes."""
        self._replica = replica
        self._others = others

    def __len__(self) -> int:
        """Steps in an epoch of the ranks that compute: learning-rate schedules need it."""
        return len(self._others)

    def __iter__(self) -> Iterator[Any]:
        self._replica.serve_to_the_end()
        return iter(())


def check_one_shard(mine: Sequence[int]) -> None:
    if len(mine) != 1:
        raise UsageError(
            f"this rank has {len(mine)} shards a step, so one batch is not one step. Loop over "
            "`for step in syncline.shards(loader): for x, y in step: ...`, with step() once a step."
        )
