"""Synchronous SGD with a parameter server: push gradients, update at the server, pull parameters.

Workers push layer by layer while backward runs. The server adds up the pushes of all workers, runs
the optimizer, and all workers pull: all wait for the slowest. The parameters lie in strips on all
ranks, which compute too, or on dedicated servers, which compute nothing. One dedicated server of n
workers receives and sends n times the model, S bytes, in each step: 2 n S / rate.

It represents MXNet and TensorFlow; that they work like this was not checked against their code.
"""

from __future__ import annotations

from collections.abc import Sequence

from syncline.contract import Family, Plan, Strategy, UpdateSettings, World, deal
from syncline.engine.bucket import Bucket
from syncline.sizes import ByLayer, Size
from syncline.strategies.server_settings import SyncServerSettings


class SyncServer(Strategy):
    """The owners of strips act as the server."""

    settings: SyncServerSettings

    def __init__(self, settings: SyncServerSettings | None = None, seed: int = 0) -> None:
        self.settings = settings or SyncServerSettings()

    def plan(self, world: World, sizes: Sequence[Size], shards: int) -> Plan:
        workers = self.settings.num_workers(world.size)
        owners = frozenset(range(workers, world.size)) or None
        family = Family(world.everybody, owners=owners, buckets=ByLayer())
        return Plan((family,), deal(shards, workers, world.size), overlap=True)

    def gradient_ready(self, bucket: Bucket) -> None:
        bucket.comm.reduce_scatter(bucket.gradient)  # push

    def before_use(self, bucket: Bucket, update: UpdateSettings) -> None:
        bucket.optimizer.run(update)
        bucket.comm.all_gather(bucket.parameters)  # pull
