"""Merged-gradient wait-free backpropagation: neighbouring layers share a message if that is faster.

MG-WFBP (Shi et al. 2019, arXiv 1811.11141). A layer's gradients wait for those of the layer before
it if the network is busy until then, or if the wait is shorter than the start-up of one more
message. That needs the time of each layer's backward: from a file (a workload), or measured by
rank 0 in this run's first backward. It also needs the network's start-up time and rate, which are
settings.

`all_reduce`, `wait_free` and `merged` are one line of methods; this is its latest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from syncline import workload
from syncline.contract import Plan, World
from syncline.perf.formulas import merged_layers
from syncline.sizes import ByLayer, Size, Times
from syncline.strategies.settings import MergedSettings
from syncline.strategies.updates_everywhere import UpdatesEverywhere, plan_updates_everywhere


class Merged(UpdatesEverywhere):
    """Buckets of neighbouring layers, chosen by time."""

    settings: MergedSettings

    def __init__(self, settings: MergedSettings | None = None, seed: int = 0) -> None:
        self.settings = settings or MergedSettings()
        self._times: dict[str, float] | None = None
        if self.settings.times != "first_backward":
            layers = workload.read(self.settings.times).layers
            self._times = {layer.name: layer.backward_s for layer in layers}

    def plan(self, world: World, sizes: Sequence[Size], shards: int) -> Plan:
        size = world.size
        # A direct all-reduce: two rounds, in each of which a rank sends (n - 1) / n of the bytes.
        startup_s = 2 * self.settings.latency_s
        byte_s = 2 * (size - 1) / size / self.settings.rate_bytes_per_s
        times = None if self._times is None else tuple(self._times.items())
        rule = MergedLayers(startup_s, byte_s, times)
        return plan_updates_everywhere(world, shards, rule, overlap=True)


@dataclass(frozen=True)
class MergedLayers:
    """Merge layers by the times at which their exchanges would begin and end."""

    startup_s: float
    byte_s: float
    """Seconds for each byte of a message."""
    times: Times | None = None
    """Seconds of backward by layer; None to use measured ones."""

    needs_times = True

    def split(
        self, sizes: Sequence[Size], bucket_bytes: int, backward_s: Mapping[str, float]
    ) -> list[list[Size]]:
        if not sizes:
            return []
        layers = ByLayer().split(sizes, bucket_bytes, backward_s)
        num_bytes = [sum(size.size_bytes for size in layer) for layer in layers]
        times = [backward_s.get(layer[0].layer, 0.0) for layer in layers]
        starts = self.merge(num_bytes, times)
        ends = [*starts[1:], len(layers)]
        return [
            [size for layer in layers[start:end] for size in layer]
            for start, end in zip(starts, ends, strict=True)
        ]

    def merge(self, num_bytes: Sequence[float], backward_s: Sequence[float]) -> list[int]:
        """Return the first layer of each bucket; layers are given in their order of use."""
        return merged_layers(num_bytes, backward_s, self.startup_s, self.byte_s)
