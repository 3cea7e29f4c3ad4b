"""The class of a parameter while its gradient or its new value is with the comm lane.

The class of a parameter changes in place:

- `GradientTaken`, from its gradient's arrival to `optimizer.step()`: reading `.grad` is refused,
  because the gradient is on its way to other ranks and `.grad` is not the sum (`Guarded` does the
  same all the time, if the exchange does not overlap and `step()` takes the gradients);
- `InFlight`, from `optimizer.step()` to the first use: any torch function that gets it first
  waits for its bucket. This catches uses that no module hook sees (`F.linear(x, other.weight)`,
  tied weights, `.data`, `state_dict()`).

At other times it is a plain `torch.nn.Parameter`, at full speed.

In these classes `.data` shares the parameter's version counter, so that a change through it is
noticed as any other change in place.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import Parameter

from syncline.errors import UsageError


class _Waiters:
    """The function that waits for each parameter, by id: tensors compare elementwise."""

    def __init__(self) -> None:
        self._by_id: dict[int, Callable[[], None]] = {}

    def set(self, parameter: Parameter, wait: Callable[[], None]) -> None:
        key = id(parameter)
        self._by_id[key] = wait
        weakref.finalize(parameter, self._by_id.pop, key, None)

    def wait(self, parameter: Parameter) -> None:
        self._by_id[id(parameter)]()


waiters = _Waiters()


_GRAD: Any = torch.Tensor.grad
"""The descriptor behind `.grad`: reads and writes it whatever the parameter's class."""


def raw_grad(parameter: torch.Tensor) -> torch.Tensor | None:
    """Read `.grad` whatever the parameter's class."""
    gradient: torch.Tensor | None
    if type(parameter) is not InFlight:
        gradient = _GRAD.__get__(parameter)
        return gradient
    with torch._C.DisableTorchFunctionSubclass():
        gradient = _GRAD.__get__(parameter)
    return gradient


def take_grad(parameter: torch.Tensor) -> torch.Tensor | None:
    """Read `.grad` and set it to None, whatever the parameter's class."""
    gradient: torch.Tensor | None
    if type(parameter) is not InFlight:
        gradient = _GRAD.__get__(parameter)
        _GRAD.__set__(parameter, None)
        return gradient
    with torch._C.DisableTorchFunctionSubclass():
        gradient = _GRAD.__get__(parameter)
        _GRAD.__set__(parameter, None)
    return gradient


def put_grad(parameter: torch.Tensor, gradient: torch.Tensor | None) -> None:
    """Set `.grad` whatever the parameter's class."""
    with torch._C.DisableTorchFunctionSubclass():
        _GRAD.__set__(parameter, gradient)


_VERSION: Any = torch.Tensor._version


def version_of(parameter: torch.Tensor) -> int:
    """Read the parameter's version counter without waiting for its value."""
    if type(parameter) is not InFlight:
        return parameter._version
    with torch._C.DisableTorchFunctionSubclass():
        version: int = _VERSION.__get__(parameter)
    return version


_READ = (
    "a parameter's .grad was read between backward() and step(), but it is this rank's part of the "
    "sum alone. To clip, call syncline.clip_grad_norm_(model, max_norm); torch's own "
    "clip_grad_norm_ and GradScaler would go by a part of the sum; to drop gradients, call "
    "syncline.discard_gradients(model) on every rank."
)
_SET = (
    "a parameter's .grad was set between backward() and step(), but the gradient belongs to a sum "
    "over all ranks. To drop gradients, call syncline.discard_gradients(model) on every rank."
)


_DATA: Any = torch.Tensor.data


class Watched(Parameter):
    """A parameter whose `.data` cannot be changed in place unnoticed."""

    @property
    def data(self) -> torch.Tensor:
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        _DATA.__set__(self, value)


class GradientTaken(Watched):
    """A parameter whose gradient has been taken for the next step."""

    @property
    def grad(self) -> torch.Tensor | None:
        raise UsageError(_READ)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        raise UsageError(_SET)

    def __deepcopy__(self, memo: dict[int, Any]) -> Parameter:
        return _plain_copy(self, memo)


class Guarded(Watched):
    """A parameter whose gradient stays in `.grad`, which must not be read, until `step()`."""

    @property
    def grad(self) -> torch.Tensor | None:
        if _GRAD.__get__(self) is not None:
            raise UsageError(_READ)
        return None

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if value is not None or _GRAD.__get__(self) is not None:
            raise UsageError(_SET)

    def __deepcopy__(self, memo: dict[int, Any]) -> Parameter:
        return _plain_copy(self, memo)


class InFlight(Watched):
    """A parameter whose new value may not have arrived yet."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        _wait_for_all(args)
        _wait_for_all(kwargs.values())
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @property
    def grad(self) -> torch.Tensor | None:
        return raw_grad(self)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            _GRAD.__set__(self, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> Parameter:
        waiters.wait(self)
        return _plain_copy(self, memo)


def _wait_for_all(values: Any) -> None:
    for value in values:
        if isinstance(value, InFlight):
            waiters.wait(value)
        elif isinstance(value, list | tuple):
            _wait_for_all(value)


def _plain_copy(parameter: Parameter, memo: dict[int, Any]) -> Parameter:
    if id(parameter) not in memo:
        data = parameter.data.clone(memory_format=torch.preserve_format)
        memo[id(parameter)] = Parameter(data, parameter.requires_grad)
    copied: Parameter = memo[id(parameter)]
    return copied


def become(parameter: Parameter, kind: type[Parameter]) -> None:
    """Change a parameter's class in place. Other subclasses (DTensor) are not changed."""
    if type(parameter) in (Parameter, GradientTaken, Guarded, InFlight):
        parameter.__class__ = kind
