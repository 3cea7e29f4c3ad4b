"""The order in which forward first uses a model's parameters, for real and virtual time.

A parameter is used when a module that owns it is called, or when any torch function gets it:
weights are also used outside their module (tied weights, `F.linear(x, other.weight)`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from typing import Any

from torch import nn
from torch.nn import Parameter

from syncline.engine.parameters import InFlight, Watched, become, waiters

_READ_BELOW = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer, nn.MultiheadAttention)
"""Modules that read the parameters of their submodules without calling these."""


def owners_of(
    model: nn.Module, parameters: Sequence[Parameter]
) -> Iterator[tuple[nn.Module, list[int]]]:
    """Yield every module with the numbers of the parameters that its own forward reads."""
    number_of = {id(parameter): number for number, parameter in enumerate(parameters)}
    for module in model.modules():
        own = module.parameters(recurse=isinstance(module, _READ_BELOW))
        yield module, [number_of[id(p)] for p in own if id(p) in number_of]


def order_of(
    first_use: Sequence[int], with_gradient: Set[int], num_parameters: int
) -> tuple[list[int], list[int]]:
    """Return the order in which parameters lie in buckets, and the parameters without gradient.

    Parameters with a gradient come in their order of first use; those whose use was not seen come
    after them.

    >>> order_of([2, 0], {0, 1, 2}, 4)
    ([2, 0, 1], [3])
    """
    seen = dict.fromkeys(number for number in first_use if number in with_gradient)
    order = [*seen, *(number for number in sorted(with_gradient) if number not in seen)]
    return order, [number for number in range(num_parameters) if number not in with_gradient]


class FirstUse:
    """Records the order while forward runs for the first time."""

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        self._parameters = parameters
        self.order: list[int] = []
        """Numbers of the parameters used so far."""
        for parameter in parameters:
            become(parameter, InFlight)  # so that its first use is recorded

    def touch(self, number: int) -> None:
        """Record that a parameter is used for the first time."""
        self.order.append(number)
        become(self._parameters[number], Watched)

    def touch_all(self, numbers: Sequence[int]) -> None:
        """Record that a module that owns these parameters is called."""
        for number in numbers:
            if type(self._parameters[number]) is InFlight:
                self.touch(number)

    def watch(self, model: nn.Module) -> None:
        """Record uses with this object's own hooks, on a model without a `Waiting`."""
        for number, parameter in enumerate(self._parameters):
            waiters.set(parameter, self.touch, number)
        for module, numbers in owners_of(model, self._parameters):
            if numbers:
                module.register_forward_pre_hook(self._make_hook(numbers))

    def _make_hook(self, numbers: list[int]) -> Any:
        return lambda *_: self.touch_all(numbers)
