"""Checks optimizer state before it is loaded: names, keys and shapes; and its fingerprint.

Two forms are taken: torch's own (`{"state": ..., "param_groups": ...}`), and values by parameter
name, as `syncline.optimizer_state` returns them.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from syncline.contract import ParamGroups
from syncline.engine.bucket import Slot
from syncline.engine.optimizer import Reach, clone_for, param_group_numbers
from syncline.engine.state import State, bytes_of
from syncline.errors import UsageError

_COMPILED = "_orig_mod."
"""What torch.compile puts into the names of parameters."""
_TRIAL_STEPS = 2
"""Some optimizers make part of their state in the second step."""


def is_torch_format(state: Mapping[Any, Any]) -> bool:
    """Say whether state is what torch's `optimizer.state_dict()` returns."""
    return state.keys() == {"state", "param_groups"}


def rename(state: Mapping[str, dict[str, Any]], slots: Sequence[Slot]) -> State:
    """Return state by the slots' names; refuse names that the model does not train.

    Names that torch.compile changed are taken.
    """
    known = {slot.name.replace(_COMPILED, ""): slot.name for slot in slots}
    found: State = {}
    for name, values in state.items():
        plain = str(name).replace(_COMPILED, "")
        if plain not in known:
            raise UsageError(
                f"the optimizer state holds parameter {str(name)!r:.80}, but the optimizer of this "
                f"model updates no such parameter. It updates {_some(list(known))}."
            )
        found[known[plain]] = values
    return found


def by_name(packed: Mapping[str, Any], optimizer: Optimizer, slots: Sequence[Slot]) -> State:
    """Return the slots' part of state in torch's format, by parameter name."""
    names = {id(slot.parameter): slot.name for slot in slots}
    held = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = [number for group in packed["param_groups"] for number in group["params"]]
    if len(held) != len(numbers):
        raise UsageError(
            f"the optimizer state is of {len(numbers)} parameters, but this optimizer has "
            f"{len(held)}: it belongs to another model."
        )
    found = {}
    for number, parameter in zip(numbers, held, strict=True):
        if number in packed["state"] and id(parameter) in names:
            found[names[id(parameter)]] = packed["state"][number]
    return found


class StateShape:
    """What an optimizer keeps for each parameter, found by a trial on tensors of its own."""

    def __init__(self, optimizer: Optimizer, reach: Reach, settings: ParamGroups) -> None:
        """`settings` are those of the optimizer's groups."""
        self._optimizer = optimizer
        self._reach = reach
        self._settings = settings
        self._groups = param_group_numbers(optimizer)
        self._tried: dict[Any, dict[str, tuple[int, ...] | None]] = {}

    def spread(self, slots: Sequence[Slot]) -> frozenset[str]:
        """Return the keys of values with one number for each element of a parameter."""
        if self._reach is Reach.PARAMETER:
            return frozenset()
        numbers = {self._groups[id(slot.parameter)] for slot in slots}
        small = (2, 3)
        return frozenset(
            key
            for number in numbers
            for key, shape in self._try(number, small, torch.float32).items()
            if shape == small
        )

    def keeps_any(self, slots: Sequence[Slot]) -> bool:
        """Say whether the optimizer keeps state at all."""
        return any(self._expected(slot) for slot in slots)

    def check(self, state: State, slots: Sequence[Slot]) -> None:
        """Refuse state whose keys or shapes are not those of this optimizer."""
        for slot in slots:
            if slot.name in state:
                self._check(slot, state[slot.name])

    def _check(self, slot: Slot, values: Mapping[str, Any]) -> None:
        expected = self._expected(slot)
        name = type(self._optimizer).__name__
        if values.keys() != expected.keys():
            raise UsageError(
                f"the optimizer state of parameter {slot.name} holds {_some(sorted(values))}, but "
                f"{name} keeps {_some(sorted(expected))}. Load the state of an optimizer of the "
                "same kind and settings."
            )
        for key, value in values.items():
            shape = tuple(value.shape) if isinstance(value, torch.Tensor) else None
            wanted = expected[key]
            if shape != wanted and None not in (shape, wanted) and {shape, wanted} != {(), (1,)}:
                raise UsageError(
                    f"the optimizer state {key} of parameter {slot.name} has shape {shape}, but "
                    f"{name} keeps {wanted} for this parameter. It belongs to another model."
                )

    def _expected(self, slot: Slot) -> dict[str, tuple[int, ...] | None]:
        """Return the shape under each key, for a parameter; None for what is no tensor."""
        number, own = self._groups[id(slot.parameter)], slot.shape
        if self._reach is Reach.PARAMETER:
            return self._try(number, own, slot.parameter.dtype)
        small = (2, 3)  # elementwise: a small tensor shows as much as a large one
        tried = self._try(number, small, slot.parameter.dtype)
        return {key: own if shape == small else shape for key, shape in tried.items()}

    def _try(
        self, number: int, shape: tuple[int, ...], dtype: torch.dtype
    ) -> dict[str, tuple[int, ...] | None]:
        if (number, shape, dtype) not in self._tried:
            tensor = torch.zeros(shape, dtype=dtype)
            clone = clone_for(self._optimizer, [[tensor]], [self._settings[number]])
            for _ in range(_TRIAL_STEPS):
                tensor.grad = torch.ones_like(tensor)
                clone.step()
            self._tried[number, shape, dtype] = {
                key: tuple(value.shape) if isinstance(value, torch.Tensor) else None
                for key, value in clone.state[tensor].items()
            }
        return self._tried[number, shape, dtype]


def fingerprint(state: State, settings: Sequence[Mapping[str, Any]]) -> int:
    """Return a 32-bit number that differs, in all likelihood, if state or settings do."""
    crc = zlib.crc32(repr([sorted(group.items()) for group in settings]).encode())
    for name in sorted(state):
        for key, value in sorted(state[name].items()):
            crc = zlib.crc32(f"{name} {key}".encode(), crc)
            if isinstance(value, torch.Tensor):
                crc = zlib.crc32(bytes_of(value.detach().contiguous().reshape(-1)), crc)
            else:
                crc = zlib.crc32(repr(value).encode(), crc)
    return crc


def _some(names: Sequence[str]) -> str:
    if not names:
        return "nothing"
    few = ", ".join(names[:4])
    return few if len(names) <= 4 else f"{few} and {len(names) - 4} more"
