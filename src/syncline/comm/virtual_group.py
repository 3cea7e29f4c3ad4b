"""A group of virtual ranks: its memory, what its collectives cost, and their arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from syncline.comm.base import Partials, Strips, even_cuts, prepare_peer_sum
from syncline.comm.cost import Phase, is_across, phases
from syncline.comm.shape import Machines, positions_of, shape_of
from syncline.comm.virtual_trip import Served
from syncline.comm.volume import Volume, stages, strip_bytes, volume_of_partials, volume_of_strips
from syncline.virtual.clock import Signal
from syncline.virtual.link import Port

if TYPE_CHECKING:
    from syncline.comm.virtual import VirtualWorld
    from syncline.comm.virtual_window import VirtualWindow


class Charge(NamedTuple):
    """What one collective costs: phases of time, and the bytes each rank hands to its peers."""

    what: str
    size_bytes: int
    phases: tuple[Phase, ...]
    sent: tuple[int, ...]
    """By position."""


END_OF_LENDING = Charge("end_lending", 0, (Phase("inside", 1, 0.0),), ())


@dataclass(eq=False)
class Gathering:
    """One collective: which positions have come, and what each of them passed."""

    charge: Charge
    done: Signal
    brought: dict[int, Any] = field(default_factory=dict)
    met_s: float = 0.0
    """When the last of them came."""


class VirtualGroup:
    """The ranks of a communicator, and what they share: memory, windows, costs of collectives."""

    def __init__(self, world: VirtualWorld, machines: Machines) -> None:
        self.world = world
        self.machines = machines
        self.ranks = positions_of(machines)
        self.name = world.names.take(self.ranks)
        self.shape = shape_of(machines)
        self.size = len(self.ranks)
        self.inside_ports: list[Port] = [("inside", rank) for rank in self.ranks]
        self.across_ports: list[Port] = [
            (way, world.machine_of(machine[0])) for machine in machines for way in ("out", "in")
        ]
        self.gatherings: dict[tuple[int, int], Gathering] = {}
        """Collectives that some but not all ranks have come to, by channel and number."""
        self.allocations: list[tuple[torch.Tensor, ...]] = []
        self.parts: dict[tuple[Machines, int], VirtualGroup] = {}
        self.windows: dict[tuple[int, int], VirtualWindow] = {}
        """Each rank's end of each window, by the window's number and the rank."""
        self.served: dict[tuple[int, str], Served] = {}
        """By window and function, if calls are bundled."""
        self._charges: dict[tuple[str, Volume], Charge] = {}
        self._known: dict[tuple[Any, ...], tuple[Charge, object]] = {}
        """Charges by the id of cuts and spread, which many ranks share: hashing a thousand cuts for
        each of a thousand ranks takes seconds. Both objects are kept here, so no id is reused."""

    def allocate(
        self, number: int, num_elements: int, dtype: torch.dtype
    ) -> tuple[torch.Tensor, ...]:
        """Return all ranks' memory of the number-th allocation; the first rank to ask makes it."""
        if number == len(self.allocations):
            device = self.world.device
            if device.type == "meta":
                self.allocations.append((torch.empty(num_elements, dtype=dtype, device=device),))
            else:
                each = (torch.zeros(num_elements, dtype=dtype) for _ in self.ranks)
                self.allocations.append(tuple(each))
        return self.allocations[number]

    def share(self, number: int, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the one memory of the number-th allocation."""
        if number == len(self.allocations):
            memory = torch.zeros(num_elements, dtype=dtype, device=self.world.device)
            self.allocations.append((memory,))
        return self.allocations[number][0]

    def part(self, machines: Machines, number: int) -> VirtualGroup:
        """Return the number-th subgroup of some ranks; the first rank to ask makes it."""
        key = (machines, number)
        if key not in self.parts:
            self.parts[key] = VirtualGroup(self.world, machines)
        return self.parts[key]

    def charge_sum(self, what: str, partials: Partials, root: int = 0) -> Charge:
        cuts, spread = partials.cuts, partials.spread
        key = (what, id(cuts), id(spread), partials.result.itemsize, root)
        if key not in self._known:
            volume = volume_of_partials(partials, self.shape, root)
            self._known[key] = self._charge(what, volume), (cuts, spread)
        return self._known[key][0]

    def charge_gather(self, strips: Strips) -> Charge:
        memory = strips.memory
        key = ("all_gather", id(strips.cuts), memory.mine.itemsize, memory.is_common)
        if key not in self._known:
            charge = self._charge("all_gather", volume_of_strips(strips))
            self._known[key] = charge, strips.cuts
        return self._known[key][0]

    def charge_broadcast(self, num_elements: int, element_bytes: int, root: int) -> Charge:
        # One strip for each rank that uses the network: all ranks, or one of each machine.
        is_hierarchical = self.shape.kind == "hierarchical"
        num_strips = len(self.machines) if is_hierarchical else self.size
        strips = strip_bytes(even_cuts(num_elements, num_strips), element_bytes)
        return self._charge("broadcast", Volume(strips, root=root))

    def charge_barrier(self) -> Charge:
        return self._charge("barrier", Volume((0,) * self.size))

    def _charge(self, what: str, volume: Volume) -> Charge:
        charge = self._charges.get((what, volume))
        if charge is None:
            time = phases(what, self.shape, volume, self.world.algorithm)
            each = zip(*(stage.sent() for stage in stages(what, self.shape, volume)), strict=True)
            sent = tuple(int(sum(one)) for one in each) or (0,) * self.size
            charge = Charge(what, int(volume.size_bytes), time, sent)
            self._charges[what, volume] = charge
        return charge

    def pay(self, phases: Sequence[Phase], done: Callable[[], None]) -> None:
        """Let the time of a collective pass, then call `done`."""
        collective_s = self.world.cluster.collective_s
        if collective_s and is_across(phases):
            self.world.clock.after(collective_s, self._pay_phases, phases, done)
        else:
            self._pay_phases(phases, done)

    def _pay_phases(self, phases: Sequence[Phase], done: Callable[[], None]) -> None:
        """Let phases pass one after the other, then call `done`."""
        if not phases:
            done()
            return
        phase, *rest = phases
        world = self.world
        ports = self.inside_ports if phase.where == "inside" else self.across_ports
        then = lambda: self._pay_phases(rest, done)  # noqa: E731
        world.clock.after(self._delay_s(phase), world.links.start, ports, phase.num_bytes, then)

    def _delay_s(self, phase: Phase) -> float:
        cluster = self.world.cluster
        link = cluster.inside if phase.where == "inside" else cluster.network
        return phase.rounds * link.latency_s + phase.messages * cluster.message_s

    def latency_s(self, phases: Sequence[Phase]) -> float:
        """Return how much of a collective's time does not depend on its bytes."""
        once_s = self.world.cluster.collective_s if is_across(phases) else 0.0
        return once_s + sum(map(self._delay_s, phases))


def whole_sum(brought: dict[int, Partials]) -> torch.Tensor:
    """Return the sum of all ranks' partial sums. It adds the same pairs as strip by strip."""
    first = brought[0]
    if "sum" not in first.plans:
        out = torch.empty_like(first.sums[0].mine)
        first.plans["sum"] = (prepare_peer_sum(first, 0, out.numel(), out), out)
    add_up, out = first.plans["sum"]
    add_up()
    assert isinstance(out, torch.Tensor)
    return out


def spread_sum(brought: dict[int, Partials]) -> None:
    """Give each rank its strip of the sum."""
    whole = whole_sum(brought)
    for position, partials in brought.items():
        start, stop = partials.cuts[position : position + 2]
        if start < stop:
            partials.strip(position).copy_(whole[start:stop])


def share_sum(brought: dict[int, Partials]) -> None:
    """Give each rank all of the sum."""
    whole = whole_sum(brought)
    for partials in brought.values():
        partials.result.copy_(whole)


def gather_strips(brought: dict[int, Strips]) -> None:
    """Give each rank every strip, as its owner has it."""
    if brought[0].memory.is_common:
        return
    for position, strips in brought.items():
        for owner, theirs in brought.items():
            if owner != position:
                strips.mine(owner).copy_(theirs.mine(owner))
