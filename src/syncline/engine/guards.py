"""Joins what notices that a user's loop changes a distributed model outside `step()`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.optim import Optimizer

from syncline.comm.base import Communicator
from syncline.contract import Plan
from syncline.engine.agreement import Agreement
from syncline.engine.buffers import Buffers
from syncline.engine.changes import ChangesOutside
from syncline.engine.compute import ComputeLane
from syncline.engine.copies import Copies
from syncline.engine.loading import Loading
from syncline.engine.refusals import Found
from syncline.engine.whole import WholeRun
from syncline.errors import ConfigError, UsageError


class Guards:
    """Comparisons over ranks, changes outside the optimizer, loads, and copies of one model."""

    def __init__(
        self,
        model: nn.Module,
        found: Found,
        optimizer: Optimizer,
        buffers: Buffers,
        comm: Communicator,
        plan: Plan,
        *,
        private: bool,
        check_every: int | None,
    ) -> None:
        """`comm` is the step group's; with `private` the user may change parameters in place."""
        self._has_own = plan.has_own
        if check_every is not None and self._has_own:
            raise ConfigError(
                "check_every",
                f"got {check_every}",
                "with this strategy ranks hold different parameters",
                "Leave it out, or choose a synchronous strategy.",
            )
        self._slots = found.slots
        self._optimizer = optimizer
        self._buffers = buffers
        self._checks = check_every is not None
        self.agreement = Agreement(model, found.slots, buffers, comm, check_every)
        # Servers hold the parameters: a worker's change of its own copy would be lost.
        holds_own = plan.keeps_own and not plan.pulls
        self._may_be_private = may_be_private = holds_own or not plan.answers_calls
        self.outside = ChangesOutside(
            model,
            found,
            optimizer,
            buffers,
            self.agreement,
            may_change_parameters=may_be_private and (private or holds_own),
            may_be_private=may_be_private,
        )

    def watch(
        self,
        root: nn.Module,
        compute: ComputeLane,
        run: WholeRun,
        num_ranks: int,
        before_copy: Callable[[], None],
        before_load: Callable[[], None],
    ) -> Iterator[Any]:
        """Begin to watch loads and copies of the user's module; yields the hooks' handles.

        `before_copy` waits until the model is up to date, and refuses what cannot be copied;
        `before_load` refuses to load where it would be lost.
        """
        self._run, self._num_ranks = run, num_ranks
        self._loading = Loading(
            root,
            self._slots,
            compute,
            self._buffers,
            self.outside,
            self.agreement,
            lambda: run.is_in_model,
            before_load,
        )
        moved = self._buffers.holds
        self._copies = Copies(root, self._optimizer, self._slots, moved, before_copy)
        if self._checks:
            compute.before_flags = self.agreement.begin_step
        if self._has_own:
            compute.checks.append(self._check_own)
        yield from self._loading.hook()

    def _check_own(self) -> None:
        """Refuse a step whose model does not hold this rank's own parameters."""
        if self._run.is_in_model:
            raise UsageError(
                "step() came inside whole(), whose values are put away at its end. Call it outside."
            )
        is_held_elsewhere = self._num_ranks > 1 or not self._may_be_private
        if self._loading.is_loaded and self._run.whole is not None and is_held_elsewhere:
            raise UsageError(
                "parameters were loaded after the first step, but into this rank's own model only, "
                "not into what the ranks hold together. Load them before the first step."
            )

    def release(self) -> None:
        """Leave copying to the objects' own classes again."""
        self._copies.remove()
