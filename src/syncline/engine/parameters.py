"""The class of a parameter while its gradient or its new value is with the comm lane.

The class of a parameter changes in place:

- `GradientTaken`, from its gradient's arrival to `optimizer.step()`: reading `.grad` is refused,
  because the gradient is on its way to other ranks and `.grad` is not the sum (`Guarded` does the
  same all the time, if the exchange does not overlap and `step()` takes the gradients);
- `InFlight`, from `optimizer.step()` to the first use: any torch function that gets it first
  waits for its bucket. This catches uses that no module hook sees (`F.linear(x, other.weight)`,
  tied weights, `.data`, `state_dict()`);
- `UsedUp`, from that first use to `zero_grad()`: reading `.grad` is refused, because the last
  step's gradient is not there any more;
- `BetweenShards`, from a `step()` that ended a shard, but not the step, to the next batch: any read
  of its value is refused, because with more ranks the parameter would be updated by now.

At other times it is `Watched`, which has the full speed of a plain `torch.nn.Parameter`.

In all these classes `.data` shares the parameter's version counter, so that a change through it is
noticed as any other change in place.
"""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from itertools import repeat
from typing import Any

import torch
from torch.nn import Parameter

from syncline.engine.spent import is_only_zeros, is_spent, spent_of
from syncline.errors import UsageError


class _Waiters:
    """The method that waits for each tensor, by id: tensors compare elementwise.

    Methods are held weakly: what waits for a model also holds it, and it must end with its users.
    """

    def __init__(self) -> None:
        self._by_id: dict[int, tuple[weakref.WeakMethod[Callable[[int], None]], int]] = {}

    def set(self, parameter: Parameter, wait: Callable[[int], None], number: int) -> None:
        """Let the next use of a parameter in flight call `wait` with this number."""
        self.hold(parameter, wait, number)
        weakref.finalize(parameter, self._by_id.pop, id(parameter), None)

    def hold(self, tensor: torch.Tensor, wait: Callable[[int], None], number: int) -> None:
        """Set it for a tensor that the caller keeps alive until `drop`."""
        self._by_id[id(tensor)] = (weakref.WeakMethod(wait), number)

    def drop(self, tensor: torch.Tensor) -> None:
        self._by_id.pop(id(tensor), None)

    def wait(self, tensor: Any) -> None:
        method, number = self._by_id[id(tensor)]
        wait = method()
        if wait is not None:  # else nothing is under way any more
            wait(number)


waiters = _Waiters()


_GRAD: Any = torch.Tensor.grad
"""The descriptor behind `.grad`: reads and writes it whatever the parameter's class."""


def raw_grad(parameter: torch.Tensor) -> torch.Tensor | None:
    """Read `.grad` whatever the parameter's class."""
    gradient: torch.Tensor | None
    if type(parameter) not in _WITH_FUNCTION:
        gradient = _GRAD.__get__(parameter)
        return gradient
    with torch._C.DisableTorchFunctionSubclass():
        gradient = _GRAD.__get__(parameter)
    return gradient


