"""Gradients that no hook has taken: inline, those of all parameters at the end of a shard."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from syncline.engine.bucket import Slot
from syncline.engine.parameters import drop_grads, raw_grads
from syncline.engine.refusals import check_gradient


def take_late(slots: Sequence[Slot], take: Callable[[Slot, torch.Tensor | None], None]) -> None:
    """Take the gradients that are still in `.grad`, and leave None there.

    One that is refused stays, so that the next `step()` refuses it too.
    """
    parameters = [slot.parameter for slot in slots]
    try:
        for slot, gradient in zip(slots, raw_grads(parameters), strict=True):
            if gradient is not None and not slot.fired:
                check_gradient(slot, gradient)
                slot.fired = 1
            take(slot, gradient)
    except BaseException:
        drop_grads([slot.parameter for slot in slots if slot.is_taken])
        raise
    drop_grads(parameters)
