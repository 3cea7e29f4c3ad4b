"""S-SGD with one all-reduce of everything after backward; every rank updates everything.

The conventional way: the exchange does not overlap compute. A step takes (Shi et al. 2018, arXiv
1805.03812)

    forward + backward + all-reduce + update.

It represents CNTK; that CNTK works like this was not checked against its code.
"""

from __future__ import annotations

from collections.abc import Sequence

from syncline.contract import Plan, World
from syncline.sizes import InOne, Size
from syncline.strategies.settings import FixedSettings
from syncline.strategies.updates_everywhere import UpdatesEverywhere, plan_updates_everywhere


class AllReduce(UpdatesEverywhere):
    """One bucket, sent when backward is over."""

    def __init__(self, settings: FixedSettings | None = None, seed: int = 0) -> None:
        self.settings = settings or FixedSettings()

    def plan(self, world: World, sizes: Sequence[Size], shards: int) -> Plan:
        return plan_updates_everywhere(world, shards, InOne(), overlap=False)
