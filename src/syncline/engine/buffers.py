"""Makes a model's buffers the same on any number of ranks.

Every shard of a step starts from the same buffers. The running statistics of norm layers are then
averaged over all shards along the fixed tree, as gradients are; other buffers get shard 0's values.
With one shard this is what a plain loop does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from syncline.comm.base import Communicator, Partials, allocate_sums
from syncline.comm.tree import LeafPlan, Spread

_STATISTICS = ("running_mean", "running_var")


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


def find_statistics(model: nn.Module) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the running statistics of a model's norm layers, and their counters of batches."""
    statistics: dict[int, torch.Tensor] = {}
    counters: dict[int, torch.Tensor] = {}
    for module in model.modules():
        if isinstance(module, _NormBase):
            for name, buffer in module.named_buffers(recurse=False):
                if name == "num_batches_tracked":
                    counters[id(buffer)] = buffer
                elif name in _STATISTICS and buffer.is_floating_point():
                    statistics[id(buffer)] = buffer
    return list(statistics.values()), list(counters.values())


class Kept(NamedTuple):
    """A copy of a model's buffers."""

    statistics: torch.Tensor | None
    small: list[torch.Tensor]
    """Counters of batches, then the other buffers."""


class Buffers:
    """The buffers of a model: statistics in new flat memory, the others where they are."""

    def __init__(self, model: nn.Module, comm: Communicator, spread: Spread) -> None:
        """`comm` and `spread` are those of the ranks that take each step together."""
        self.statistics: Partials | None = None
        self._norms, self._counters = find_statistics(model)
        known = {id(buffer) for buffer in (*self._norms, *self._counters)}
        self.others = [buffer for buffer in model.buffers() if id(buffer) not in known]
        self._lay_out(comm, spread)
        self._small = [*self._counters, *self.others]
        self._start_small: list[torch.Tensor] = []
        self._after_shard_0: list[torch.Tensor] = []
        self._aside: Kept | None = None
        """The buffers of the shard under way, while those of the step's start are shown."""
        self.begin_step()

    def _lay_out(self, comm: Communicator, spread: Spread) -> None:
        if not self._norms:
            return
        dtype = self._norms[0].dtype
        total = sum(buffer.numel() for buffer in self._norms)
        self.statistics = allocate_sums(comm, total, dtype, spread, 1.0 / spread.shards)
        self._current = torch.empty(total, dtype=dtype)
        self._start = torch.empty(total, dtype=dtype)
        offset = 0
        for buffer in self._norms:
            view = self._current[offset : offset + buffer.numel()].view(buffer.shape)
            view.copy_(buffer)
            buffer.data = view
            offset += buffer.numel()

    @property
    def has_changed_others(self) -> bool:
        """Say whether forward wrote buffers that are not statistics."""
        return any(
            buffer._version != version
            for buffer, version in zip(self.others, self._versions, strict=True)
        )

    def counts(self) -> list[float]:
        """Return how many batches each norm layer has seen."""
        return [float(counter) for counter in self._counters]

    def load_counts(self, told: Sequence[float]) -> None:
        """Set the counters to a computing rank's counts, which are the last of the told numbers."""
        if self._counters:
            for counter, count in zip(self._counters, told[-len(self._counters) :], strict=True):
                counter.fill_(int(count))

    def begin_step(self) -> None:
        """Keep the buffers from which every shard of the step starts."""
        self._aside = None
        if self._norms:
            self._start.copy_(self._current)
        self._start_small = [buffer.clone() for buffer in self._small]
        self._versions = [buffer._version for buffer in self.others]

    def begin_shard(self) -> None:
        """Restore the buffers from the start of the step."""
        self._aside = None
        if self._norms:
            self._current.copy_(self._start)
        for buffer, start in zip(self._small, self._start_small, strict=True):
            buffer.copy_(start)

    def keep(self) -> Kept:
        """Return a copy of the buffers as they are now."""
        statistics = self._current.clone() if self._norms else None
        return Kept(statistics, [buffer.clone() for buffer in self._small])

    def load(self, kept: Kept) -> None:
        """Set the buffers to what was kept."""
        if kept.statistics is not None:
            self._current.copy_(kept.statistics)
        for buffer, value in zip(self._small, kept.small, strict=True):
            buffer.copy_(value)

    def end_shard(self, shard: int, plan: LeafPlan) -> None:
        """Add the shard's statistics to the rank's partial sums."""
        self.put_back()
        if shard == 0:
            self._after_shard_0 = [buffer.clone() for buffer in self.others]
        if self.statistics is None:
            return
        sums = [memory.mine for memory in self.statistics.sums]
        if plan.fresh:
            sums[plan.into].copy_(self._current)
        else:
            sums[plan.into].add_(self._current)
        for into, from_ in plan.merges:
            sums[into].add_(sums[from_])

    def set_aside(self) -> None:
        """Show the buffers of the step's start, which all ranks have, until `put_back`.

        For validation in the middle of a step: each rank has seen other samples since.
        """
        with torch.no_grad():
            kept = self.keep()
            self.begin_shard()
        self._aside = kept

    def put_back(self) -> None:
        """Go on with the buffers that were set aside, if any."""
        if self._aside is not None:
            with torch.no_grad():
                self.load(self._aside)
            self._aside = None

    def end_step(self, comm: Communicator, others_changed: bool) -> Iterator[None]:
        """Set the averaged statistics and shard 0's other buffers. Runs on the comm lane.

        Yields after each wait: in a simulation another rank may have used the model meanwhile.
        """
        if self.statistics is not None:
            self._current.copy_(self.statistics.result)
        if others_changed:
            root = comm.ranks.index(min(comm.ranks))
            for buffer, value in zip(self.others, self._after_shard_0 or self.others, strict=True):
                if comm.position == root:
                    buffer.copy_(value)
                comm.broadcast(buffer, root)
                yield
        self._after_shard_0 = []
        self.begin_step()
