"""What `zero_grad()` does: it drops the gradients that have come since the last `step()`.

Usually there are none, and it only says that the last step's gradients are done with. Gradients
that came after a step (a GAN's generator leaves some in the discriminator) are still in `.grad`.
Gradients of the step to come may be on their way to other ranks already: then every rank drops
them, together. The buffers keep what forward wrote, as in plain PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import repeat
from operator import is_

import torch
from torch.nn import Parameter

from syncline.engine.bucket import Slot
from syncline.engine.gradients import Gradients
from syncline.engine.parameters import (
    GradientTaken,
    UsedUp,
    Watched,
    become,
    drop_grads,
    put_grad,
    raw_grad,
    raw_grads,
)
from syncline.engine.refusals import refuse_gradient_between_shards, refuse_partial_discard


class Zeroing:
    """Answers `zero_grad()` of one model or its optimizer."""

    def __init__(self, gradients: Gradients, discard: Callable[[], None]) -> None:
        """`discard` drops the gradients of the step on every rank."""
        self._gradients = gradients
        self._slots = gradients.slots
        self._parameters = [slot.parameter for slot in gradients.slots]
        self._discard = discard

    def zero_grad(self, *, set_to_none: bool) -> None:
        """Drop gradients; without `set_to_none` leave zeros where there was one."""
        gradients = self._gradients
        zeroed = [] if set_to_none else self._find_used()
        if gradients.num_closed in (0, len(gradients.mine)):  # not between two shards
            gradients.had_gradient = ()
        if gradients.spent.is_on:
            gradients.spent.end()
            self._drop_late()
        elif self._is_pending():
            self._drop_pending()
        for slot in zeroed:
            self._put_zeros(slot.parameter)

    def _find_used(self) -> list[Slot]:
        """Return the slots whose `.grad` is not None in plain PyTorch."""
        had = self._gradients.had_gradient or [False] * len(self._slots)
        return [
            slot
            for slot, had_gradient in zip(self._slots, had, strict=True)
            if had_gradient
            or slot.fired
            or slot.has_gradient
            or raw_grad(slot.parameter) is not None
        ]

    def _put_zeros(self, parameter: Parameter) -> None:
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            zeros = torch.zeros_like(parameter)
        self._gradients.spent.zeros[id(parameter)] = zeros
        put_grad(parameter, zeros)

    def _drop_late(self) -> None:
        """Drop the gradients that came after the last step."""
        gradients = self._gradients
        # With hooks it is known whether any came; without, as inline, only `.grad` tells.
        looks = gradients.spent.has_late or not gradients.sends_in_backward
        parameters = self._parameters
        if UsedUp in map(type, parameters):
            for parameter in parameters:
                if type(parameter) is UsedUp:
                    become(parameter, Watched)
        if not looks or all(map(is_, raw_grads(parameters), repeat(None))):
            return
        drop_grads(parameters)
        if gradients.num_closed:
            raise refuse_gradient_between_shards()

    def _is_pending(self) -> bool:
        """Say whether there is anything to drop.

        Other than `Gradients.has_gradient`: shards that are closed stay, and zeros become None.
        """
        slots = self._slots
        return self._gradients.is_sent or any(
            slot.fired or raw_grad(slot.parameter) is not None for slot in slots
        )

    def _drop_pending(self) -> None:
        """Drop gradients of the step to come."""
        gradients = self._gradients
        is_on_its_way = gradients.is_sent or (
            gradients.sends_in_backward and any(slot.fired for slot in self._slots)
        )
        if is_on_its_way and len(gradients.mine) == 1:
            self._discard()
            return
        if gradients.is_sent or any(slot.is_taken for slot in self._slots):
            raise refuse_partial_discard(len(gradients.mine))
        for slot in self._slots:
            put_grad(slot.parameter, None)
            slot.fired = 0
            if type(slot.parameter) is GradientTaken:
                become(slot.parameter, Watched)
        if not gradients.buckets:
            gradients.arrivals.clear()
