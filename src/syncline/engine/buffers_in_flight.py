"""Makes reads and changes of a model's buffers wait until the comm lane has set them.

`optimizer.step()` returns before the step's running statistics are averaged. Until then a buffer's
class is `InFlightBuffer`: any torch function that gets it waits first, as for a parameter in flight
(`parameters.py`). Without this a script that reads or changes a buffer right after `step()` would
see the buffer before the average, or lose its change.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from syncline.engine.buffers import Buffers
from syncline.engine.lane import Lane
from syncline.engine.parameters import Waits, waiters


class InFlightBuffer(Waits, torch.Tensor):
    """A buffer that the comm lane may not have set yet."""


class BuffersInFlight:
    """The buffers of one model between `step()` and the end of their exchange."""

    def __init__(self, buffers: Buffers, lane: Lane) -> None:
        self._buffers = buffers
        self._lane = lane
        self._left: list[torch.Tensor] = []
        self._wait: Callable[[], None] = lambda: None

    def leave(self, wait: Callable[[], None]) -> None:
        """Make the next use of every buffer call `wait`, which calls `arrive` in the end."""
        self._wait = wait
        for buffer in self._buffers.all():
            if type(buffer) is torch.Tensor:
                waiters.hold(buffer, self._wait_for, 0)  # one wait for all of them
                buffer.__class__ = InFlightBuffer
                self._left.append(buffer)

    def _wait_for(self, number: int) -> None:
        if not self._lane.is_current:  # the comm lane itself sets them
            self._wait()

    def arrive(self) -> None:
        """Let buffers be used at full speed again."""
        for buffer in self._left:
            buffer.__class__ = torch.Tensor
            waiters.drop(buffer)
        self._left.clear()
