"""Where a model keeps its buffers: the places, since forward may put other tensors there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from syncline.comm.base import each_element_once

_STATISTICS = ("running_mean", "running_var")
_NOTHING = torch.empty(0)
"""Stands for a buffer that is None now."""


class Home(NamedTuple):
    """Where a module keeps a buffer. Forward may put another tensor there."""

    holder: dict[str, torch.Tensor | None]
    name: str
    full_name: str

    @property
    def key(self) -> tuple[int, str]:
        return id(self.holder), self.name

    def value(self) -> torch.Tensor:
        found = self.holder.get(self.name)
        return _NOTHING if found is None else found

    def apart(self) -> Home:
        """Return a home for the same buffer that the user's model does not see."""
        return Home({self.name: self.holder.get(self.name)}, self.name, self.full_name)

    def set(self, value: torch.Tensor) -> None:
        """Copy a value into the buffer; if that has another shape or type, put a new one there."""
        found = self.holder.get(self.name)
        if value is _NOTHING:
            self.holder[self.name] = None
        elif found is None or found.shape != value.shape or found.dtype != value.dtype:
            self.holder[self.name] = value.clone()
        else:
            once = each_element_once(found)
            once.copy_(value[tuple(slice(length) for length in once.shape)])

    def take_shape(self, told: torch.Tensor) -> None:
        """Make room for a value of another shape or type; the tensor stays the same object."""
        dimensions, kind, *rest = told.tolist()
        shape, dtype, found = tuple(rest[:dimensions]), _TYPES[kind], self.holder.get(self.name)
        if dimensions < 0:
            self.holder[self.name] = None
        elif found is None:
            self.holder[self.name] = torch.empty(shape, dtype=dtype)
        elif found.shape != shape or found.dtype != dtype:
            found.data = torch.empty(shape, dtype=dtype)


_TYPES = sorted({v for v in vars(torch).values() if isinstance(v, torch.dtype)}, key=str)
_MAX_DIMENSIONS = 64
"""That of torch."""


def tell_shapes(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the shapes and types of buffers as numbers, which `Home.take_shape` takes."""
    rows = torch.zeros(len(values), 2 + _MAX_DIMENSIONS, dtype=torch.int64)
    for row, value in zip(rows, values, strict=True):
        row[0] = -1 if value is _NOTHING else value.dim()
        row[1] = _TYPES.index(value.dtype)
        row[2 : 2 + value.dim()] = torch.tensor(value.shape, dtype=torch.int64)
    return rows


def find_statistics(model: nn.Module) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the running statistics of a model's norm layers, and their counters of batches."""
    statistics, counters, _ = find_homes(model)
    return [home.value() for home in statistics], [home.value() for home in counters]


def find_homes(model: nn.Module) -> tuple[list[Home], list[Home], list[Home]]:
    """Return where norm layers keep statistics and counters of batches, and all other buffers."""
    statistics: dict[int, Home] = {}
    counters: dict[int, Home] = {}
    others: dict[int, Home] = {}
    for prefix, module in model.named_modules():
        is_norm = isinstance(module, _NormBase)
        for name, buffer in module._buffers.items():
            if buffer is None:
                continue
            kind = others
            if is_norm and name == "num_batches_tracked":
                kind = counters
            elif is_norm and name in _STATISTICS and buffer.is_floating_point():
                kind = statistics
            full_name = f"{prefix}.{name}" if prefix else name
            kind.setdefault(id(buffer), Home(module._buffers, name, full_name))
    alone = [home for key, home in others.items() if key not in statistics | counters]
    return list(statistics.values()), list(counters.values()), alone


def kept_copy(buffer: torch.Tensor) -> torch.Tensor:
    """Return a copy of a buffer's value, which `Home.set` takes."""
    return buffer if buffer is _NOTHING else buffer.clone()


def flat_buffers(model: nn.Module) -> torch.Tensor:
    """Return a copy of all floating-point buffers, one after the other, in float64."""
    parts = [b.detach().reshape(-1).double() for b in model.buffers() if b.is_floating_point()]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.float64)


def load_flat_buffers(model: nn.Module, flat: torch.Tensor) -> None:
    """Restore buffers from what `flat_buffers` returned."""
    at = 0
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.copy_(flat[at : at + buffer.numel()].view(buffer.shape))
            at += buffer.numel()


def seen(buffers: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, int]]:
    """Return buffers and their versions as they are now, for `have_changed`."""
    return [(buffer, buffer._version) for buffer in buffers]


def have_changed(buffers: Sequence[torch.Tensor], seen: Sequence[tuple[torch.Tensor, int]]) -> bool:
    """Say whether a buffer was changed or replaced since it was seen."""
    return any(
        buffer is not before or buffer._version != version
        for buffer, (before, version) in zip(buffers, seen, strict=True)
    )
