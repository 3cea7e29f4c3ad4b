"""What is recorded of a real rank: the moments of its compute lane, told by hooks on the model."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from syncline.perf.trace import Recorder


def hook_moments(model: nn.Module, recorder: Recorder) -> list[Any]:
    """Tell a recorder when forward begins and when it turns to backward; return handles."""

    def begin_forward(*_: Any) -> None:
        if torch.is_grad_enabled():  # otherwise it is no part of a step
            recorder.begin_forward()

    def turn(*_: Any) -> None:
        if torch.is_grad_enabled():
            recorder.turn()

    return [
        model.register_forward_pre_hook(begin_forward, prepend=True),
        model.register_forward_hook(turn),
    ]
