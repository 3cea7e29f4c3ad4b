"""Ranks in virtual time: the communicator's contract for many ranks in one process.

A collective begins when its last member has come. It takes the phases of `cost.py`, as flows
through the members' links, which collectives under way at the same time share. Then one sum along
the fixed tree serves all members; with sizes only (`meta` memory) there is nothing to add. Memory
that the ranks of a machine would share is one memory for the whole world here: ranks that hold
equal parameters hold them once.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch

from syncline.cluster import Cluster, Link
from syncline.comm.alone import Alone
from syncline.comm.base import (
    Communicator,
    Memory,
    Partials,
    Strips,
    check_owner,
    each_element_once,
)
from syncline.comm.cost import Phase
from syncline.comm.hub import NUM_CHANNELS
from syncline.comm.shape import Machines, by_machine, choose, kind_of
from syncline.comm.traffic import Traffic
from syncline.comm.virtual_group import (
    END_OF_LENDING,
    Charge,
    Gathering,
    VirtualGroup,
    gather_strips,
    share_sum,
    spread_sum,
    whole_sum,
)
from syncline.comm.virtual_window import Asked, VirtualWindow
from syncline.comm.window import Functions, Window
from syncline.errors import CommError
from syncline.perf.trace import TaskId
from syncline.virtual.clock import Clock, Signal
from syncline.virtual.fast_link import FastLinks
from syncline.virtual.link import Links, Port


@dataclass(eq=False)
class Endpoint:
    """One virtual rank: its traffic, what it does and waits for, and the calls it has to serve."""

    rank: int
    traffic: Traffic = field(default_factory=Traffic)
    channel: int = 0
    """The channel of the hook that runs. Collectives of one channel keep their order."""
    hook: tuple[str, int, int] | None = None
    """The phase, bucket and step of the hook that runs; bucket -1 for none."""
    cause: TaskId | None = None
    """The task after which the current hook could run."""
    waited_for: TaskId | None = None
    """The task after which the last collective could begin: the `cause` of its last member."""
    died: str = ""
    asked: dict[Asked, None] = field(default_factory=dict)
    """Calls and gets of other ranks that this rank has not answered yet."""
    queue: deque[tuple[Callable[[], int], Callable[[int], None]]] = field(default_factory=deque)
    """Calls that this rank serves, one after the other."""
    is_serving: bool = False
    changed: Signal | None = None
    """Set when the next call has been served."""

    @property
    def doing(self) -> str:
        """What the rank does, for error messages."""
        if self.hook is None:
            return ""
        phase, bucket, step = self.hook
        place = f"bucket {bucket} of " if bucket >= 0 else ""
        return f"rank {self.rank}, {phase} of {place}step {step}"

    def notify(self, clock: Clock) -> None:
        """Wake processes that wait in `until`, to check their condition again."""
        changed, self.changed = self.changed, Signal(clock)
        if changed is not None:
            changed.set()


class VirtualWorld:
    """All ranks of a cluster, their links, and the memory that they allocate."""

    def __init__(
        self,
        clock: Clock,
        cluster: Cluster,
        *,
        learns: bool,
        algorithm: str,
        has_fast_links: bool = False,
    ) -> None:
        self.clock = clock
        self.cluster = cluster
        self.algorithm = algorithm
        self.device = torch.device("cpu" if learns else "meta")
        self.bundles_calls = has_fast_links and not learns
        """Whether calls to the owners of many strips are one message (`virtual_bundle.py`)."""
        self.busy_until_s = np.zeros(cluster.ranks)
        """By rank, if calls are bundled: when it will have served all that has arrived."""
        self.gone: set[int] = set()
        """The ranks that have died."""
        self.endpoints = [Endpoint(rank) for rank in range(cluster.ranks)]
        rates: dict[Port, float] = {}
        for machine in range(cluster.machines):
            rates["out", machine] = rates["in", machine] = cluster.network.rate_bytes_per_s
        for rank in range(cluster.ranks):
            rates["inside", rank] = cluster.inside.rate_bytes_per_s
        self.links = FastLinks(clock, rates) if has_fast_links else Links(clock, rates)
        machines = by_machine(range(cluster.ranks), cluster.ranks_per_machine)
        self._everybody = VirtualGroup(self, machines)

    def machine_of(self, rank: int) -> int:
        return rank // self.cluster.ranks_per_machine

    def communicator(self, rank: int) -> VirtualComm:
        """Return a rank's communicator of all ranks."""
        return VirtualComm(self._everybody, self.endpoints[rank])

    def carry(self, one: int, other: int, num_bytes: int, done: Callable[[], None]) -> None:
        """Send a message from one rank to another; call `done` when it has arrived."""
        ports, link = self.ports_between(one, other)
        self.clock.after(link.latency_s, self.links.start, ports, float(num_bytes), done)

    def ports_between(self, one: int, other: int) -> tuple[list[Port], Link]:
        """Return the ports that a message from one rank to another goes through, and the link."""
        machines = self.machine_of(one), self.machine_of(other)
        if machines[0] == machines[1]:
            return [("inside", one), ("inside", other)], self.cluster.inside
        return [("out", machines[0]), ("in", machines[1])], self.cluster.network

    def serve(self, owner: Endpoint, run: Callable[[], int], end: Callable[[int], None]) -> None:
        """Let a rank run a call after those before it, which may take virtual time.

        Then `end` is called with its result.
        """
        if self.bundles_calls:
            if not owner.died:
                result, seconds = self.clock.measure(run)
                begin_s = max(float(self.busy_until_s[owner.rank]), self.clock.now_s)
                self.busy_until_s[owner.rank] = begin_s + seconds
                self.clock.at(begin_s + seconds, end, result)
            return
        owner.queue.append((run, end))
        if not owner.is_serving and not owner.died:
            owner.is_serving = True
            self.clock.spawn(f"rank {owner.rank} serving", self._serve_all, owner)

    def _serve_all(self, owner: Endpoint) -> None:
        while owner.queue and not owner.died:
            run, end = owner.queue.popleft()
            end(run())
        owner.is_serving = False

    def die(self, endpoint: Endpoint, how: str) -> None:
        """Let a rank die: calls to it end unanswered, and waiting ranks check again."""
        endpoint.died = how
        self.gone.add(endpoint.rank)
        for pending in list(endpoint.asked):
            pending.done.set()
        endpoint.asked.clear()
        for other in self.endpoints:
            other.notify(self.clock)

    def pay(self, group: VirtualGroup, phases: Sequence[Phase], done: Callable[[], None]) -> None:
        """Let the time of a collective pass, phase by phase, then call `done`."""
        if not phases:
            done()
            return
        phase, *rest = phases
        is_inside = phase.where == "inside"
        link = self.cluster.inside if is_inside else self.cluster.network
        ports = group.inside_ports if is_inside else group.across_ports
        then = lambda: self.pay(group, rest, done)  # noqa: E731
        self.clock.after(
            phase.rounds * link.latency_s, self.links.start, ports, phase.num_bytes, then
        )


