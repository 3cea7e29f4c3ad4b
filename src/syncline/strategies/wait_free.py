"""S-SGD with wait-free backpropagation: all-reduce layer by layer, as gradients appear.

The exchange of a layer overlaps the backward of the layers before it; the update waits for all
exchanges. With t_c[l] the time of layer l's all-reduce (Shi et al. 2018, arXiv 1805.03812), layer
l's exchange begins at

    tau[l] = max(tau[l + 1] + t_c[l + 1], end of layer l's backward).

It represents Caffe-MPI; that Caffe-MPI works like this was not checked against its code.
"""

from __future__ import annotations

from collections.abc import Sequence

from syncline.contract import Plan, World
from syncline.sizes import ByLayer, Size
from syncline.strategies.settings import FixedSettings
from syncline.strategies.updates_everywhere import UpdatesEverywhere, plan_updates_everywhere


class WaitFree(UpdatesEverywhere):
    """A bucket for each layer, sent as soon as backward has finished it."""

    def __init__(self, settings: FixedSettings | None = None, seed: int = 0) -> None:
        self.settings = settings or FixedSettings()

    def plan(self, world: World, sizes: Sequence[Size], shards: int) -> Plan:
        return plan_updates_everywhere(world, shards, ByLayer(), overlap=True)
