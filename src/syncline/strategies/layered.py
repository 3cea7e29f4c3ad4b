"""Layered SGD: synchronous SGD in which leaders speak for groups of ranks.

Yu et al. 2019 (arXiv 1906.05936). Ranks form groups, usually those of a machine. A group adds up
its gradients, its leader exchanges them with the other leaders, and the results go back into the
group. In the paper leaders are dedicated processes; they begin when backward is over, and are
hidden behind the workers' loading of the next batch. Here leaders exchange bucket by bucket, so
that both halves of the exchange also hide behind backward and the next forward, and each rank
updates its own strip, as in `synchronous.py`: the weights are the same, bit for bit. With
`as_published` it is the paper's form, for comparison. With compute C, loading I in line and the
leaders' exchange W, a step then takes

    C + max(I, W).
"""

from __future__ import annotations

from collections.abc import Sequence

from syncline.contract import Family, Plan, Strategy, UpdateSettings, World, deal
from syncline.engine.bucket import Bucket
from syncline.groups import Leaders
from syncline.sizes import BY_SIZE, InOne, Size
from syncline.strategies.group_settings import LayeredSettings
from syncline.strategies.synchronous import Synchronous
from syncline.strategies.updates_everywhere import UpdatesEverywhere


class Layered(Strategy):
    """The exchange goes through leaders; otherwise it is synchronous SGD."""

    settings: LayeredSettings

    def __init__(self, settings: LayeredSettings | None = None, seed: int = 0) -> None:
        self.settings = settings or LayeredSettings()
        self._rule: Strategy = UpdatesEverywhere() if self.settings.as_published else Synchronous()

    def plan(self, world: World, sizes: Sequence[Size], shards: int) -> Plan:
        settings, is_published = self.settings, self.settings.as_published
        groups, workers = settings.in_groups(world.machines), settings.workers(world.machines)
        leaders = Leaders(groups, tuple(map(settings.leader_of, groups)))
        family = Family(
            world.everybody,
            updates="each" if is_published else "strips",
            owners=None if is_published or len(workers) == world.size else frozenset(workers),
            memory="private" if is_published else "common",
            buckets=InOne() if is_published else BY_SIZE,
            leaders=leaders if world.size > 1 else None,
        )
        dealt = deal(shards, workers, world.size)
        return Plan((family,), dealt, overlap=True if is_published else None)

    def gradient_ready(self, bucket: Bucket) -> None:
        self._rule.gradient_ready(bucket)

    def before_use(self, bucket: Bucket, update: UpdateSettings) -> None:
        self._rule.before_use(bucket, update)
