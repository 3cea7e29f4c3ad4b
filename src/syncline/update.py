"""The user's optimizer, run on a strip.

A shallow copy of the optimizer gets the strip's pieces as its parameters and keeps its state for
them alone: each rank holds 1/N of it. Hyper-parameters are those that the user's optimizer had on
entering `step()`, so that a scheduler's next move cannot race the comm lane.

Pieces are one per parameter. Where the optimizer is elementwise and not fused they are cut
further, at whole blocks, to what a core's cache holds: the several passes of an update then read
memory once.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import torch
from torch.optim import Optimizer

from syncline.bucket import Bucket, Piece, Slot, pieces_of, view_of
from syncline.errors import UsageError

CACHE_ELEMENTS = 1 << 16

Hyper = list[dict[str, Any]]
"""The settings of each parameter group, without the parameters."""


class Reach(Enum):
    """How far an optimizer looks when it updates one number."""

    ELEMENT = "each element by itself"
    PARAMETER = "each parameter as a whole"


def snapshot(optimizer: Optimizer) -> Hyper:
    return [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


def _clone(
    optimizer: Optimizer, groups: Sequence[Sequence[torch.Tensor]], hyper: Hyper
) -> Optimizer:
    """Copy an optimizer for other tensors: same rule and settings, no state, no hooks."""
    clone = copy.copy(optimizer)
    clone.state = defaultdict(dict)
    clone.param_groups = [
        {**settings, "params": list(tensors)}
        for settings, tensors in zip(hyper, groups, strict=True)
    ]
    clone._optimizer_step_pre_hooks = OrderedDict()
    clone._optimizer_step_post_hooks = OrderedDict()
    return clone


def _try(
    optimizer: Optimizer, tensors: list[torch.Tensor], gradients: list[list[torch.Tensor]]
) -> None:
    """Take steps with a copy of the optimizer, one for each list of gradients."""
    hyper = snapshot(optimizer)[:1]
    clone = _clone(optimizer, [tensors], hyper)
    for step in gradients:
        for tensor, gradient in zip(tensors, step, strict=True):
            tensor.grad = gradient.clone()
        clone.step()


def find_reach(optimizer: Optimizer) -> Reach:
    """Find out by trying: does the update of a part equal the part of the update?"""
    generator = torch.Generator().manual_seed(0)
    shape = (32, 48)

    def draw() -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    start, other = draw(), draw()
    gradients = [draw() for _ in range(3)]
    other_gradients = [draw() for _ in range(3)]
    try:
        whole = start.clone()
        _try(optimizer, [whole], [[gradient] for gradient in gradients])
    except Exception as error:
        raise UsageError(
            f"optimizer {type(optimizer).__name__} cannot update a parameter by itself ({error}). "
            "Syncline spreads the update over ranks: use an optimizer that treats each parameter "
            "alone, such as SGD or AdamW."
        ) from None
    together = [start.clone(), other.clone()]
    both = [list(pair) for pair in zip(gradients, other_gradients, strict=True)]
    _try(optimizer, together, both)
    if not torch.equal(together[0], whole):
        raise UsageError(
            f"optimizer {type(optimizer).__name__} updates a parameter by looking at others, but "
            "Syncline spreads parameters over ranks. Use one that treats each parameter alone, "
            "such as SGD or AdamW."
        )
    parts = [part.clone() for part in start.view(-1).split(512)]
    try:
        _try(optimizer, parts, [list(gradient.view(-1).split(512)) for gradient in gradients])
    except Exception:
        return Reach.PARAMETER  # Muon, for one, refuses anything but matrices
    return Reach.ELEMENT if torch.equal(torch.cat(parts), whole.view(-1)) else Reach.PARAMETER


class StripUpdate:
    """The optimizer of one strip of one bucket, with its state."""

    def __init__(
        self,
        optimizer: Optimizer,
        bucket: Bucket,
        start: int,
        stop: int,
        reach: Reach,
        group_of: Callable[[Slot], int],
    ) -> None:
        self.pieces: list[tuple[Piece, torch.Tensor, torch.Tensor]] = []
        parameters, gradients = bucket.parameters.memory.mine, bucket.gradient.slots[0].mine
        hyper = snapshot(optimizer)
        groups: list[list[torch.Tensor]] = [[] for _ in hyper]
        for piece in pieces_of(bucket, start, stop):
            settings = hyper[group_of(piece.slot)]
            one_piece = settings.get("fused") or settings.get("foreach")
            length = piece.stop - piece.start if one_piece else CACHE_ELEMENTS
            if reach is Reach.PARAMETER:
                tensor = view_of(parameters, piece.slot).detach()
                self.pieces.append((piece, tensor, view_of(gradients, piece.slot)))
                groups[group_of(piece.slot)].append(tensor)
                continue
            for first in range(piece.start, piece.stop, length):
                last = min(first + length, piece.stop)
                part = Piece(piece.slot, first, last)
                tensor = parameters[first:last].detach()
                self.pieces.append((part, tensor, gradients[first:last]))
                groups[group_of(piece.slot)].append(tensor)
        for _, tensor, gradient in self.pieces:
            tensor.grad = gradient
        self._optimizer = _clone(optimizer, groups, hyper)
        self.hyper = hyper
        self._without: frozenset[int] = frozenset()

    def leave_out(self, numbers: frozenset[int]) -> None:
        """Do not touch these parameters in the next update: no rank has a gradient for them."""
        if numbers == self._without:
            return
        self._without = numbers
        for piece, tensor, gradient in self.pieces:
            tensor.grad = None if piece.slot.number in numbers else gradient

    def run(self) -> None:
        if self.pieces:
            for group, settings in zip(self._optimizer.param_groups, self.hyper, strict=True):
                group.update(settings)
            self._optimizer.step()

    def state_of(self, tensor: torch.Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self._optimizer.state[tensor]
        return state

    def load_state(self, slot: Slot, state: dict[str, Any]) -> None:
        """Take this strip's part of a parameter's whole state."""
        for piece, tensor, _ in self.pieces:
            if piece.slot is not slot:
                continue
            mine = self._optimizer.state[tensor]
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and value.shape == slot.parameter.shape:
                    flat = flatten_like(slot.parameter, value)
                    part = flat[piece.start - slot.offset : piece.stop - slot.offset]
                    mine[key] = part.clone().view(tensor.shape)
                elif isinstance(value, torch.Tensor):
                    mine[key] = value.clone()
                else:
                    mine[key] = copy.deepcopy(value)


def flatten_like(parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Lay out a tensor flat, in the order in which the parameter lies in memory."""
    laid_out = torch.empty_like(parameter, dtype=value.dtype, memory_format=torch.preserve_format)
    laid_out = laid_out.detach().copy_(value)
    return laid_out.as_strided((laid_out.numel(),), (1,))