def waiting_grad(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient that waits in `.grad` for a step; zeros of `zero_grad()` are none."""
    gradient = raw_grad(parameter)
    return None if gradient is None or is_only_zeros(parameter, gradient) else gradient


def take_grad(parameter: torch.Tensor) -> torch.Tensor | None:
    """Read `.grad` and set it to None, whatever the parameter's class."""
    gradient: torch.Tensor | None
    if type(parameter) not in _WITH_FUNCTION:
        gradient = _GRAD.__get__(parameter)
        _GRAD.__set__(parameter, None)
        return gradient
    with torch._C.DisableTorchFunctionSubclass():
        gradient = _GRAD.__get__(parameter)
        _GRAD.__set__(parameter, None)
    return gradient


def raw_grads(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor | None]:
    """Read `.grad` of many parameters, without a step in Python for each."""
    with torch._C.DisableTorchFunctionSubclass():
        return list(map(_GRAD.__get__, parameters))


def drop_grads(parameters: Iterable[torch.Tensor]) -> None:
    """Set `.grad` of many parameters to None, without a step in Python for each."""
    with torch._C.DisableTorchFunctionSubclass():
        deque(map(_GRAD.__set__, parameters, repeat(None)), maxlen=0)


def put_grad(parameter: torch.Tensor, gradient: torch.Tensor | None) -> None:
    """Set `.grad` whatever the parameter's class."""
    with torch._C.DisableTorchFunctionSubclass():
        _GRAD.__set__(parameter, gradient)


_VERSION: Any = torch.Tensor._version


def version_of(parameter: torch.Tensor) -> int:
    """Read the parameter's version counter without waiting for its value."""
    if type(parameter) not in _WITH_FUNCTION:
        return parameter._version
    with torch._C.DisableTorchFunctionSubclass():
        version: int = _VERSION.__get__(parameter)
    return version


_READ = (
    "a parameter's .grad was read between backward() and step(), but it is this rank's part of the "
    "sum alone. To clip, call syncline.clip_grad_norm_(model, max_norm) or "
    "syncline.clip_grad_value_(model, value), which returns or changes the sum; torch's own "
    "clipping and GradScaler would go by a part of it. To drop gradients, call zero_grad()."
)
_SET = (
    "a parameter's .grad was set between backward() and step(), but the gradient belongs to a sum "
    "over all ranks. To drop all gradients, call optimizer.zero_grad() or "
    "syncline.discard_gradients(model) on every rank."
)
_AFTER_STEP = (
    "a parameter's .grad was read after step(), but the sum of the gradients lies in strips on the "
    "ranks, and no rank has all of it. For the norm, use what syncline.clip_grad_norm_(model, "
    "float('inf')) returns before step()."
)
_BETWEEN = (
    "a parameter was read after a step() that ended a shard, not the step: this rank computes "
    "several shards a step, and parameters change after the last. Ask `if "
    "syncline.step_ended(model):` first, or loop over `for step in syncline.shards(loader)`."
)

_COMPILER = ("torch._subclasses.meta_utils", "torch._dynamo.variables.builder")
"""Where torch.compile copies what it knows of a parameter. Its `.grad` does not enter the graph."""
_CASTS = "torch.nn.modules.module"
"""Where `model.to()` looks for gradients that it must move too."""


def _refuse_read(parameter: torch.Tensor, why: str) -> torch.Tensor | None:
    """Refuse a read of `.grad`, unless torch itself looks whether there is one."""
    reader = sys._getframe(2).f_globals.get("__name__")
    if reader in _COMPILER:
        return None
    if reader == _CASTS and why is _AFTER_STEP:
        return raw_grad(parameter)
    raise UsageError(why)


def _set_grad(parameter: torch.Tensor, value: torch.Tensor | None) -> None:
    """Set `.grad`: after a step this zeroes it, or replaces it by a gradient of the user's own."""
    spent = spent_of(parameter)
    if spent is not None and is_spent(parameter):
        spent.zero_one(parameter, value)
    put_grad(parameter, value)


_DATA: Any = torch.Tensor.data


class Watched(Parameter):
    """A parameter with plain copies, whose `.data` cannot be changed in place unnoticed."""

    @property
    def data(self) -> torch.Tensor:
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        _DATA.__set__(self, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> Parameter:
        return _plain_copy(self, memo)


class GradientTaken(Watched):
    """A parameter whose gradient has been taken for the next step."""

    @property
    def grad(self) -> torch.Tensor | None:
        return _refuse_read(self, _READ)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        raise UsageError(_SET)


class Guarded(Watched):
    """A parameter whose gradient stays in `.grad`, which must not be read, until `step()`."""

    @property
    def grad(self) -> torch.Tensor | None:
        if is_spent(self):
            return _refuse_read(self, _AFTER_STEP)
        return raw_grad(self) if waiting_grad(self) is None else _refuse_read(self, _READ)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if waiting_grad(self) is not None and not is_spent(self):
            raise UsageError(_SET)
        _set_grad(self, value)  # None, or a gradient that the user computed


class UsedUp(Watched):
    """A parameter whose gradient was used by the last step and is not zeroed yet."""

    @property
    def grad(self) -> torch.Tensor | None:
        if is_spent(self):
            return _refuse_read(self, _AFTER_STEP)
        return raw_grad(self) if waiting_grad(self) is None else _refuse_read(self, _READ)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        _set_grad(self, value)


def refuse_between() -> UsageError:
    """Return the error for a read between a `step()` that ended a shard and the next batch."""
    return UsageError(_BETWEEN)


class BetweenShards(UsedUp):
    """A parameter that other ranks would have updated by now, had each one shard a step."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not _reads_no_value(func):
            raise refuse_between()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs or {})


_VALUES = frozenset(["data", "T", "H", "mT", "mH", "real", "imag"])
"""Attributes of a tensor that hold its values."""
_FACTS = frozenset(
    [
        "numel",
        "nelement",
        "size",
        "dim",
        "ndimension",
        "stride",
        "element_size",
        "storage_offset",
        "data_ptr",
        "is_contiguous",
        "is_floating_point",
        "is_complex",
        "requires_grad_",
        "register_hook",
        "register_post_accumulate_grad_hook",
        "__hash__",
        "__len__",
    ]
)


def _reads_no_value(func: Any) -> bool:
    """Say whether a torch function asks a tensor for a fact about it, such as its shape."""
    if func.__name__ in ("__get__", "__set__"):
        return getattr(func.__self__, "__name__", "") not in _VALUES
    return func.__name__ in _FACTS


class Waits:
    """A tensor that must be waited for: any torch function that gets it waits first."""

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        _wait_for_all(args)
        _wait_for_all(kwargs.values())
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)


class InFlight(Waits, Watched):
    """A parameter whose new value may not have arrived yet."""

    @property
    def grad(self) -> torch.Tensor | None:
        return _refuse_read(self, _AFTER_STEP) if is_spent(self) else raw_grad(self)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        _set_grad(self, value)


def _wait_for_all(values: Any) -> None:
    for value in values:
        if isinstance(value, Waits):
            waiters.wait(value)
        elif isinstance(value, list | tuple):
            _wait_for_all(value)


def _plain_copy(parameter: Parameter, memo: dict[int, Any]) -> Parameter:
    """Return a plain copy of a parameter; reading its value waits, or is refused."""
    if id(parameter) not in memo:
        data = parameter.data.clone(memory_format=torch.preserve_format)
        memo[id(parameter)] = Parameter(data, parameter.requires_grad)
    copied: Parameter = memo[id(parameter)]
    return copied


def is_plain_kind(parameter: Parameter) -> bool:
    """Say whether a parameter is torch's own kind, whose class may be changed in place."""
    return type(parameter) in _KINDS


def become(parameter: Parameter, kind: type[Parameter]) -> None:
    """Change a parameter's class in place. Classes of the user's are refused before."""
    if type(parameter) in _KINDS:
        parameter.__class__ = kind


_WITH_FUNCTION = frozenset([InFlight, BetweenShards])
"""The classes for which torch calls `__torch_function__`."""
_KINDS = frozenset([Parameter, Watched, GradientTaken, Guarded, InFlight, UsedUp, BetweenShards])
