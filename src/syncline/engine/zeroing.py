"""What `zero_grad()` does: it drops the gradients that have come since the last `step()`.

Usually there are none, and it only says that the last step's gradients are done with. Gradients
that came after a step (a GAN's generator leaves some in the discriminator) are still in `.grad`.
Gradients of the step to come may be on their way to other ranks already: then every rank drops
them, together. The buffers keep what forward wrote, as in plain PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable

from torch.nn import Parameter

from syncline.engine.gradients import Gradients
from syncline.engine.parameters import GradientTaken, UsedUp, become, put_grad, raw_grad
from syncline.engine.refusals import refuse_gradient_between_shards, refuse_partial_discard


class Zeroing:
    """Answers `zero_grad()` of one model or its optimizer."""

    def __init__(self, gradients: Gradients, discard: Callable[[], None]) -> None:
        """`discard` drops the gradients of the step on every rank."""
        self._gradients = gradients
        self._slots = gradients.slots
        self._discard = discard
        self.has_zeros = False
        """Whether some gradients count as zeros, not as None."""

    def zero_grad(self, *, set_to_none: bool) -> None:
        """Drop gradients; without `set_to_none` those that there were count as zeros."""
        gradients = self._gradients
        if not gradients.num_closed:
            if self.has_zeros or not set_to_none:
                self._mark_zeros(set_to_none)
            gradients.had_gradient = ()
        if gradients.spent.is_on:
            gradients.spent.end()
            self._drop_late()
        elif self._is_pending():
            self._drop_pending()

    def _mark_zeros(self, set_to_none: bool) -> None:
        self.has_zeros = not set_to_none
        had = self._gradients.had_gradient or [False] * len(self._slots)
        for slot, had_gradient in zip(self._slots, had, strict=True):
            if set_to_none:
                slot.is_zero = False
            elif had_gradient or slot.fired or raw_grad(slot.parameter) is not None:
                slot.is_zero = True

    def end_step(self) -> None:
        """Forget zeros that the step has used: `zero_grad()` after it says what there is now."""
        self.has_zeros = False
        for slot in self._slots:
            slot.is_zero = False

    def _drop_late(self) -> None:
        """Drop the gradients that came after the last step."""
        gradients = self._gradients
        # With hooks it is known whether any came; without, as inline, only `.grad` tells.
        looks = gradients.spent.has_late or not gradients.sends_in_backward
        is_any = False
        for slot in self._slots:
            parameter = slot.parameter
            if type(parameter) is UsedUp:
                become(parameter, Parameter)
            if looks and raw_grad(parameter) is not None:
                put_grad(parameter, None)
                is_any = True
        if is_any and gradients.num_closed:
            raise refuse_gradient_between_shards()

    def _is_pending(self) -> bool:
        slots = self._slots
        return self._gradients.is_sent or any(
            slot.fired or raw_grad(slot.parameter) is not None for slot in slots
        )

    def _drop_pending(self) -> None:
        """Drop gradients of the step to come."""
        gradients = self._gradients
        is_sent = gradients.is_sent or gradients.sends_in_backward
        if is_sent and len(gradients.mine) == 1:
            self._discard()
            return
        if gradients.is_sent or any(slot.is_taken for slot in self._slots):
            raise refuse_partial_discard(len(gradients.mine))
        for slot in self._slots:
            put_grad(slot.parameter, None)
            slot.fired = 0
            if type(slot.parameter) is GradientTaken:
                become(slot.parameter, Parameter)
        if not gradients.buckets:
            gradients.arrivals.clear()
