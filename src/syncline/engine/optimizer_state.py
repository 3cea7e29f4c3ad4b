"""Gathers and spreads the optimizer's state: in strips on ranks, whole in checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.optim import Optimizer

from syncline.contract import Whole
from syncline.engine.bucket import Bucket, Slot
from syncline.engine.lane import Lane
from syncline.engine.state import State, gather_optimizer_state
from syncline.errors import UsageError


class OptimizerState:
    """Gathers the whole state from all strips, and loads this rank's strips from it."""

    def __init__(
        self,
        optimizer: Optimizer,
        slots: Sequence[Slot],
        num_ranks: int,
        lane: Lane,
        settle: Callable[[str], None],
    ) -> None:
        """`settle` waits for the last step and undoes early updates, for a given reason."""
        self._optimizer = optimizer
        self._slots = slots
        self._num_ranks = num_ranks
        self._lane = lane
        self._settle = settle
        self._buckets: Sequence[Bucket] = ()
        self._whole: Whole | None = None
        self._pending: State | None = None
        """State that was loaded before the buckets were built."""

    def hook(self) -> Iterator[Any]:
        """Watch the user's optimizer; yields handles."""
        yield self._optimizer.register_state_dict_pre_hook(self._before_state_dict)
        yield self._optimizer.register_load_state_dict_post_hook(self._after_load)

    def begin(self, buckets: Sequence[Bucket], whole: Whole | None) -> None:
        """Spread the state loaded so far, once the buckets are built."""
        self._buckets, self._whole = buckets, whole
        if self._pending is not None:
            self.load(self._pending)
            self._pending = None
        else:
            self._adopt()

    def load(self, state: State) -> None:
        """Load the whole state, by parameter name; each rank keeps its strips. No collective."""
        if not self._buckets:
            self._pending = state
            return
        self._settle("optimizer state was loaded between backward and step()")
        self._lane.call(self._load, state)

    def gather(self, *, is_wanted: bool) -> State:
        """Return the whole state by parameter name. Every rank calls it."""
        if not self._buckets:
            return self._pending or {}
        self._settle("optimizer state was asked for between backward and step()")
        return self._lane.call(self._gather, is_wanted)

    def give_back(self) -> None:
        """Put the whole state into the user's optimizer. Every rank calls it."""
        whole = self.gather(is_wanted=True)
        for slot in self._slots:
            if slot.name in whole:
                self._optimizer.state[slot.parameter] = whole[slot.name]

    def _load(self, state: State) -> None:
        # On the lane, where a server also updates: no update may come in between.
        for bucket in self._buckets:
            for slot in bucket.slots:
                if slot.name in state:
                    bucket.optimizer.load_state(slot, state[slot.name])

    def _gather(self, is_wanted: bool) -> State:
        found = None if self._whole is None else self._whole.gather_state(is_wanted=is_wanted)
        return gather_optimizer_state(self._slots, self._buckets) if found is None else found

    def _before_state_dict(self, optimizer: Optimizer) -> None:
        if not self._buckets:
            return
        if self._num_ranks > 1:
            raise UsageError(
                "optimizer.state_dict() on one rank would hold that rank's strips only. Call "
                "syncline.optimizer_state(model) on every rank: it returns the whole state."
            )
        whole = self.gather(is_wanted=True)
        for slot in self._slots:
            if slot.name in whole:
                self._optimizer.state[slot.parameter] = whole[slot.name]

    def _after_load(self, optimizer: Optimizer) -> None:
        self._adopt()

    def _adopt(self) -> None:
        """Spread state that the user's optimizer holds (loaded, or from earlier training)."""
        if not self._buckets:
            return
        state = {
            slot.name: dict(self._optimizer.state[slot.parameter])
            for slot in self._slots
            if slot.parameter in self._optimizer.state
        }
        self._optimizer.state.clear()
        if state:
            self.load(state)
