"""What a rank's calls to the owners of many strips have in common (`virtual_bundle.py`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from syncline.comm.many_calls import Targets
from syncline.comm.window import Call
from syncline.virtual.fast_link import FastLinks

if TYPE_CHECKING:
    from syncline.comm.virtual_window import VirtualWindow

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class Served:
    """How long a window's function takes for each strip, and where its calls are counted."""

    def __init__(self, num_ranks: int, first_counter: int) -> None:
        self.seconds = np.full(num_ranks, np.nan)
        self.first_counter = first_counter


class Trip:
    """What is always the same when a rank calls the same owners: kept from call to call."""

    def __init__(
        self, window: VirtualWindow, function: str, targets: Targets, element_bytes: int
    ) -> None:
        world, me = window.world, window.rank
        self.window = window
        self.function = function
        self.targets = targets
        self.served = window.served(function)
        ranks = [window.ranks[position] for position in targets.positions]
        self.owners: Ints = np.array(ranks, dtype=np.int64)
        self.numbers: Ints = np.array([strip.number for strip in targets.strips], dtype=np.int64)
        cluster, size = world.cluster, world.cluster.ranks
        machines, my_machine = self.owners // cluster.ranks_per_machine, world.machine_of(me)
        is_inside, is_me = machines == my_machine, self.owners == me
        self.others = np.flatnonzero(~is_me)
        self.across = np.flatnonzero(~is_inside)
        lengths = [(strip.stop - strip.start) for strip in targets.strips]
        self.sizes: Ints = np.array(lengths, dtype=np.int64) * element_bytes
        self.num_bytes = int(self.sizes[self.others].sum())
        self.copied_bytes = int(self.sizes[self.across].sum())
        # As `VirtualWorld.serving_s`, for all owners at once.
        self.serving_s: Floats = np.where(is_me, 0.0, cluster.message_s)
        self.serving_s += 2 * self.sizes / cluster.update_bytes_per_s
        at = np.flatnonzero(is_inside & ~is_me)
        self.serving_s[at] = 2 * self.sizes[at] / cluster.inside.rate_bytes_per_s
        near = np.where(is_me, 0.0, cluster.inside.latency_s)
        self.latency_s: Floats = np.where(is_inside, near, cluster.network.latency_s)
        if cluster.inside.rates:
            self.serving_s[at] = [cluster.inside.moving_s(2 * size) for size in self.sizes[at]]
        if cluster.network.rates:
            lost_s = [cluster.network.lost_s(size, size) for size in self.sizes]
            self.latency_s += np.where(is_inside, 0.0, lost_s)
        # Calls inside a machine bring no bytes to links.
        self.flow_bytes: Floats = np.where(is_inside, 0.0, self.sizes)
        links, calls = world.links, world.calls
        assert isinstance(links, FastLinks)
        assert calls is not None
        mine = np.full(len(ranks), my_machine)
        there, back = (
            [calls.outs[mine], calls.ins[machines]],
            [calls.outs[machines], calls.ins[mine]],
        )
        self.there: Ints = np.where(is_inside, links.ample, there)
        self.back: Ints = np.where(is_inside, links.ample, back)
        self.streams_there: Ints = np.where(is_inside, links.no_stream, me * size + self.owners)
        self.streams_back: Ints = np.where(is_inside, links.no_stream, self.owners * size + me)

    def seconds(self, call_of: Callable[[int], Call]) -> Floats:
        """Return how long each call keeps its owner's lane busy; measure what is not known."""
        known = self.served.seconds
        for target in np.flatnonzero(np.isnan(known[self.numbers])).tolist():
            position, call = self.targets.positions[target], call_of(target)
            taken_s = self.window.measure(position, self.function, call)
            known[self.numbers[target]] = taken_s
        found: Floats = known[self.numbers] + self.serving_s
        return found
