"""Makes reads and changes of a model's buffers wait until the comm lane has set them.

`optimizer.step()` returns before the step's running statistics are averaged. Until then a buffer's
class is `InFlightBuffer`: any torch function that gets it waits first, as for a parameter in flight
(`parameters.py`). Without this a script that reads or changes a buffer right after `step()` would
see the buffer before the average, or lose its change.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from syncline.engine.buffers import Buffers
from syncline.engine.lane import Lane

_waits: dict[int, Callable[[], None]] = {}
"""What waits for each buffer in flight, by id."""


class InFlightBuffer(torch.Tensor):
    """A buffer that the comm lane may not have set yet."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        _wait_for_all(args)
        _wait_for_all(kwargs.values())
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)


def _wait_for_all(values: Any) -> None:
    for value in values:
        if isinstance(value, InFlightBuffer):
            wait = _waits.get(id(value))
            if wait is not None:
                wait()
        elif isinstance(value, list | tuple):
            _wait_for_all(value)


class BuffersInFlight:
    """The buffers of one model between `step()` and the end of their exchange."""

    def __init__(self, buffers: Buffers, lane: Lane) -> None:
        self._buffers = buffers
        self._lane = lane
        self._left: list[torch.Tensor] = []

    def leave(self, wait: Callable[[], None]) -> None:
        """Make the next use of every buffer call `wait`, which calls `arrive` in the end."""

        def wait_on_compute_lane() -> None:
            if not self._lane.is_current:  # the comm lane itself sets them
                wait()

        for buffer in self._buffers.all():
            if type(buffer) is torch.Tensor:
                _waits[id(buffer)] = wait_on_compute_lane
                buffer.__class__ = InFlightBuffer
                self._left.append(buffer)

    def arrive(self) -> None:
        """Let buffers be used at full speed again."""
        for buffer in self._left:
            buffer.__class__ = torch.Tensor
            del _waits[id(buffer)]
        self._left.clear()
