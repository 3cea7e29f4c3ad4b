"""When each layer's forward begins and when its gradients are there, by hooks on a plain model.

Forward of a layer lasts until the next layer begins that was not used before, as operations are
counted (`count.py`). Backward of a layer lasts from the gradient before its own to its last one.
What hooks cost is measured by itself and taken off, so that it is in no layer.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import Parameter

from syncline.engine.parameters import InFlight, Watched, become, waiters

Moments = list[tuple[int, float]]
"""The number of a layer and when something happened to it, in order."""

_CALLS, _BATCHES = 300, 7


class LayerClock:
    """Notes the moments of a model's layers while it listens."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        """`names` are those of the modules that own parameters, in the order of first use."""
        self._model = model
        number_of = {name: number for number, name in enumerate(names)}
        self._modules = {n: m for n, m in model.named_modules() if n in number_of}
        self._number_of = number_of
        self._unseen: list[Parameter] = []
        """Parameters that are used without calling their module."""
        self._layer_of: list[int] = []
        self.begun: Moments = []
        self.ready: Moments = []

    def watch_unseen(self) -> None:
        """Watch the parameters of layers of which nothing was noted in a forward."""
        seen = {number for number, _ in self.begun}
        for name, module in self._modules.items():
            number = self._number_of[name]
            if number not in seen:
                for parameter in module.parameters(recurse=False):
                    waiters.set(parameter, self._touch, len(self._unseen))
                    self._unseen.append(parameter)
                    self._layer_of.append(number)

    def _touch(self, index: int) -> None:
        self.begun.append((self._layer_of[index], time.perf_counter()))
        become(self._unseen[index], Watched)

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Note moments inside the block."""
        self.begun, self.ready = [], []
        handles = [*self._hook_modules(), *self._hook_parameters()]
        for parameter in self._unseen:
            become(parameter, InFlight)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            for parameter in self._unseen:
                become(parameter, Watched)

    def _hook_modules(self) -> Iterator[Any]:
        for name, module in self._modules.items():
            yield module.register_forward_pre_hook(_noting(self.begun, self._number_of[name]))

    def _hook_parameters(self) -> Iterator[Any]:
        done: set[int] = set()
        for number, name in sorted((self._number_of[name], name) for name in self._modules):
            for parameter in self._modules[name].parameters(recurse=False):
                if parameter.requires_grad and id(parameter) not in done:
                    done.add(id(parameter))
                    note = _noting(self.ready, number)
                    yield parameter.register_post_accumulate_grad_hook(note)


def _noting(moments: Moments, number: int) -> Any:
    return functools.partial(_note, moments, number, time.perf_counter)


def _note(moments: Moments, number: int, now: Any, *_: Any) -> None:
    moments.append((number, now()))


def forward_of(
    begun: Moments, began_s: float, ended_s: float, layers: int, hook_s: float = 0.0
) -> list[float]:
    """Return each layer's seconds of a forward.

    What comes before the first layer is the first layer's.

    >>> forward_of([(0, 1.0), (1, 3.0), (0, 4.0)], 0.0, 9.0, 2)
    [3.0, 6.0]
    """
    found, newest, seen, last_s = [0.0] * layers, begun[0][0] if begun else 0, set(), began_s
    for number, moment_s in begun:
        found[newest] += max(0.0, moment_s - last_s - hook_s)
        last_s = moment_s
        if number not in seen:
            seen.add(number)
            newest = number
    found[newest] += ended_s - last_s
    return found


def backward_of(
    ready: Moments, began_s: float, ended_s: float, layers: int, hook_s: float = 0.0
) -> list[float]:
    """Return each layer's seconds of a backward; what follows the last gradient is its layer's.

    >>> backward_of([(1, 2.0), (1, 3.0), (0, 5.0)], 0.0, 5.5, 2)
    [2.5, 3.0]
    """
    found, last_s = [0.0] * layers, began_s
    for number, moment_s in ready:
        found[number] += max(0.0, moment_s - last_s - hook_s)
        last_s = moment_s
    found[ready[-1][0] if ready else layers - 1] += ended_s - last_s
    return found


def hook_costs() -> tuple[float, float]:
    """Return what a hook costs in forward and in backward, in seconds: the least of some trials."""
    module, parameter, moments = nn.Identity(), nn.Parameter(torch.zeros(1)), list[Any]()
    forward_s, backward_s = _forwards(module), _backwards(parameter)
    module.register_forward_pre_hook(_noting(moments, 0))
    parameter.register_post_accumulate_grad_hook(_noting(moments, 0))
    return (
        max(0.0, _forwards(module) - forward_s),
        max(0.0, _backwards(parameter) - backward_s),
    )


def _forwards(module: nn.Module) -> float:
    def once() -> None:
        module(None)

    return _least(once)


def _backwards(parameter: Parameter) -> float:
    output = parameter.sum()

    def once() -> None:
        output.backward(retain_graph=True)

    return _least(once)


def _least(once: Any) -> float:
    found = []
    for _ in range(_BATCHES):
        began_s = time.perf_counter()
        for _ in range(_CALLS):
            once()
        found.append((time.perf_counter() - began_s) / _CALLS)
    return min(found)
