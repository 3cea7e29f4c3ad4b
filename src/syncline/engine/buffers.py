"""Makes a model's buffers the same on any number of ranks.

Every shard of a step starts from the same buffers. The running statistics of norm layers are then
averaged over all shards along the fixed tree, as gradients are; other buffers get shard 0's values.
With one shard this is what a plain loop does.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn

from syncline.comm.base import Communicator, Partials, allocate_sums
from syncline.comm.tree import LeafPlan, Spread
from syncline.engine.buffer_homes import (
    Home,
    find_homes,
    have_changed,
    kept_copy,
    seen,
    tell_shapes,
)
from syncline.errors import UsageError


def sum_type(dtype: torch.dtype, shards: int) -> torch.dtype:
    """Return the type in which running statistics are summed over shards.

    The mean of equal values must be that value: a norm layer in `eval()` keeps its statistics. In
    float32 it is, if the number of shards is a power of two; in float64 it is for any number.
    """
    is_power_of_two = shards & (shards - 1) == 0
    return dtype if is_power_of_two else torch.float64


class Kept(NamedTuple):
    """A copy of a model's buffers."""

    statistics: torch.Tensor | None
    small: list[torch.Tensor]
    """Counters of batches, then the other buffers."""


class Buffers:
    """The buffers of a model: statistics in new flat memory, the others where they are."""

    def __init__(
        self,
        model: nn.Module,
        comm: Communicator,
        spread: Spread,
        others: Callable[[], Iterable[Buffers]] = tuple,
    ) -> None:
        """`comm` and `spread` are those of the ranks that take each step together.

        `others` returns the objects that hold buffers already: a model with two optimizers has two,
        and the first holds its buffers.
        """
        self._model = model
        self._others = others
        self._norms: list[Home] = []
        self._counter_homes: list[Home] = []
        self._other_homes: list[Home] = []
        self._start_small: list[torch.Tensor] = []
        self._seen: list[tuple[torch.Tensor, int]] = []
        """The other buffers at the start of the step, and their versions."""
        self._seen_norms: list[tuple[torch.Tensor, int]] = []
        self._places: list[int] = []
        self._after_shard_0: list[torch.Tensor] = []
        self._left: list[tuple[Home, torch.Tensor]] = []
        """The other buffers that `step()` left to the comm lane, in homes of their own."""
        self._aside: Kept | None = None
        """The buffers of the shard under way, while those of the step's start are shown."""
        self.lay_out(comm, spread)
        self.begin_step()

    def lay_out(self, comm: Communicator, spread: Spread) -> None:
        """Find the buffers and put the statistics into new flat memory. Every rank calls it.

        It is called again when the buckets are built: until then a model may be cast. What
        `begin_step` kept stays.
        """
        pairs = zip(self._norms, self._start_norms(), strict=True)
        started = {home.key: value for home, value in pairs}
        self._norms, counters, others = self._find_homes()
        self._find_small(counters, others)
        self.statistics: Partials | None = None
        self._seen_norms = []
        if not self._norms:
            return
        buffers = [home.value() for home in self._norms]
        dtype = buffers[0].dtype
        if any(buffer.dtype != dtype for buffer in buffers):
            raise UsageError(
                "the model's norm layers keep running statistics of different types, which cannot "
                "be averaged together. Cast them to one type before the first step."
            )
        total = sum(buffer.numel() for buffer in buffers)
        summed = sum_type(dtype, spread.shards)
        self.statistics = allocate_sums(comm, total, summed, spread, 1.0 / spread.shards)
        self._current = torch.empty(total, dtype=dtype)
        self._start = torch.empty(total, dtype=dtype)
        self._places = []
        at = 0
        for home, buffer in zip(self._norms, buffers, strict=True):
            view = self._current[at : at + buffer.numel()].view(buffer.shape)
            view.copy_(buffer)
            buffer.data = view
            self._places.append(view.data_ptr())
            start = started.get(home.key, view)
            self._start[at : at + buffer.numel()].view(buffer.shape).copy_(start)
            at += buffer.numel()
        self._seen_norms = seen([home.value() for home in self._norms])

    def _find_homes(self) -> list[list[Home]]:
        """Return the homes of statistics, counters and others that no other object holds."""
        held = {home.key for other in self._others() for home in other.homes}
        return [[home for home in kind if home.key not in held] for kind in find_homes(self._model)]

    @property
    def homes(self) -> list[Home]:
        """Where the buffers are that this object holds."""
        return [*self._norms, *self._small_homes]

    def _find_small(self, counters: list[Home], others: list[Home]) -> None:
        """Set the buffers that are not statistics. What `begin_step` kept of them stays."""
        kept = zip(self._small_homes, self._start_small, strict=True)
        started = {home.key: value for home, value in kept}
        known = {home.key: one for home, one in zip(self._other_homes, self._seen, strict=True)}
        self._counter_homes, self._other_homes = counters, others
        small = [(home, kept_copy(home.value())) for home in self._small_homes]
        self._start_small = [started.get(home.key, value) for home, value in small]
        found = [(home, home.value()) for home in others]
        self._seen = [known.get(home.key, (value, value._version)) for home, value in found]

    def find_new(self) -> str | None:
        """Find buffers of layers that were added; return the name of a new statistic, if any."""
        statistics, counters, others = self._find_homes()
        known = {home.key for home in self._norms}
        new = [home.full_name for home in statistics if home.key not in known]
        self._find_small(counters, others)
        return new[0] if new else None

    def _start_norms(self) -> list[torch.Tensor]:
        """Return the statistics from which every shard of the step starts."""
        found, at = [], 0
        for home in self._norms:
            shape = home.value().shape
            found.append(self._start[at : at + shape.numel()].view(shape))
            at += shape.numel()
        return found

    def moved(self) -> str | None:
        """Return the name of a statistic that is no longer where it was put; None if all are."""
        if [home.value().data_ptr() for home in self._norms] == self._places:
            return None
        pairs = zip(self._norms, self._places, strict=True)
        return next(home.full_name for home, at in pairs if home.value().data_ptr() != at)

    def holds(self, buffer: torch.Tensor | None) -> bool:
        """Say whether a buffer lies in the statistics' flat memory."""
        return buffer is not None and buffer.data_ptr() in self._places

    @property
    def _small_homes(self) -> list[Home]:
        return [*self._counter_homes, *self._other_homes]

    @property
    def _small(self) -> list[torch.Tensor]:
        return [home.value() for home in self._small_homes]

    @property
    def _counters(self) -> list[torch.Tensor]:
        return [home.value() for home in self._counter_homes]

    @property
    def others(self) -> list[torch.Tensor]:
        """Buffers that are neither statistics nor counters of norm layers."""
        return [home.value() for home in self._other_homes]

    def all(self) -> list[torch.Tensor]:
        """Return every buffer: statistics, counters and others."""
        return [*(home.value() for home in self._norms), *self._small]

    @property
    def has_changed_others(self) -> bool:
        """Say whether forward wrote buffers that are not statistics."""
        return bool(self._seen) and have_changed(self.others, self._seen)

    @property
    def has_changed(self) -> bool:
        """Say whether anything wrote buffers since the start of the step.

        Statistics are compared by value: forward writes them without counting a version.
        """
        if self.has_changed_others or (self._norms and not torch.equal(self._current, self._start)):
            return True
        pairs = zip(self._counters, self._start_small, strict=False)
        return any(not torch.equal(counter, start) for counter, start in pairs)

    def fingerprint(self) -> int:
        """Return a number that depends on the values of all buffers."""
        found = 0
        for buffer in self.all():
            flat = buffer.detach().contiguous().reshape(-1).view(torch.uint8)
            found = zlib.crc32(flat.numpy().data, found)
        return found

    def counts(self) -> list[float]:
        """Return how many batches each norm layer has seen."""
        return [float(counter) for counter in self._counters]

    def load_counts(self, told: Sequence[float]) -> None:
        """Set the counters to a computing rank's counts, which are the last of the told numbers."""
        counters = self._counters
        if counters:
            for counter, count in zip(counters, told[-len(counters) :], strict=True):
                counter.fill_(int(count))

    def start_values(self) -> dict[str, torch.Tensor]:
        """Return the buffers from which every shard of the step starts, by name."""
        homes = self.homes
        values = [*self._start_norms(), *self._start_small]
        return {home.full_name: value for home, value in zip(homes, values, strict=True)}

    def begin_step(self, others: Sequence[torch.Tensor] | None = None) -> None:
        """Keep the buffers from which every shard of the step starts."""
        self._aside = None
        if self._norms:
            self._start.copy_(self._current)
            self._seen_norms = seen([home.value() for home in self._norms])
        if self._counter_homes or self._other_homes:
            others = self.others if others is None else others
            self._start_small = [kept_copy(buffer) for buffer in [*self._counters, *others]]
            self._seen = seen(others)

    def begin_step_of(self, module: nn.Module) -> None:
        """Keep a module's own buffers, which were loaded: every shard starts from them."""
        for home, start in zip(self._norms, self._start_norms(), strict=True):
            if home.holder is module._buffers:
                start.copy_(home.value())
        for at, home in enumerate(self._small_homes):
            if home.holder is module._buffers:
                self._start_small[at] = kept_copy(home.value())
        for at, home in enumerate(self._other_homes):
            if home.holder is module._buffers:
                self._seen[at] = (home.value(), home.value()._version)

    def begin_shard(self) -> None:
        """Restore the buffers from the start of the step."""
        self._aside = None
        if self._norms:
            self._current.copy_(self._start)
        for home, start in zip(self._small_homes, self._start_small, strict=True):
            home.set(start)

    def keep(self) -> Kept:
        """Return a copy of the buffers as they are now."""
        statistics = self._current.clone() if self._norms else None
        return Kept(statistics, [kept_copy(buffer) for buffer in self._small])

    def load(self, kept: Kept) -> None:
        """Set the buffers to what was kept."""
        if kept.statistics is not None:
            self._current.copy_(kept.statistics)
        for home, value in zip(self._small_homes, kept.small, strict=True):
            home.set(value)

    def end_shard(self, shard: int, plan: LeafPlan, kept: Kept | None = None) -> None:
        """Add the shard's statistics to the rank's partial sums; `kept` are its buffers, if not the
        present ones."""
        self.put_back()
        if shard == 0 and self._other_homes:
            others = self.others if kept is None else kept.small[len(self._counters) :]
            self._after_shard_0 = [kept_copy(buffer) for buffer in others]
        if self.statistics is None:
            return
        sums = [memory.mine for memory in self.statistics.sums]
        current = self._current if kept is None else kept.statistics
        assert current is not None
        if plan.fresh:
            sums[plan.into].copy_(current)
        else:
            sums[plan.into].add_(current)
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

    def end_step(self, comm: Communicator, others_changed: bool) -> Iterable[None]:
        """Set the averaged statistics and shard 0's other buffers, on the comm lane.

        Yields after each wait: in a simulation another rank may have used the model meanwhile.
        """
        if others_changed or self._norms or self._counter_homes or self._other_homes:
            return self._end_step(comm, others_changed)
        self._aside = None
        return ()

    def _end_step(self, comm: Communicator, others_changed: bool) -> Iterator[None]:
        if self.statistics is not None:
            self._current.copy_(self.statistics.result)
        homes = [left for left, _ in self._left] or self._other_homes
        if others_changed:
            root = comm.ranks.index(min(comm.ranks))
            values = self._after_shard_0 or [home.value() for home in homes]
            shapes = tell_shapes(values)
            comm.broadcast(shapes, root)
            yield
            for home, value, shape in zip(homes, values, shapes, strict=True):
                home.take_shape(shape)
                if comm.position == root:
                    home.set(value)
                comm.broadcast(home.value(), root)
                yield
        self._after_shard_0 = []
        self._end_leave()
        self.begin_step([home.value() for home in homes])

    def leave(self) -> None:
        """Leave the other buffers to the comm lane: what the user puts in their place stays."""
        if self._other_homes:
            self._left = [(home.apart(), home.value()) for home in self._other_homes]

    def _end_leave(self) -> None:
        """Show buffers that came or went, unless the user has put something there."""
        for home, (left, before) in zip(self._other_homes, self._left, strict=False):
            if left.value() is not before and home.value() is before:
                home.holder[home.name] = left.holder[left.name]
        self._left = []
