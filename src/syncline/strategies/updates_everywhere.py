"""Base of strategies in which every rank gets all gradient sums and updates all parameters.

Each rank holds its own copy of all parameters. The strategies differ in their plans: which
parameters share a bucket, and when a bucket is sent.
"""

from __future__ import annotations

from syncline.contract import Family, Plan, Strategy, UpdateSettings, World, deal
from syncline.engine.bucket import Bucket
from syncline.sizes import BucketRule


class UpdatesEverywhere(Strategy):
    """All-reduce each bucket; every rank runs the optimizer on all of it."""

    def gradient_ready(self, bucket: Bucket) -> None:
        bucket.comm.all_reduce(bucket.gradient)

    def before_use(self, bucket: Bucket, update: UpdateSettings) -> None:
        bucket.optimizer.run(update)


def plan_updates_everywhere(
    world: World, shards: int, buckets: BucketRule, *, overlap: bool
) -> Plan:
    """Return a plan with one family of all parameters, in private memory."""
    family = Family(world.everybody, updates="each", memory="private", buckets=buckets)
    return Plan((family,), deal(shards, world.size, world.size), overlap=overlap)
