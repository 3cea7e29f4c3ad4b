"""Makes an object look like the DataLoader it was made from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader


class LikeLoader:
    """Looks like the DataLoader it was made from: `dataset`, `batch_size`, `num_workers`, ..."""

    loader: DataLoader[Any]

    def set_epoch(self, epoch: int) -> None:
        raise NotImplementedError

    @property
    def sampler(self) -> Any:
        """The loader's sampler, with a `set_epoch` that sets the epoch of this loader."""
        return _SamplerOf(self)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)


class _SamplerOf:
    """A sampler as scripts know it from DistributedSampler."""

    def __init__(self, owner: LikeLoader) -> None:
        self._owner = owner

    def set_epoch(self, epoch: int) -> None:
        self._owner.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self._owner.loader.sampler)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._owner.loader.sampler)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_owner":
            raise AttributeError(name)
        return getattr(self._owner.loader.sampler, name)
