"""Exact synchronous SGD: reduce-scatter, update of each rank's strip, all-gather.

Das et al. 2016 (arXiv 1602.06709), who call it part-reduce and part-broadcast. A bucket's gradients
are reduce-scattered as soon as backward has finished it; each rank runs the optimizer on its own
strip, 1/N of the work and of the optimizer's state; the new parameters are gathered just before the
next forward reads them. So one half of the exchange overlaps backward, the other the next forward.
"""

from __future__ import annotations

from collections.abc import Sequence

from syncline.contract import Family, Plan, Strategy, UpdateSettings, World, deal
from syncline.engine.bucket import Bucket
from syncline.sizes import Size
from syncline.strategies.settings import OwnSettings


class Synchronous(Strategy):
    """All ranks take every step together and hold the same parameters."""

    def __init__(self, settings: OwnSettings | None = None, seed: int = 0) -> None:
        self.settings = settings or OwnSettings()

    def plan(self, world: World, sizes: Sequence[Size], shards: int) -> Plan:
        return Plan((Family(world.everybody),), deal(shards, world.size, world.size))

    def gradient_ready(self, bucket: Bucket) -> None:
        bucket.comm.reduce_scatter(bucket.gradient)

    def before_use(self, bucket: Bucket, update: UpdateSettings) -> None:
        bucket.optimizer.run(update)
        bucket.comm.all_gather(bucket.parameters)
