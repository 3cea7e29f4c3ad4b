"""Hooks on the model that tell a recorder when forward and backward of a real rank begin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from syncline.perf.recorder import Recorder


def hook_moments(
    model: nn.Module, recorder: Recorder, has_buckets: Callable[[], bool]
) -> list[Any]:
    """Tell a recorder when forward begins and when backward begins; return the hooks' handles.

    `has_buckets` says whether forward and backward report the buckets that they come to.
    """

    def begin_forward(*_: Any) -> None:
        if torch.is_grad_enabled():  # a forward without gradients is not part of a step
            recorder.begin_forward(has_buckets=has_buckets())

    def begin_backward(*_: Any) -> None:
        if torch.is_grad_enabled():
            recorder.begin_backward()

    return [
        model.register_forward_pre_hook(begin_forward, prepend=True),
        model.register_forward_hook(begin_backward),
    ]
