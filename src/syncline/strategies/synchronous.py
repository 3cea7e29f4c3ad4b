"""Synchronous SGD without altering it: part-reduce, update one's own strip, part-broadcast.

Das et al. 2016 (arXiv 1602.06709). The sum of a bucket's gradients is spread over the ranks as
soon as backward has it; each rank runs the optimizer on its own strip, 1/N of the work and of the
optimizer's state; the new parameters are gathered just before the next forward reads them. So one
half of the exchange hides behind backward and the other behind the next forward.

Parameters shared by a machine's ranks are written only when every rank has entered the step:
until then some backward pass may still read them.
"""

from __future__ import annotations

from syncline.comm.base import Communicator
from syncline.engine.bucket import Bucket, Step
from syncline.strategies.base import Spreadable, Strategy


class Synchronous(Strategy):
    """All ranks take every step together and hold the same parameters."""

    def start(self, replica: Spreadable, comm: Communicator) -> None:
        self._comm = comm

    def gradient_ready(self, bucket: Bucket) -> None:
        self._comm.reduce_scatter(bucket.gradient)

    def step_entered(self, step: Step) -> None:
        self._comm.all_reduce(step.flags)
        if step.statistics is not None:
            self._comm.all_reduce(step.statistics)

    def before_use(self, bucket: Bucket) -> None:
        bucket.update_strip()
        self._comm.all_gather(bucket.parameters)
