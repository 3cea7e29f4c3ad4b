"""The compute lane's forward and backward in virtual time, and exchanges of activations in them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from syncline.comm.base import Blocks, Communicator
from syncline.perf.recorder import Recorder
from syncline.sim.activations import SplitWork
from syncline.sim.lane import VirtualLane

Work = tuple[float, float, SplitWork | None]
"""Seconds of forward and backward, and what is exchanged if the layer is split."""


class Compute:
    """Lets the time of layers pass on one rank."""

    def __init__(
        self,
        spend: Callable[[str, int, int, float], None],
        comm: Communicator | None,
        lane: VirtualLane,
        recorder: Recorder | None,
    ) -> None:
        """`spend` lets time pass in a task; `comm` has the group that splits layers, if any do."""
        self._spend = spend
        self._comm = comm
        self._lane = lane
        self._recorder = recorder
        self._nothing = [torch.empty(0, device="meta")] * (1 if comm is None else comm.size)
        self.waited_s = 0.0
        """How long the compute lane has waited for activations."""

    def forward(self, bucket: int, step: int, works: Sequence[Work], factor: float) -> None:
        for seconds, _, split in works:
            if split is not None:
                self._begin(split.gather)()
            self._spend("forward", bucket, step, seconds * factor)
            if split is not None:
                self._begin(split.deal)()

    def backward(self, bucket: int, step: int, works: Sequence[Work], factor: float) -> None:
        for _, seconds, split in reversed(works):
            if split is None:
                self._spend("backward", bucket, step, seconds * factor)
            else:
                self._backward_of(split, bucket, step, seconds * factor)

    def _backward_of(self, split: SplitWork, bucket: int, step: int, seconds: float) -> None:
        """Run backward of a split layer.

        The gradient of the input is half of it; its exchange hides behind the weight's gradient.
        """
        self._begin(split.collect)()
        before_s = seconds / 2 if split.input_gradient is not None else 0.0
        if before_s:
            self._spend("backward", bucket, step, before_s)
        finish = self._begin(split.input_gradient)
        self._spend("backward", bucket, step, seconds - before_s)
        finish()

    def _begin(self, blocks: Blocks | None) -> Callable[[], None]:
        """Begin an exchange; the function returned waits for its end."""
        if blocks is None:
            return lambda: None
        wait = self._lane.begin_aside(self._run, blocks)

        def finish() -> None:
            started_s = self._lane.now_s
            wait()
            self.waited_s += self._lane.now_s - started_s
            if self._recorder is not None:
                self._recorder.waited(-1, self._recorder.step, started_s, "activations")

        return finish

    def _run(self, blocks: Blocks) -> None:
        assert self._comm is not None
        with self._comm.traffic.task("activations", after="activations"):
            self._comm.all_to_all(self._nothing, self._nothing, blocks)
