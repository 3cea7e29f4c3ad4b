"""The optimizer state of one strip: cut out of whole values, and given back by parameter.

A run may span several parameters (`optimizer.py`). Its state is then one tensor for all of them,
and values such as a step count are shared: parameters whose values differ cannot share a run.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from syncline.engine.bucket import Slot
    from syncline.engine.optimizer import Run

TensorState = dict[torch.Tensor, dict[str, Any]]
"""An optimizer's own state, by the tensors that it updates."""


def copied(value: Any) -> Any:
    """Return a copy of a state value."""
    return value.clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def is_spread(value: Any, num_elements: int) -> bool:
    """Say whether a state value has one number for each element."""
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.numel() == num_elements


def flatten_like(parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return a tensor flattened in the order in which the parameter lies in memory."""
    laid_out = torch.empty_like(parameter, dtype=value.dtype, memory_format=torch.preserve_format)
    laid_out = laid_out.detach().copy_(value)
    return laid_out.as_strided((laid_out.numel(),), (1,))


def zeros_like(slot: Slot, dtype: torch.dtype) -> torch.Tensor:
    """Return zeros shaped like the whole parameter, and lying in memory like it."""
    if slot.is_split:
        return torch.zeros(slot.shape, dtype=dtype)
    return torch.zeros_like(slot.parameter.detach(), dtype=dtype)


def _flat_part(slot: Slot, value: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a value of the whole parameter, flat."""
    if slot.is_split:
        first = slot.first_element
        return value.reshape(-1)[first : first + slot.num_elements]
    return flatten_like(slot.parameter, value)


def held_of(
    slot: Slot, runs: Sequence[Run], state: Mapping[torch.Tensor, dict[str, Any]], *, is_cut: bool
) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Yield the state of a parameter's pieces: start and stop in the bucket, and state.

    `is_cut` is False if the optimizer updates whole parameters only.
    """
    for run in runs:
        for piece in run.pieces:
            if piece.slot is not slot or run.tensor not in state:
                continue
            found = {}
            for key, value in state[run.tensor].items():
                if is_cut and is_spread(value, run.stop - run.start):
                    value = value[piece.start - run.start : piece.stop - run.start]
                found[key] = value
            yield piece.start, piece.stop, found


def spread_keys(whole: Mapping[str, dict[str, Any]], slots: Sequence[Slot]) -> frozenset[str]:
    """Return the keys of values that are shaped like their parameters."""
    return frozenset(
        key
        for slot in slots
        for key, value in whole.get(slot.name, {}).items()
        if isinstance(value, torch.Tensor) and value.dim() and tuple(value.shape) == slot.shape
    )


def can_share_runs(
    runs: Sequence[Run], whole: Mapping[str, dict[str, Any]], spread: Set[str]
) -> bool:
    """Say whether the parameters of each run have state with the same keys and common values."""
    for run in runs:
        first, *others = (whole.get(piece.slot.name) for piece in run.pieces)
        for other in others:
            if first is None or other is None:
                if first is not other:
                    return False
            elif not _is_alike(first, other, spread):
                return False
    return True


def _is_alike(one: dict[str, Any], other: dict[str, Any], spread: Set[str]) -> bool:
    if one.keys() != other.keys():
        return False
    for key in one.keys() - spread:
        mine, its = one[key], other[key]
        if isinstance(mine, torch.Tensor) and isinstance(its, torch.Tensor):
            if mine.dtype != its.dtype or not torch.equal(mine, its):
                return False
        elif type(mine) is not type(its) or mine != its:
            return False
    return True


def cut_state(
    runs: Sequence[Run], whole: Mapping[str, dict[str, Any]], spread: Set[str]
) -> TensorState:
    """Return the state of a strip's runs, cut out of the parameters' whole state by name.

    Values under the keys in `spread` have one number for each element; the others belong to a
    parameter as a whole.
    """
    found: TensorState = {}
    for run in runs:
        for piece in run.pieces:
            slot = piece.slot
            if slot.name not in whole:
                continue
            mine = found.setdefault(run.tensor, {})
            for key, value in whole[slot.name].items():
                if key not in spread or not isinstance(value, torch.Tensor):
                    mine[key] = copied(value)
                    continue
                flat = _flat_part(slot, value)
                target = mine.setdefault(key, torch.zeros_like(run.tensor, dtype=value.dtype))
                part = flat[piece.start - slot.offset : piece.stop - slot.offset]
                target[piece.start - run.start : piece.stop - run.start] = part
    return found


def recut_state(
    runs: Sequence[Run], held: Mapping[str, Sequence[tuple[int, int, dict[str, Any]]]]
) -> TensorState:
    """Return the state of runs of one parameter each, from that of the parameters' pieces."""
    found: TensorState = {}
    for run in runs:
        for start, stop, state in held[run.pieces[0].slot.name]:
            first, last = max(start, run.start), min(stop, run.stop)
            if first >= last and run.start < run.stop:
                continue
            mine = found.setdefault(run.tensor, {})
            for key, value in state.items():
                if not is_spread(value, stop - start):
                    mine[key] = copied(value)
                    continue
                target = mine.setdefault(key, torch.empty_like(run.tensor, dtype=value.dtype))
                part = value[first - start : last - start]
                target[first - run.start : last - run.start] = part
    return found
