"""Trials of the user's optimizer, on scratch memory: which rule does it follow?

A strategy may need to know it, and a class's name would not tell: anybody may write an optimizer.
A simulation of sizes only computes nothing, so there any answer does.
"""

from __future__ import annotations

from typing import Any

import torch

from syncline.contract import Model, UpdateSettings
from syncline.errors import UsageError

_LR, _DECAY, _MOMENTUM = 0.5, 0.25, 0.5
"""Settings of a trial: with them different rules give clearly different numbers."""
_TOLERANCE = 0.01
"""Above the rounding of bfloat16."""


class Trial:
    """The user's optimizer on a copy of the smallest parameter, all ones, with gradient one."""

    def __init__(self, model: Model, **settings: Any) -> None:
        """`settings` replace those of every parameter group that has them."""
        self._slot = min((one for one in model.slots if one.num_elements), key=_num_elements)
        bucket = self._slot.bucket
        assert bucket is not None
        start, stop = self._slot.offset, self._slot.offset + self._slot.num_elements
        values = torch.empty_like(bucket.parameters.memory.mine)
        gradient = torch.empty_like(values)
        self.values, self.gradient = values[start:stop].fill_(1), gradient[start:stop].fill_(1)
        self._optimizer = model.optimizer_of(bucket, values, gradient, start, stop)
        self._groups = [
            group | {key: value for key, value in settings.items() if key in group}
            for group in self._optimizer.settings
        ]

    def step(self, gradient: torch.Tensor | float = 1.0) -> None:
        self.gradient.copy_(torch.as_tensor(gradient))
        self._optimizer.run(UpdateSettings(self._groups, frozenset()))

    def holds(self, key: str) -> bool:
        """Say whether the optimizer's state has a value of this name."""
        return all(key in state for _, _, state in self._optimizer.held_of(self._slot))

    def is_at(self, values: torch.Tensor | float) -> bool:
        wanted = torch.as_tensor(values, dtype=torch.float64).expand(self.values.shape)
        return torch.allclose(self.values.double(), wanted, rtol=_TOLERANCE, atol=_TOLERANCE)


def _num_elements(slot: Any) -> int:
    return int(slot.num_elements)


def _is_computed(model: Model) -> bool:
    return not model.buckets[0].parameters.memory.mine.is_meta


def is_sgd(model: Model) -> bool:
    """Say whether the optimizer follows the rule of torch.optim.SGD, momentum included.

    With lr 1/2, Nesterov momentum 1/2, and gradients 1: velocities 1 and 3/2, so a parameter goes
    from 1 to 1 - (1 + 1/2) / 2 = 1/4, and from there by -(1 + 3/4) / 2 to -5/8.
    """
    if not _is_computed(model):
        return True
    groups = model.buckets[0].optimizer.settings
    if not all({"lr", "momentum", "nesterov"} <= group.keys() for group in groups):
        return False
    trial = Trial(
        model,
        lr=_LR,
        momentum=_MOMENTUM,
        nesterov=True,
        dampening=0,
        weight_decay=0,
        maximize=False,
    )
    trial.step()
    trial.step()
    return trial.holds("momentum_buffer") and trial.is_at(-0.625)


def decays_apart(model: Model) -> bool | None:
    """Say how weight decay acts: False: as a part of the gradient, as with SGD and Adam; True: as a
    factor on the weights, as with AdamW (decoupled); None: in neither way.

    It takes two steps: without momentum the two are one rule.
    """
    if not _is_computed(model):
        return False
    groups = model.buckets[0].optimizer.settings
    if not any("weight_decay" in group for group in groups):
        return False
    sign = -1.0 if groups[0].get("maximize") else 1.0
    as_it_is = Trial(model, lr=_LR, weight_decay=_DECAY)
    in_gradient = Trial(model, lr=_LR, weight_decay=0)
    apart = Trial(model, lr=_LR, weight_decay=0)
    for _ in range(2):
        as_it_is.step()
        in_gradient.step(1 + sign * _DECAY * in_gradient.values)
        apart.values.mul_(1 - _LR * _DECAY)
        apart.step()
    if as_it_is.is_at(in_gradient.values):
        return False
    return True if as_it_is.is_at(apart.values) else None


def decay_of_steps(group: dict[str, Any], steps: int, *, apart: bool | None) -> dict[str, Any]:
    """Return a group's settings with which one update decays weights as `steps` updates do.

    In the gradient, w <- w - lr (g + decay w): `steps` times the decay. Apart, w <- (1 - lr decay)
    w: that factor to the power of `steps`. `apart` is what `decays_apart` returned.
    """
    decay = group.get("weight_decay")
    if steps == 1 or not decay:
        return group
    if apart is None:
        raise UsageError(
            "strategy.server.period is above 1, so that weights decay for several steps at once, "
            "but this optimizer's weight decay is neither a part of the gradient nor a factor on "
            "the weights. Use period=1, or weight_decay=0."
        )
    lr = float(group["lr"])
    total = (1 - (1 - lr * decay) ** steps) / lr if apart and lr else steps * decay
    return group | {"weight_decay": total}
