"""Tells the engine of `zero_grad()` and `scheduler.step()`, for which torch has no hooks.

The methods of torch's own classes are wrapped, once in a process, when the first model is given to
`distribute`. They ask whether the model, optimizer or scheduler at hand belongs to a distributed
loop; for all others they do what they did. Nothing is added to the user's objects, so these can be
copied and pickled as before (decision 18).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from typing import Any, Protocol

from torch import nn
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from syncline.engine.spent import Spent, spent_of


class Loop(Protocol):
    """A distributed loop, as far as torch's methods ask it."""

    spent: Spent

    def zero_grad(self, *, set_to_none: bool) -> None:
        """Zero the gradients of all parameters that the loop trains."""

    def may_advance_schedule(self) -> bool:
        """Say whether a scheduler may go on: not in the middle of a step."""


_loops: weakref.WeakKeyDictionary[Optimizer, weakref.ref[Loop]] = weakref.WeakKeyDictionary()
"""The loop of each optimizer that was distributed. Modules find it by their parameters: a module
may be a part of a model, or hold several."""


def watch(loop: Loop, optimizer: Optimizer) -> None:
    """Tell a loop of `zero_grad()` of its model and optimizer, and of the optimizer's schedulers.

    From now on a forgotten `zero_grad()` is refused.
    """
    _wrap_zero_grad(nn.Module)
    _wrap_zero_grad(Optimizer)
    _wrap_schedulers(LRScheduler)
    _loops[optimizer] = weakref.ref(loop)
    loop.spent.loop = weakref.ref(loop)
    loop.spent.is_watched = True


def forget(loop: Loop) -> None:
    """Undo `watch` for a loop. Torch's methods stay wrapped."""
    for optimizer in [one for one, held in _loops.items() if held() is loop]:
        del _loops[optimizer]
    loop.spent.loop = None
    loop.spent.is_watched = loop.spent.is_on = False


def _loop_of(optimizer: Any) -> Loop | None:
    held = _loops.get(optimizer) if isinstance(optimizer, Optimizer) else None
    return None if held is None else held()


def _wrap_zero_grad(kind: Any) -> None:
    original = kind.zero_grad
    if hasattr(original, "_tells_syncline"):
        return

    @functools.wraps(original)
    def zero_grad(self: Any, set_to_none: bool = True) -> None:
        loop = _loop_of(self)
        if loop is None:
            _zero_distributed(_parameters_of(self), set_to_none=set_to_none)
        else:
            loop.zero_grad(set_to_none=set_to_none)
            held = sum(len(group["params"]) for group in self.param_groups)
            if held == loop.spent.num_parameters:
                return  # it holds no others
        original(self, set_to_none)

    zero_grad._tells_syncline = True  # type: ignore[attr-defined]
    kind.zero_grad = zero_grad


def _parameters_of(owner: nn.Module | Optimizer) -> Iterable[Parameter]:
    if isinstance(owner, Optimizer):
        return (parameter for group in owner.param_groups for parameter in group["params"])
    return owner.parameters()


def _zero_distributed(parameters: Iterable[Parameter], *, set_to_none: bool) -> None:
    """Zero those parameters that distributed loops train: all of a loop's, or one by one."""
    found: dict[Spent, list[Parameter]] = {}
    for parameter in parameters:
        spent = spent_of(parameter)
        if spent is not None and spent.is_watched:
            found.setdefault(spent, []).append(parameter)
    for spent, some in found.items():
        loop = None if spent.loop is None else spent.loop()
        if loop is not None and len(some) == spent.num_parameters:
            loop.zero_grad(set_to_none=set_to_none)
        elif set_to_none:
            for parameter in some:
                parameter.grad = None  # its class notes it, or refuses


def _wrap_schedulers(kind: Any) -> None:
    """Wrap `step` of a scheduler class and of all classes below it, now and later."""
    if kind is LRScheduler:
        if hasattr(LRScheduler.step, "_asks_syncline"):
            return
        LRScheduler.__init_subclass__ = classmethod(_wrap_new_class)  # type: ignore[assignment]
    if "step" in vars(kind):
        _wrap_scheduler_step(kind)
    for below in kind.__subclasses__():
        _wrap_schedulers(below)


def _wrap_new_class(kind: Any, /, **options: Any) -> None:
    super(LRScheduler, kind).__init_subclass__(**options)
    if "step" in vars(kind):
        _wrap_scheduler_step(kind)


def _wrap_scheduler_step(kind: Any) -> None:
    original = kind.step

    @functools.wraps(original)
    def step(self: Any, *args: Any, **options: Any) -> Any:
        loop = _loop_of(getattr(self, "optimizer", None))
        if loop is None or _is_first(self) or loop.may_advance_schedule():
            return original(self, *args, **options)
        return None

    step._asks_syncline = True  # type: ignore[attr-defined]
    kind.step = step


def _is_first(scheduler: Any) -> bool:
    """Say whether a scheduler's constructor calls `step`, as most do."""
    if hasattr(scheduler, "_is_initial"):
        return bool(scheduler._is_initial)
    return bool(getattr(scheduler, "last_epoch", 0) < 0)  # torch before 2.7
