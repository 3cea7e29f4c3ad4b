"""Puts the parameters that represent the run into a model for a while; ends ranks in order.

If all ranks hold the same parameters, each rank's own represent the run, and nothing is done.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from syncline.comm.base import Communicator, tell_all
from syncline.comm.control import Control
from syncline.contract import Plan, Whole, WholeValues
from syncline.engine.bucket import Bucket
from syncline.engine.buffer_homes import flat_buffers, load_flat_buffers
from syncline.engine.lane import Lane
from syncline.errors import RankFailed

log = logging.getLogger("syncline")


class WholeRun:
    """Calls a strategy's `Whole` on the comm lane, for one rank."""

    def __init__(
        self,
        model: nn.Module,
        rank: int,
        lane: Lane,
        control: Control | None,
        plan: Plan,
    ) -> None:
        self._model = model
        self._rank = rank
        self._lane = lane
        self._control = control
        self._plan = plan
        self._buckets: Sequence[Bucket] = ()
        self.whole: Whole | None = None
        """None before the first step, and if all ranks hold the same parameters."""
        self.is_in_model = False
        """Whether the model holds the gathered values now."""
        self.may_leave_early = False
        """Whether ranks may end before the last gather, on purpose."""

    def begin(self, whole: Whole | None, buckets: Sequence[Bucket]) -> None:
        """Set the `Whole` that the strategy's `start` returned."""
        self.whole, self._buckets = whole, buckets

    def open(self) -> None:
        """Allow calls from other ranks, once saved state is in place. Every rank calls it."""
        if self.whole is not None:
            self._lane.call(self.whole.open)

    @contextlib.contextmanager
    def in_model(self, *, is_wanted: bool) -> Iterator[None]:
        """Gather the values into the model for the block. Every rank calls it at the same step."""
        whole = self.whole
        assert whole is not None
        found = self._lane.call(self._gather, whole, is_wanted)
        if found is None:
            yield
            return
        assert not any(bucket.parameters.memory.is_common for bucket in self._buckets)
        memories = [bucket.in_use.memory.mine for bucket in self._buckets]
        kept, kept_buffers = [memory.clone() for memory in memories], flat_buffers(self._model)
        self._put(memories, *found)
        was_in_model, self.is_in_model = self.is_in_model, True
        try:
            yield
        finally:
            self.is_in_model = was_in_model
            self._put(memories, kept, kept_buffers)

    def _gather(self, whole: Whole, is_wanted: bool) -> WholeValues | None:
        for bucket in self._buckets:
            if bucket.is_private:
                bucket.adopt()  # what the user has changed since the last step
        return whole.gather(is_wanted=is_wanted)

    def _put(
        self,
        memories: Sequence[torch.Tensor],
        values: Sequence[torch.Tensor],
        buffers: torch.Tensor,
    ) -> None:
        with torch.no_grad():
            for memory, value in zip(memories, values, strict=True):
                memory.copy_(value)
            load_flat_buffers(self._model, buffers)

    @property
    def gone(self) -> dict[int, RankFailed]:
        """Ranks that were lost during the run, and how."""
        return {} if self._control is None else self._control.gone

    def check_workers(self) -> None:
        """Raise if every rank that computes is gone."""
        if self._control is None:
            return
        workers = self._plan.workers
        if all(rank in self.gone for rank in workers):
            raise self.gone[workers[-1]]

    def left_early(self) -> list[int]:
        """Return the ranks that had ended before the last gather, without a failure."""
        if self.whole is None:
            return []
        return [rank for rank in self.whole.missing() if rank not in self.gone]

    def tell_who_left(self) -> None:
        """Log which ranks had ended before the last gather, and so were not part of it."""
        left = self.left_early()
        if left and not self.may_leave_early:
            log.warning(
                "whole() is without rank%s %s, which left before. Call it on every rank.",
                "s" if len(left) > 1 else "",
                ", ".join(map(str, left)),
            )

    def warn_of_own(self, root: nn.Module) -> Any:
        """Warn, once, when `state_dict()` is called outside `whole()`; return the hook's handle."""
        is_said = False

        def warn(*_: Any) -> None:
            nonlocal is_said
            if self.whole is not None and not self.is_in_model and not is_said:
                is_said = True
                log.warning(
                    "state_dict() holds rank %d's own parameters. `with replica.whole():` around "
                    "it, on every rank, gives those that represent the run.",
                    self._rank,
                )

        return root.register_state_dict_pre_hook(warn)

    def report(self) -> dict[str, Any]:
        """Return the strategy's figures for the run's summary, as plain data."""
        return {} if self.whole is None else self.whole.report()

    def state(self) -> dict[str, torch.Tensor]:
        """Return what a checkpoint must hold for the strategy."""
        return {} if self.whole is None else self.whole.state()

    def tell_figures(self, mine: Sequence[float], comm: Communicator) -> list[list[float]]:
        """Return the figures of each rank of the world that is not gone. Every rank calls it."""
        with comm.traffic.apart():
            if self.whole is None:
                return self._lane.call(tell_all, comm, mine)
            return self._lane.call(self.whole.tell_figures, mine)

    def meet(self) -> None:
        """Wait for all ranks that are not gone, with an asynchronous strategy."""
        if self.whole is not None:
            self._lane.call(self.whole.meet)

    def serve(self) -> None:
        """Serve until every rank that computes has left."""
        if self.whole is not None:
            self._lane.call(self.whole.serve)

    def stay(self) -> None:
        """Serve the others before this rank leaves, if they cannot go on without it."""
        if self.whole is not None:
            self._lane.call(self.whole.stay)


def load_values(model: nn.Module, values: Mapping[str, torch.Tensor]) -> None:
    """Copy values into a model's parameters and buffers by name, before the first step."""
    named = [*model.named_parameters(), *model.named_buffers()]
    # Without waiting: before the first step a wait would count as the first use.
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        for name, tensor in named:
            if name in values:  # non-persistent buffers are not
                tensor.copy_(values[name])
