"""Which samples an epoch has, in which order, and the random numbers they are fetched with.

The order depends on (seed, epoch) alone. Before a batch is fetched, in this process or in a worker
of the DataLoader, the generators of torch, Python and numpy are seeded by (seed, step, shard). So
random augmentation does not depend on the number of ranks or of workers.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from syncline.errors import UsageError
from syncline.seeds import seed_for


def seed_torch(value: int) -> None:
    """Seed torch's global generators."""
    if _has_cuda():
        torch.manual_seed(value)
    else:
        # manual_seed without CUDA's part, which takes a millisecond and keeps a traceback.
        torch.default_generator.manual_seed(value)


_has_cuda = functools.cache(torch.cuda.is_available)


def seed_generators(value: int) -> None:
    """Seed the global generators of torch, Python and numpy.

    numpy loads its generator when it is first used: seeding loads it, so that the first draw of a
    user's function is seeded too.
    """
    seed_torch(value)
    random.seed(value)
    np.random.seed(value & 0xFFFFFFFF)


@contextlib.contextmanager
def _kept_generators() -> Iterator[None]:
    """Restore the global generators after the block."""
    states = torch.get_rng_state(), random.getstate()
    of_numpy = np.random.get_state()
    yield
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(of_numpy)


class SeededBatch(NamedTuple):
    """The samples of a batch, and the seed to fetch them with. It travels to the workers."""

    seed: int
    indices: list[int]


class SeededSamples(Dataset[Any]):
    """A data set that seeds the generators before it fetches a batch. Otherwise like its own."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self._dataset = dataset

    def __getitems__(self, batch: SeededBatch) -> Any:
        seed_generators(batch.seed)
        dataset: Any = self._dataset
        fetch_all = getattr(dataset, "__getitems__", None)
        if fetch_all is not None:
            return fetch_all(batch.indices)
        return [dataset[index] for index in batch.indices]

    def __getattr__(self, name: str) -> Any:
        # Also asked for while a worker unpickles this object, when it has no data set yet.
        if name.startswith("__") or name == "_dataset":
            raise AttributeError(name)
        return getattr(self._dataset, name)


class Batches:
    """A batch sampler whose batches are set anew for each epoch."""

    def __init__(self) -> None:
        self._batches: Callable[[], Iterator[SeededBatch]] = lambda: iter(())

    def begin(self, batches: Callable[[], Iterator[SeededBatch]]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[SeededBatch]:
        return self._batches()


class OnlyItem:
    """Gives a data set's item, which is a batch already, to the loader's `collate_fn`."""

    def __init__(self, collate_fn: Callable[[Any], Any]) -> None:
        self._collate_fn = collate_fn

    def __call__(self, items: list[Any]) -> Any:
        (item,) = items
        return self._collate_fn(item)


def _has_ready_batches(loader: DataLoader[Any]) -> bool:
    """Say whether each item of the data set is a batch: `batch_size=None`, no batch sampler."""
    return loader.batch_sampler is None


def seeded_loader(loader: DataLoader[Any], batches: Batches) -> DataLoader[Any]:
    """Return a loader like the user's, with other batches, that are fetched with their seed."""
    collate_fn = loader.collate_fn
    if _has_ready_batches(loader):
        collate_fn = OnlyItem(collate_fn)
    return DataLoader(
        SeededSamples(loader.dataset),
        batch_sampler=batches,  # type: ignore[arg-type]  # no list: see SeededSamples
        num_workers=loader.num_workers,
        collate_fn=collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
        multiprocessing_context=loader.multiprocessing_context,
        # Of its own: it would draw the workers' first seed from torch's.
        generator=torch.Generator().manual_seed(0),
    )


def epoch_order(num_samples: int, seed: int, epoch: int, *, shuffle: bool = True) -> torch.Tensor:
    """Return the order of samples in an epoch: the same on every rank.

    >>> epoch_order(4, seed=0, epoch=0, shuffle=False).tolist()
    [0, 1, 2, 3]
    """
    if not shuffle:
        return torch.arange(num_samples)
    generator = torch.Generator().manual_seed(seed_for(seed, "order", epoch))
    return torch.randperm(num_samples, generator=generator)


Drawn = list[list[int]]
"""The batches of an epoch, in order: whole ones only."""


