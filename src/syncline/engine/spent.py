"""Whether the gradients of the last step are still to be zeroed.

Plain PyTorch keeps the gradients of a step in `.grad` until `zero_grad()`. Here they are spent:
their sum lies in strips on the ranks and is overwritten by the next backward. From `step()` to
`zero_grad()` reading `.grad` is refused, gradients that arrive stay where autograd put them, since
`zero_grad()` will drop them, and another `step()` is refused: it would need the sum of both.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import NoReturn, Protocol

import torch

from syncline.errors import UsageError


class Zeroes(Protocol):
    """A loop that can zero the gradients of all its parameters."""

    def zero_grad(self, *, set_to_none: bool) -> None: ...


class Spent:
    """What one model's loop has zeroed since its last step."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        self.is_on = False
        """Whether some parameter still has to be zeroed before the next step."""
        self.is_watched = False
        """Whether `zero_grad()` is noticed: only then can it be asked for."""
        self.has_late = False
        """Whether a gradient came, or was set, while it is on."""
        self.loop: weakref.ref[Zeroes] | None = None
        """Whom to tell of `zero_grad()`."""
        self.num_parameters = 0
        self.zeroed: set[int] = set()
        """The parameters that were zeroed one by one, by id."""
        self.zeros: dict[int, torch.Tensor] = {}
        """What `zero_grad(set_to_none=False)` put into `.grad` for this step, by parameter id."""
        for parameter in parameters:
            self.num_parameters += 1
            _by_parameter[id(parameter)] = self
            weakref.finalize(parameter, _by_parameter.pop, id(parameter), None)

    def begin(self) -> None:
        """Note that a step, or a shard of it, was taken: its gradients are spent."""
        self.is_on = self.is_watched
        self.has_late = False
        self.zeroed.clear()

    def end(self) -> None:
        """Note that every gradient was zeroed."""
        self.is_on = False

    def zero_one(self, parameter: torch.Tensor, value: torch.Tensor | None) -> None:
        """Note that one parameter's `.grad` was set: to None, or to a gradient of the user's."""
        self.has_late = self.has_late or value is not None
        self.zeroed.add(id(parameter))
        if len(self.zeroed) == self.num_parameters:
            self.is_on = False

    def refuse_step(self) -> NoReturn:
        """Refuse a step without `zero_grad()` since the last one."""
        raise UsageError(
            "step() came without zero_grad() since the last step(). Plain PyTorch would add the "
            "new gradients to the last step's, but those are gone: ranks keep only their strips of "
            "the sum. Call optimizer.zero_grad() after step(), or before backward()."
        )


_by_parameter: dict[int, Spent] = {}


def spent_of(parameter: torch.Tensor) -> Spent | None:
    """Return the state of the loop that trains a parameter."""
    return _by_parameter.get(id(parameter))


def is_only_zeros(parameter: torch.Tensor, gradient: torch.Tensor) -> bool:
    """Say whether a `.grad` holds the zeros of `zero_grad()`, to which nothing was added yet."""
    spent = _by_parameter.get(id(parameter))
    if spent is None or not spent.zeros:
        return False
    return spent.zeros.get(id(parameter)) is gradient and gradient._version == 0


def is_spent(parameter: torch.Tensor) -> bool:
    """Say whether a parameter's gradient was used by the last step and is not zeroed yet."""
    spent = _by_parameter.get(id(parameter))
    return spent is not None and spent.is_on and id(parameter) not in spent.zeroed
