"""Where a model keeps its buffers: the places, since forward may put other tensors there."""

from __future__ import annotations

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
