"""A group of virtual ranks: its memory, what its collectives cost, and their arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from syncline.comm.base import Partials, Strips, even_cuts, prepare_peer_sum
from syncline.comm.blocks import Blocks, Tensors
from syncline.comm.core_time import core_times
from syncline.comm.cost import Phase, is_across, phases
from syncline.comm.shape import Groups, Machines, led_ranks, led_shape, positions_of, shape_of
from syncline.comm.virtual_trip import Served
from syncline.comm.volume import (
    Volume,
    stages,
    strip_bytes,
    volume_of_blocks,
    volume_of_partials,
    volume_of_strips,
)
from syncline.virtual.clock import Signal
from syncline.virtual.link import Port

if TYPE_CHECKING:
    from syncline.cluster import Link
    from syncline.comm.virtual import VirtualWorld
    from syncline.comm.virtual_window import VirtualWindow


class Charge(NamedTuple):
    """What one collective costs: phases of time, and the bytes each rank hands to its peers."""

    what: str
    size_bytes: int
    phases: tuple[Phase, ...]
    sent: tuple[int, ...]
    """By position."""
    core_s: tuple[float, ...] = ()
    """The processor time of each position; empty if no rank ever waits for a core."""


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

    def __init__(
        self,
        world: VirtualWorld,
        machines: Machines,
        groups: Groups = (),
        leaders: tuple[int, ...] = (),
    ) -> None:
        """With `groups`, their `leaders` speak for them."""
        self.world = world
        self.machines = machines
        self.ranks = led_ranks(groups) if groups else positions_of(machines)
        self.name = world.names.take(self.ranks)
        self.shape = led_shape(machines, groups, leaders) if groups else shape_of(machines)
        self.size = len(self.ranks)
        self.num_callers = 1 if world.one_for_all else self.size
        """How many ranks come to a collective."""
        self.inside_ports: list[Port] = [("inside", rank) for rank in self.ranks]
        self.across_ports: list[Port] = [
            (way, world.machine_of(machine[0])) for machine in machines for way in world.ways
        ]
        self.gatherings: dict[tuple[int, int], Gathering] = {}
        """Collectives that some but not all ranks have come to, by channel and number."""
        self.allocations: list[tuple[torch.Tensor, ...]] = []
        self.parts: dict[tuple[Machines, int], VirtualGroup] = {}
        self._led: dict[tuple[Groups, tuple[int, ...], int], VirtualGroup] = {}
        self.windows: dict[tuple[int, int], VirtualWindow] = {}
        """Each rank's end of each window, by the window's number and the rank."""
        self.served: dict[tuple[int, str], Served] = {}
        """By window and function, if calls are bundled."""
        self._charges: dict[tuple[str, Volume], Charge] = {}
        self._blocks: dict[tuple[Blocks, bool], Charge] = {}
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

    def led(self, groups: Groups, leaders: tuple[int, ...], number: int) -> VirtualGroup:
        """Return the same ranks with leaders that speak for groups; the first to ask makes it."""
        key = (groups, leaders, number)
        if key not in self._led:
            self._led[key] = VirtualGroup(self.world, self.machines, groups, leaders)
        return self._led[key]

    def explain(self, gathering: Gathering, doing: str) -> str:
        """Say which ranks have not come to a collective, for one that waits while `doing` so."""
        missing = sorted(rank for at, rank in enumerate(self.ranks) if at not in gathering.brought)
        named = [f"{rank}{self.world.endpoints[rank].died}" for rank in missing[:6]]
        more = f" and {len(missing) - 6} more" if len(missing) > 6 else ""
        return f"{doing}: {gathering.charge.what} waits for rank {', '.join(named)}{more}"

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

    def charge_blocks(self, blocks: Blocks, is_for_all: bool) -> Charge:
        charge = self._blocks.get((blocks, is_for_all))
        if charge is None:
            charge = self._charge("all_to_all", volume_of_blocks(blocks, is_for_all))
            self._blocks[blocks, is_for_all] = charge
        return charge

    def charge_barrier(self) -> Charge:
        return self._charge("barrier", Volume((0,) * self.size))

    def _charge(self, what: str, volume: Volume) -> Charge:
        charge = self._charges.get((what, volume))
        if charge is None:
            has_copies = self.world.cluster.copies is not None
            algorithm = self.world.algorithm
            time = phases(what, self.shape, volume, algorithm, has_copies=has_copies)
            found = list(stages(what, self.shape, volume))
            each = zip(*(stage.sent() for stage in found), strict=True)
            sent = tuple(int(sum(one)) for one in each) or (0,) * self.size
            cluster = self.world.cluster
            core_s = core_times(found, cluster) if cluster.shares_cores else ()
            charge = Charge(what, int(volume.size_bytes), time, sent, core_s)
            self._charges[what, volume] = charge
        return charge

    def sent_by(self, position: int, charge: Charge) -> int:
        """Return the bytes that a position hands to its peers, and those for which it stands."""
        return sum(charge.sent) if self.world.one_for_all else charge.sent[position]

    def take_cores(self, charge: Charge) -> None:
        """Let each member's comm lane use a core for its part of a collective."""
        for rank, core_s in zip(self.ranks, charge.core_s, strict=False):
            self.world.cores.take(rank, core_s)

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
        world, link = self.world, self._link_of(phase)
        then = lambda: self._pay_phases(rest, done)  # noqa: E731
        if phase.where == "copy":
            world.clock.after(self._alone_s(phase), then)
            return
        ports = self.inside_ports if phase.where == "inside" else self.across_ports
        num_bytes = phase.bytes_on(link)
        world.clock.after(self._delay_s(phase), world.links.start, ports, num_bytes, then)

    def _link_of(self, phase: Phase) -> Link:
        cluster = self.world.cluster
        by_level = {"inside": cluster.inside, "across": cluster.network, "copy": cluster.copies}
        link = by_level[phase.where]
        assert link is not None, "a cluster without copies has no phases of copies"
        return link

    def _delay_s(self, phase: Phase) -> float:
        return phase.delay_s(self._link_of(phase), self.world.cluster.message_s)

    def _alone_s(self, phase: Phase) -> float:
        """Return the time of a phase that shares its link with nothing."""
        link = self._link_of(phase)
        return self._delay_s(phase) + phase.bytes_on(link) / link.rate_bytes_per_s

    def fixed_parts(self, phases: Sequence[Phase]) -> list[tuple[str, float]]:
        """Return what of a collective's time no other machine's link is busy with, in seconds.

        On one machine that is latency; its bytes are left out, too.
        """
        cluster, across = self.world.cluster, [one for one in phases if one.where == "across"]
        if not across:
            return [("latency", sum(map(self._delay_s, phases)))]
        inside = [one for one in phases if one.where == "inside"]
        read_s = sum(one.num_bytes for one in inside) / cluster.inside.rate_bytes_per_s
        messages_s = sum(one.messages for one in across) * cluster.message_s
        return [
            ("messages", cluster.collective_s + messages_s),
            ("latency", sum(one.rounds for one in across) * cluster.network.latency_s),
            ("inside", sum(map(self._delay_s, inside)) + read_s),
        ]

    def copied_s(self, phases: Sequence[Phase]) -> tuple[float, float]:
        """Return the time of copies from devices to hosts, and of those back."""
        if self.world.cluster.copies is None:
            return 0.0, 0.0
        across = next((at for at, phase in enumerate(phases) if phase.where == "across"), 0)
        out, back = (
            sum(self._alone_s(phase) for phase in part if phase.where == "copy")
            for part in (phases[:across], phases[across:])
        )
        return out, back


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


def copy_from(root: int) -> Callable[[dict[int, torch.Tensor]], None]:
    """Return a function that gives each rank the root's tensor."""

    def copy(brought: dict[int, torch.Tensor]) -> None:
        for position, target in brought.items():
            if position != root:
                target.copy_(brought[root])

    return copy


def copy_blocks(brought: dict[int, tuple[Tensors, Tensors]]) -> None:
    """Give each rank what each other one sends to it; ranks bring (sends, receives)."""
    for position, (_, receives) in brought.items():
        for peer, (sends, _) in brought.items():
            if peer != position and receives[peer].numel():
                receives[peer].view(-1).copy_(sends[position].view(-1))
