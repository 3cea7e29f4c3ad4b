"""The user's optimizer, run on a strip.

A shallow copy of the optimizer gets the strip's pieces as its parameters and keeps state for them
only: each rank holds 1/N of the state. Settings are those that the user's optimizer had on entering
`step()`, so that a scheduler's next step cannot race the comm lane.

If the optimizer is elementwise, a strip is updated in runs. A run may span several parameters and
is at most as long as fits into a core's cache: few calls, and the several passes of an update read
memory once. Optimizers whose bits depend on where a tensor ends (fused ones) get one piece per
parameter.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch.optim import Optimizer

from syncline.contract import ParamGroups, UpdateSettings
from syncline.engine.bucket import Bucket, Piece, Slot, pieces_of, view_of
from syncline.engine.strip_state import (
    TensorState,
    can_share_runs,
    copied,
    cut_state,
    held_of,
    recut_state,
)

CACHE_ELEMENTS = 1 << 16
"""The length of a run: 256 kB of each tensor of an update stay in a core's cache."""


class Reach(Enum):
    """Which other elements an optimizer reads when it updates one element."""

    ELEMENT = "each element by itself"
    PIECE = "each element, in pieces of one parameter"
    PARAMETER = "each parameter as a whole"


def snapshot(optimizer: Optimizer) -> ParamGroups:
    settings = [dict(group) for group in optimizer.param_groups]
    for group in settings:
        del group["params"]
        if torch.Tensor in map(type, group.values()):  # a scheduler changes them in place
            group.update({k: v.clone() for k, v in group.items() if isinstance(v, torch.Tensor)})
    return settings


def param_group_numbers(optimizer: Optimizer) -> dict[int, int]:
    """Return the number of each parameter's group, by the parameter's identity."""
    groups = enumerate(optimizer.param_groups)
    return {id(p): number for number, group in groups for p in group["params"]}


def clone_for(
    optimizer: Optimizer, groups: Sequence[Sequence[torch.Tensor]], settings: ParamGroups
) -> Optimizer:
    """Return a copy of an optimizer for other tensors: same rule, no state, no hooks."""
    clone = copy.copy(optimizer)
    clone.state = defaultdict(dict)
    clone.param_groups = [
        {**of_group, "params": list(tensors)}
        for of_group, tensors in zip(settings, groups, strict=True)
    ]
    clone._optimizer_step_pre_hooks = OrderedDict()
    clone._optimizer_step_post_hooks = OrderedDict()
    return clone


def idle_copy(optimizer: Optimizer) -> Optimizer:
    """Return a copy without parameters: its `step()` does nothing."""
    idle = clone_for(optimizer, [], [])
    try:
        idle.step()
    except Exception:
        # Some optimizers read their groups' settings in step(): give the copy groups without
        # parameters.
        idle = clone_for(optimizer, [()] * len(optimizer.param_groups), snapshot(optimizer))
    return idle


