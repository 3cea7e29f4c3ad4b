"""Pickling and deep copies of a distributed model and its optimizer: they give plain objects.

A copy has plain parameters in memory of its own, none of our hooks, and the whole optimizer state.
Loading it needs no session. `pickle`, `torch.save` and `copy.deepcopy` ask an object for its state
through `__getstate__`, and take one that belongs to the object itself before its class's. A shallow
copy (`copy.copy`) asks too; it shares everything with its original, as always.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn import Parameter
from torch.optim import Optimizer

from syncline.engine.bucket import Slot
from syncline.engine.parameters import version_of

_OURS = ("__getstate__", "__deepcopy__")


class Copies:
    """Makes plain copies of one model and its optimizer."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        slots: Sequence[Slot],
        is_moved: Callable[[torch.Tensor | None], bool],
        synchronize: Callable[[], None],
    ) -> None:
        """`model` is the user's own module. `is_moved` says whether a buffer lies in memory of the
        engine; `synchronize` waits until the model is up to date."""
        self._modules = list(model.modules())
        self._optimizer = optimizer
        self._is_moved = is_moved
        self._synchronize = synchronize
        self._distributed = {id(slot.parameter) for slot in slots}
        self._plain: weakref.WeakValueDictionary[int, Parameter] = weakref.WeakValueDictionary()
        """Copies of parameters that a pickler holds now: parameters that are tied stay tied."""
        self._versions: dict[int, int] = {}
        for module in self._modules:
            vars(module)["__getstate__"] = functools.partial(self._state_of, module)
            if hasattr(type(module), "__deepcopy__"):  # parametrized modules have one
                vars(module)["__deepcopy__"] = functools.partial(self._deep_copy, module)
        vars(optimizer)["__getstate__"] = self._state_of_optimizer

    def remove(self) -> None:
        """Leave copying to the objects' own classes again."""
        for one in (*self._modules, self._optimizer):
            for name in _OURS:
                vars(one).pop(name, None)

    def _state_of(self, module: nn.Module) -> Any:
        self._synchronize()
        state: Any = type(module).__getstate__(module)
        if not isinstance(state, dict):
            return state
        if _is_shallow(sys._getframe(1)):
            return {name: value for name, value in state.items() if name not in _OURS}
        return self._without_ours(state)

    def _deep_copy(self, module: nn.Module, memo: dict[int, Any]) -> nn.Module:
        self._synchronize()
        with _replaced(vars(module), self._without_ours(vars(module))):
            kind: Any = type(module)
            copied: nn.Module = kind.__deepcopy__(module, memo)
        return copied

    def _without_ours(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a module's state without our hooks, with copies of what lies in our memory."""
        plain = {name: value for name, value in state.items() if name not in _OURS}
        for name, value in plain.items():
            if name.endswith("_hooks") and isinstance(value, dict):
                kept = [(key, hook) for key, hook in value.items() if not _is_ours(hook)]
                plain[name] = type(value)(kept)
        plain["_parameters"] = {k: self._copy_of(p) for k, p in state["_parameters"].items()}
        plain["_buffers"] = {
            name: _own_memory(buffer) if self._is_moved(buffer) else buffer
            for name, buffer in state["_buffers"].items()
        }
        return plain

    def _copy_of(self, parameter: Parameter | None) -> Parameter | None:
        """Return a plain copy of a parameter, the same one as long as somebody holds it."""
        if parameter is None or id(parameter) not in self._distributed:
            return parameter
        key, version = id(parameter), version_of(parameter)
        copied = self._plain.get(key)
        if copied is None or self._versions[key] != version:
            copied = Parameter(_own_memory(parameter.detach()), parameter.requires_grad)
            vars(copied).update(vars(parameter))
            self._plain[key], self._versions[key] = copied, version
        return copied

    def _state_of_optimizer(self) -> dict[str, Any]:
        optimizer = self._optimizer
        state = dict(type(optimizer).__getstate__(optimizer))
        if _is_shallow(sys._getframe(1)):
            return state
        self._synchronize()
        held = [p for group in optimizer.param_groups for p in group["params"]]
        whole = optimizer.state_dict()["state"]
        state["state"] = defaultdict(dict)
        for key, value in whole.items():
            state["state"][self._copy_of(held[key]) if isinstance(key, int) else key] = value
        state["param_groups"] = [
            {**group, "params": [self._copy_of(p) for p in group["params"]]}
            for group in optimizer.param_groups
        ]
        return state


def _own_memory(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.preserve_format)


def _is_shallow(caller: FrameType) -> bool:
    return caller.f_code is copy.copy.__code__


def _is_ours(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("syncline.")


@contextlib.contextmanager
def _replaced(mapping: dict[str, Any], other: dict[str, Any]) -> Iterator[None]:
    """Let a mapping hold what another one holds, for the block."""
    before = dict(mapping)
    mapping.clear()
    mapping.update(other)
    try:
        yield
    finally:
        mapping.clear()
        mapping.update(before)