class Order:
    """The batches of each epoch of a DataLoader, the same on every rank."""

    def __init__(self, loader: DataLoader[Any], seed: int) -> None:
        if isinstance(loader.dataset, IterableDataset):
            raise UsageError(
                "a data set without indices cannot be cut into shards: which sample is whose? "
                "Use a map-style data set, or give shard() a function that draws one batch."
            )
        _refuse_own_iteration(loader)
        self._loader = loader
        self._seed = seed
        self._sampler: Any = loader.sampler
        if loader.batch_size is None and not _has_ready_batches(loader):
            self._sampler = loader.batch_sampler
        if any(isinstance(part, DistributedSampler) for part in _parts(self._sampler)):
            raise UsageError(
                "the loader's sampler is a DistributedSampler, which gives each rank a part of the "
                "data; shard() does that itself. Use shuffle=True or False and no sampler."
            )
        if not hasattr(self._sampler, "__len__"):
            raise UsageError(
                f"the loader's sampler, a {type(self._sampler).__name__}, has no length, so it is "
                "not known how many steps an epoch has. Give it a __len__."
            )
        self._drawn: tuple[int, str] | None = None
        """The epoch drawn last from a sampler of the user's, and the digest of its order."""

    @property
    def num_samples(self) -> int:
        """Samples in an epoch; batches, if the user has a batch sampler or `batch_size=None`."""
        return len(self._sampler)

    @property
    def num_batches(self) -> int:
        """Whole batches in an epoch."""
        return self.num_samples // (self._loader.batch_size or 1)

    @property
    def is_own(self) -> bool:
        """Whether the order is `epoch_order`'s, not that of a sampler of the user's."""
        sampler = self._sampler
        if type(sampler) is RandomSampler:
            return not sampler.replacement and sampler.num_samples == len(sampler.data_source)
        return type(sampler) is SequentialSampler

    @property
    def fingerprint(self) -> int | None:
        """A number for the order drawn last, if it comes from a sampler of the user's."""
        return None if self._drawn is None else int(self._drawn[1], 16)

    def draw(self, epoch: int) -> Drawn:
        """Return the batches of an epoch."""
        if self.is_own:
            shuffle = type(self._sampler) is RandomSampler
            order = epoch_order(self.num_samples, self._seed, epoch, shuffle=shuffle).tolist()
        else:
            order = self._ask_sampler(epoch)
        size = self._loader.batch_size
        if size is None:
            return [[index] for index in order] if _has_ready_batches(self._loader) else order
        return [order[first : first + size] for first in range(0, len(order) - size + 1, size)]

    def _ask_sampler(self, epoch: int) -> list[Any]:
        """List what the user's sampler gives; its random numbers depend on (seed, epoch)."""
        value = seed_for(self._seed, "order", epoch)
        for part in _parts(self._sampler):
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)
            if isinstance(getattr(part, "generator", None), torch.Generator):
                part.generator.manual_seed(value)
        with _kept_generators():
            seed_generators(value)
            order = list(self._sampler)
        digest = hashlib.sha256(repr(order).encode()).hexdigest()[:16]
        self._drawn = (epoch, digest)
        return order

    def state(self) -> dict[str, Any]:
        """Return what shows, when a position is loaded, whether the order is the same."""
        if self._drawn is None:
            return {}
        return {"drawn_epoch": self._drawn[0], "drawn": self._drawn[1]}

    def check_state(self, epoch: int | None, digest: str | None) -> None:
        """Refuse if a sampler of the user's gives another order than when a state was saved."""
        if self.is_own or epoch is None:
            return
        self._ask_sampler(epoch)
        if self._drawn != (epoch, digest):
            raise UsageError(
                f"the sampler, a {type(self._sampler).__name__}, gives another order for epoch "
                f"{epoch} than when the loader's state was saved. Let its order depend on its "
                "set_epoch(epoch), its generator, or the generators of torch, Python or numpy."
            )


def _refuse_own_iteration(loader: DataLoader[Any]) -> None:
    """Refuse a DataLoader of a class that does something to batches: its code would not run."""
    owner = str(getattr(type(loader).__iter__, "__module__", "")).partition(".")[0]
    if owner not in ("torch", "torchdata"):
        raise UsageError(
            f"the loader is a {type(loader).__name__}, whose __iter__ is not DataLoader's, but "
            "ranks fetch their shards with a DataLoader of their own. Do what it does in the data "
            "set, in collate_fn or in the loop."
        )


def _parts(sampler: Any) -> Iterator[Any]:
    """Yield a sampler and those inside it, such as the sampler of a BatchSampler."""
    for _ in range(4):
        if sampler is not None:
            yield sampler
            sampler = getattr(sampler, "sampler", None)