def changed_settings(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a group that are new, or not what they were."""
    return {
        key: value
        for key, value in now.items()
        if key != "params" and (key not in before or bool(before[key] != value))
    }


def count_in_groups(optimizer: Optimizer, settings: ParamGroups) -> None:
    """Change the groups' settings as the optimizer's own `step()` does, without parameters."""
    clone = clone_for(optimizer, [()] * len(settings), settings)
    inspect.unwrap(type(optimizer).step)(clone)
    for group, before, now in zip(
        optimizer.param_groups, settings, clone.param_groups, strict=True
    ):
        group.update(changed_settings(before, now))


@dataclass(eq=False)
class Run:
    """A stretch of a strip that is updated at once, and the parameters' pieces in it."""

    start: int
    stop: int
    tensor: torch.Tensor
    gradient: torch.Tensor
    group: int
    pieces: list[Piece]


class OptimizerOnStrip:
    """The optimizer of one strip of one bucket, with its state."""

    def __init__(
        self,
        optimizer: Optimizer,
        bucket: Bucket,
        memory: tuple[torch.Tensor, torch.Tensor],
        start: int,
        stop: int,
        reach: Reach,
        param_group_of: Callable[[Slot], int],
    ) -> None:
        """`memory` is parameters and gradients, laid out like the bucket."""
        self._traffic = bucket.comm.traffic
        self._memory = memory
        self._reach = reach
        self._param_group_of = param_group_of
        self.settings = snapshot(optimizer)
        self._pieces = list(pieces_of(bucket, start, stop, with_empty=True))
        self.runs = self._cut(self._pieces, merge=reach is Reach.ELEMENT)
        self._is_merged = any(len(run.pieces) > 1 for run in self.runs)
        self._without: Set[int] = frozenset()
        groups: list[list[torch.Tensor]] = [[] for _ in self.settings]
        for run in self.runs:
            groups[run.group].append(run.tensor)
        self._optimizer = clone_for(optimizer, groups, self.settings)
        self._kept: TensorState | None = None
        """The state of before an early update, until every rank has entered its step."""
        self._loaded: TensorState | None = None
        """State that was loaded since the last update."""
        self.lock = threading.Lock()
        """Held by a thread that reads state, and while it is kept or loaded. Updates need none:
        while a rank reads, no owner can update, since that takes the reader's gradients."""
        # Without torch's wrapper: hooks and profiling belong to the user's own call of step().
        self._step = inspect.unwrap(type(optimizer).step)
        self._no_grad = torch.no_grad()

    def _cut(self, pieces: list[Piece], *, merge: bool) -> list[Run]:
        """Cut the strip into runs; with `merge` a run may span several parameters."""
        if self._reach is Reach.PARAMETER:
            return [self._run_of([piece], piece.start, piece.stop) for piece in pieces]
        runs: list[Run] = []
        for _, stretch in itertools.groupby(
            pieces, lambda piece: self._param_group_of(piece.slot) if merge else piece.slot.number
        ):
            runs += self._cut_stretch(list(stretch))
        return runs

    def _cut_stretch(self, stretch: list[Piece]) -> list[Run]:
        settings = self.settings[self._param_group_of(stretch[0].slot)]
        is_whole = settings.get("fused") or settings.get("foreach")
        first, last = stretch[0].start, stretch[-1].stop
        length = last - first if is_whole else CACHE_ELEMENTS
        if first == last:  # parameters without elements: some state belongs to them as a whole
            return [self._run_of(stretch, first, last)]
        runs = []
        for start in range(first, last, length):
            stop = min(start + length, last)
            inside = [
                Piece(piece.slot, max(piece.start, start), min(piece.stop, stop))
                for piece in stretch
                if (piece.start < stop and start < piece.stop)
                or (piece.start == piece.stop and start <= piece.start < stop + (stop == last))
            ]
            runs.append(self._run_of(inside, start, stop))
        return runs

    def _run_of(self, pieces: list[Piece], start: int, stop: int) -> Run:
        parameters, gradients = self._memory
        slot = pieces[0].slot
        if self._reach is Reach.PARAMETER:
            tensor, gradient = view_of(parameters, slot).detach(), view_of(gradients, slot)
        else:
            tensor, gradient = parameters[start:stop].detach(), gradients[start:stop]
        tensor.grad = gradient
        return Run(start, stop, tensor, gradient, self._param_group_of(slot), pieces)

    def _leave_out(self, numbers: Set[int]) -> None:
        """Leave these parameters out of the next update: no rank has a gradient for them."""
        if numbers == self._without:
            return
        self._without = numbers
        if self._is_merged:
            self._separate()
        for run in self.runs:
            is_left_out = run.pieces[0].slot.number in numbers
            run.tensor.grad = None if is_left_out else run.gradient

    def _separate(self) -> None:
        """Cut runs at the ends of parameters from now on: not all are updated in every step."""
        slots = {piece.slot.name: piece.slot for run in self.runs for piece in run.pieces}
        held = {name: list(self.held_of(slot, before_load=True)) for name, slot in slots.items()}
        self.runs = self._cut(self._pieces, merge=False)
        self._is_merged = False
        self._optimizer.state = defaultdict(dict, recut_state(self.runs, held))
        for group in self._optimizer.param_groups:
            group["params"] = []
        for run in self.runs:
            self._optimizer.param_groups[run.group]["params"].append(run.tensor)

    def held_of(
        self, slot: Slot, *, before_load: bool = False
    ) -> Iterator[tuple[int, int, dict[str, Any]]]:
        """Yield the state of a parameter's pieces: start and stop in the bucket, and state.

        It is the state after the last step that every rank has entered: without an early update,
        and with `before_load` also without what was loaded since. Another thread must hold `lock`.
        """
        state: Mapping[torch.Tensor, dict[str, Any]] = self._optimizer.state
        if self._loaded is not None and not before_load:
            state = self._loaded
        elif self._kept is not None:
            state = self._kept
        yield from held_of(slot, self.runs, state, is_cut=self._reach is not Reach.PARAMETER)

    def run(self, update: UpdateSettings) -> None:
        """Update the strip with the settings of one step."""
        recorder = self._traffic.recorder
        if recorder is not None:
            recorder.end_part("work")
        if self._loaded is not None:
            self._take_over_loaded()
        self._leave_out(update.without)
        if self.runs:
            for group, settings in zip(self._optimizer.param_groups, update.groups, strict=True):
                group.update(settings)
            with self._no_grad:
                self._step(self._optimizer)
        if recorder is not None:
            recorder.end_part("update")

    def keep(self, without: frozenset[int]) -> None:
        """Keep the state, so that the next `run`, which leaves out `without`, can be undone."""
        with self.lock:
            if self._loaded is not None:
                self._take_over_loaded()
            self._leave_out(without)
            self._kept = {
                tensor: {key: copied(value) for key, value in state.items()}
                for tensor, state in self._optimizer.state.items()
            }

    def undo(self) -> None:
        """Restore the state that was kept. The caller restores the parameters."""
        with self.lock:
            assert self._kept is not None
            self._optimizer.state = defaultdict(dict, self._kept)
            self._kept = None

    def forget_kept(self) -> None:
        """Forget the state that was kept: every rank has entered the step of the early update."""
        with self.lock:
            self._kept = None

    def load_state(self, whole: Mapping[str, dict[str, Any]], spread: Set[str]) -> None:
        """Load this strip's part of the whole state, by parameter name, for the next update on.

        Until then the state of before can still be read: a peer may be reading it. `spread` are the
        keys of values with one number for each element.
        """
        with self.lock:
            if not can_share_runs(self.runs, whole, spread):
                self._separate()
            self._loaded = cut_state(self.runs, whole, spread)

    def _take_over_loaded(self) -> None:
        assert self._loaded is not None
        self._optimizer.state = defaultdict(dict, self._loaded)
        self._loaded = None