class VirtualComm:
    """One virtual rank's communicator of a group."""

    name = "virtual"

    def __init__(self, group: VirtualGroup, me: Endpoint) -> None:
        self._group = group
        self._world = group.world
        self.endpoint = me
        self.traffic = me.traffic
        self.ranks = group.ranks
        self.size = group.size
        self.machines = group.machines
        self.num_machines = len(group.machines)
        # As many as a real network has: the layout depends on it.
        self.num_channels = NUM_CHANNELS if self.num_machines > 1 else 1
        self.position = group.ranks.index(me.rank)
        self._num_met: Counter[int] = Counter()
        """How many collectives this rank has come to, by channel."""
        self._num_allocated = 0
        self._num_windows = 0
        self._num_parts: Counter[Machines] = Counter()

    def allocate(self, num_elements: int, dtype: torch.dtype) -> Memory:
        everybody = self._group.allocate(self._num_allocated, num_elements, dtype)
        self._num_allocated += 1
        if len(everybody) == 1:
            return Memory(everybody[0], everybody * self.size, owner=self._group)
        return Memory(everybody[self.position], everybody, owner=self._group)

    def allocate_common(self, num_elements: int, dtype: torch.dtype) -> Memory:
        memory = self._group.share(self._num_allocated, num_elements, dtype)
        self._num_allocated += 1
        return Memory(memory, is_common=True, owner=self._group)

    def announce(self, partials: Partials) -> None:
        pass

    def reduce_scatter(self, partials: Partials) -> None:
        self._sum("reduce_scatter", partials, spread_sum)

    def all_reduce(self, partials: Partials) -> None:
        self._sum("all_reduce", partials, share_sum)

    def _sum(
        self, what: str, partials: Partials, finish: Callable[[dict[int, Partials]], None]
    ) -> None:
        charge = partials.plans.get(what)
        if charge is None:
            check_owner(partials.sums, self._group)
            charge = partials.plans[what] = self._group.charge_sum(what, partials)
        self._collect(charge, partials, finish)

    def reduce(self, partials: Partials, root: int) -> None:
        def give_to_root(brought: dict[int, Partials]) -> None:
            brought[root].sums[0].mine.copy_(whole_sum(brought))

        check_owner(partials.sums, self._group)
        self._collect(self._group.charge_sum("reduce", partials, root), partials, give_to_root)

    def all_gather(self, strips: Strips) -> None:
        charge = strips.plans.get("all_gather")
        if charge is None:
            check_owner([strips.memory], self._group)
            charge = strips.plans["all_gather"] = self._group.charge_gather(strips)
        self._collect(charge, strips, gather_strips)

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        def copy(brought: dict[int, torch.Tensor]) -> None:
            for position, target in brought.items():
                if position != root:
                    target.copy_(brought[root])

        # Detach now: when it is copied, the tensor may refer to another rank's memory.
        tensor = each_element_once(tensor.detach())
        charge = self._group.charge_broadcast(tensor.numel(), tensor.itemsize, root)
        self._collect(charge, tensor, copy)

    def barrier(self) -> None:
        self._collect(self._group.charge_barrier(), None, lambda brought: None)

    def end_lending(self) -> None:
        """Meet the ranks of this machine: in a real run only they read this rank's memory."""
        if self._group.shape.kind == "shared memory":
            self._meet(END_OF_LENDING, None, lambda brought: None)
        elif self._group.shape.kind == "hierarchical":
            self._inside.end_lending()

    @cached_property
    def _inside(self) -> VirtualComm:
        """This machine's ranks of the group."""
        (mine,) = (machine for machine in self.machines if self.endpoint.rank in machine)
        return VirtualComm(self._group.part((mine,), 0), self.endpoint)

    def window(self, num_elements: int, dtype: torch.dtype, functions: Functions) -> Window:
        number = self._num_windows
        self._num_windows += 1
        num_bytes = num_elements * dtype.itemsize
        return VirtualWindow(self._group, self.endpoint, number, num_bytes, functions)

    def subgroup(self, ranks: Sequence[int]) -> Communicator | None:
        machines = choose(self.machines, ranks)
        self._num_parts[machines] += 1
        if self.endpoint.rank not in ranks:
            return None
        if kind_of(machines) == "alone":
            return Alone(self.endpoint.rank, self.traffic, self._world.device)
        return VirtualComm(self._group.part(machines, self._num_parts[machines]), self.endpoint)

    def close(self) -> None:
        pass

    def _collect(
        self, charge: Charge, brings: Any, finish: Callable[[dict[int, Any]], None]
    ) -> None:
        """Count a collective's bytes and join it. A rank alone sends nothing."""
        if self.size > 1:
            self.traffic.add(self.endpoint.channel, charge.what, charge.sent[self.position])
        self._meet(charge, brings, finish)

    def _meet(self, charge: Charge, brings: Any, finish: Callable[[dict[int, Any]], None]) -> None:
        """Wait for all members. The last to come lets the time pass and computes for all."""
        group, me = self._group, self.endpoint
        number = (me.channel, self._num_met[me.channel])
        self._num_met[me.channel] += 1
        gathering = group.gatherings.get(number)
        if gathering is None:
            signal = Signal(self._world.clock)
            gathering = group.gatherings[number] = Gathering(charge, signal)
        others = gathering.charge
        if (others.what, others.size_bytes) != (charge.what, charge.size_bytes):
            raise CommError(
                f"rank {me.rank} calls {charge.what} of {charge.size_bytes} bytes where others "
                f"call {others.what} of {others.size_bytes}: all ranks need one order"
            )
        gathering.brought[self.position] = brings
        if len(gathering.brought) == group.size:
            del group.gatherings[number]
            gathering.began_after = me.cause

            def end() -> None:
                if self._world.device.type != "meta":
                    with torch.no_grad():
                        finish(gathering.brought)
                gathering.done.set()

            self._world.pay(group, charge.phases, end)
        gathering.done.wait(lambda: self._explain(gathering))
        me.waited_for = gathering.began_after

    def _explain(self, gathering: Gathering) -> str:
        missing = sorted(rank for at, rank in enumerate(self.ranks) if at not in gathering.brought)
        named = [f"{rank}{self._world.endpoints[rank].died}" for rank in missing[:6]]
        more = f" and {len(missing) - 6} more" if len(missing) > 6 else ""
        what = gathering.charge.what
        return f"{self.endpoint.doing}: {what} waits for rank {', '.join(named)}{more}"
