"""Ranks in virtual time: the communicator's contract kept by one process, at the price of a model.

A collective begins when its last member has come. What it costs is `perf.cost`'s plan for it, paid
as flows through the members' links, so that whatever is under way at once shares them. Then one
sum along the fixed tree serves all members; with sizes only (`meta` memory) there is nothing to
add. Memory that the ranks of a machine would share is one memory for the whole world here: ranks
that hold equal parameters hold them once.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from syncline.cluster import Cluster
from syncline.comm.alone import Alone
from syncline.comm.base import Communicator, Memory, Partials, Strips, check_owner, prepare_reach
from syncline.comm.shape import Machines, by_machine, choose, kind_of, positions_of
from syncline.comm.virtual_window import Asked, VirtualWindow
from syncline.comm.window import Functions, Window
from syncline.errors import CommError
from syncline.perf.cost import Phase, plan
from syncline.perf.trace import TaskId
from syncline.virtual.clock import Clock, Signal
from syncline.virtual.link import Links, Port


@dataclass(eq=False)
class Endpoint:
    """One rank, as its communicators see it: what it does, and what it waited for, for people."""

    rank: int
    doing: str = ""
    cause: TaskId | None = None
    """The task that lets the present hook run."""
    waited_for: TaskId | None = None
    """The task that let the last collective begin: its last member's cause."""
    died: str = ""
    asked: dict[Asked, None] = field(default_factory=dict)
    """What others have asked of this rank and not got yet."""
    queue: deque[Callable[[], None]] = field(default_factory=deque)
    """Calls that this rank has to serve: one after the other."""
    is_serving: bool = False
    changed: Signal | None = None
    """Set when the next call has been served."""

    def look_up(self, clock: Clock) -> None:
        """Let whoever waits for something to change look again."""
        changed, self.changed = self.changed, Signal(clock)
        if changed is not None:
            changed.set()


class VirtualWorld:
    """All ranks of a cluster, their links, and the memory that they allocate."""

    def __init__(self, clock: Clock, cluster: Cluster, *, learns: bool, algorithm: str) -> None:
        self.clock = clock
        self.cluster = cluster
        self.algorithm = algorithm
        self.device = torch.device("cpu" if learns else "meta")
        self.endpoints = [Endpoint(rank) for rank in range(cluster.ranks)]
        rates: dict[Port, float] = {}
        for machine in range(cluster.machines):
            rates["out", machine] = rates["in", machine] = cluster.network.rate_bytes_per_s
        for rank in range(cluster.ranks):
            rates["inside", rank] = cluster.inside.rate_bytes_per_s
        self.links = Links(clock, rates)
        self.cuts: dict[tuple[tuple[int, ...], int, int], tuple[int, ...]] = {}
        """Where a group cuts a bucket into strips: worked out by the first rank that asks."""
        self._plans: dict[tuple[str, int, int, int], tuple[Phase, ...]] = {}
        machines = by_machine(range(cluster.ranks), cluster.ranks_per_machine)
        self._everybody = VirtualGroup(self, machines)

    def machine_of(self, rank: int) -> int:
        return rank // self.cluster.ranks_per_machine

    def communicator(self, rank: int) -> VirtualComm:
        """Return the communicator of all ranks, as one of them holds it."""
        return VirtualComm(self._everybody, self.endpoints[rank])

    def charge(
        self, group: VirtualGroup, what: str, size_bytes: int, done: Callable[[], None]
    ) -> None:
        """Let the time of a collective pass, then call back."""
        key = (what, size_bytes, group.num_machines, group.ranks_per_machine)
        phases = self._plans.get(key)
        if phases is None:
            phases = self._plans[key] = plan(
                what,
                size_bytes,
                machines=group.num_machines,
                ranks_per_machine=group.ranks_per_machine,
                algorithm=self.algorithm,
            )
        self._pay(group, list(phases), done)

    def carry(self, one: int, other: int, num_bytes: int, done: Callable[[], None]) -> None:
        """Let a message travel from one rank to another, then call back."""
        machines = self.machine_of(one), self.machine_of(other)
        if machines[0] == machines[1]:
            link, ports = self.cluster.inside, [("inside", one), ("inside", other)]
        else:
            link, ports = self.cluster.network, [("out", machines[0]), ("in", machines[1])]
        self.clock.after(link.latency_s, self.links.start, ports, float(num_bytes), done)

    def serve(self, owner: Endpoint, call: Callable[[], None]) -> None:
        """Let a rank serve a call when it has served those before: that may take time."""
        owner.queue.append(call)
        if not owner.is_serving and not owner.died:
            owner.is_serving = True
            self.clock.spawn(f"rank {owner.rank} serving", self._serve_all, owner)

    def _serve_all(self, owner: Endpoint) -> None:
        while owner.queue and not owner.died:
            owner.queue.popleft()()
        owner.is_serving = False

    def die(self, endpoint: Endpoint, how: str) -> None:
        """A rank is gone: what others have asked of it will not be answered."""
        endpoint.died = how
        for pending in list(endpoint.asked):
            pending.done.set()
        endpoint.asked.clear()
        for other in self.endpoints:
            other.look_up(self.clock)

    def _pay(self, group: VirtualGroup, phases: list[Phase], done: Callable[[], None]) -> None:
        if not phases:
            done()
            return
        phase, *rest = phases
        is_inside = phase.where == "inside"
        link = self.cluster.inside if is_inside else self.cluster.network
        ports = group.inside_ports if is_inside else group.across_ports
        then = lambda: self._pay(group, rest, done)  # noqa: E731
        self.clock.after(
            phase.rounds * link.latency_s, self.links.start, ports, phase.num_bytes, then
        )


@dataclass(eq=False)
class _Meeting:
    """One collective: who has come, with what."""

    what: str
    size_bytes: int
    done: Signal
    brought: dict[int, Any] = field(default_factory=dict)
    began_after: TaskId | None = None


class VirtualGroup:
    """Some ranks that hold collectives together."""

    def __init__(self, world: VirtualWorld, machines: Machines) -> None:
        self.world = world
        self.machines = machines
        self.ranks = positions_of(machines)
        self.size = len(self.ranks)
        self.num_machines = len(machines)
        self.ranks_per_machine = max(map(len, machines))
        self.inside_ports: list[Port] = [("inside", rank) for rank in self.ranks]
        self.across_ports: list[Port] = [
            (way, world.machine_of(machine[0])) for machine in machines for way in ("out", "in")
        ]
        self.meetings: dict[int, _Meeting] = {}
        self.allocations: list[tuple[torch.Tensor, ...]] = []
        self.parts: dict[tuple[Machines, int], VirtualGroup] = {}
        self.windows: dict[tuple[int, int], VirtualWindow] = {}
        """Each rank's end of each window, by the window's number and the rank."""

    def allocate(
        self, number: int, num_elements: int, dtype: torch.dtype
    ) -> tuple[torch.Tensor, ...]:
        """Return everybody's memory of the number-th allocation; who asks first makes it."""
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


class VirtualComm:
    """What one virtual rank holds of a group."""

    name = "virtual"
    num_channels = 1

    def __init__(self, group: VirtualGroup, me: Endpoint) -> None:
        self._group = group
        self._world = group.world
        self.endpoint = me
        self.ranks = group.ranks
        self.size = group.size
        self.machines = group.machines
        self.num_machines = group.num_machines
        self.position = group.ranks.index(me.rank)
        self._num_met = 0
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

    def publish(self, partials: Partials) -> None:
        pass

    def reduce_scatter(self, partials: Partials) -> None:
        check_owner(partials.slots, self._group)
        self._meet("reduce_scatter", _bytes_of(partials), partials, _spread_sum)

    def all_gather(self, strips: Strips) -> None:
        check_owner([strips.memory], self._group)
        size_bytes = strips.memory.mine.numel() * strips.memory.mine.itemsize
        self._meet("all_gather", size_bytes, strips, _gather)

    def all_reduce(self, partials: Partials) -> None:
        self._meet("all_reduce", _bytes_of(partials), partials, _share_sum)

    def reduce(self, partials: Partials, root: int) -> None:
        def give_to_root(brought: dict[int, Partials]) -> None:
            brought[root].slots[0].mine.copy_(_whole_sum(brought))

        self._meet("reduce", _bytes_of(partials), partials, give_to_root)

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        def copy(brought: dict[int, torch.Tensor]) -> None:
            for position, target in brought.items():
                if position != root:
                    target.copy_(brought[root])

        # Detached here: by the time it is copied the tensor may stand for another rank's memory.
        self._meet("broadcast", tensor.numel() * tensor.itemsize, tensor.detach(), copy)

    def barrier(self) -> None:
        self._meet("barrier", 0, None, lambda brought: None)

    def window(self, num_elements: int, dtype: torch.dtype, functions: Functions) -> Window:
        number = self._num_windows
        self._num_windows += 1
        return VirtualWindow(self._group, self.endpoint, number, functions)

    def subgroup(self, ranks: Sequence[int]) -> Communicator | None:
        machines = choose(self.machines, ranks)
        self._num_parts[machines] += 1
        if self.endpoint.rank not in ranks:
            return None
        if kind_of(machines) == "alone":
            return Alone(self.endpoint.rank, self._world.device)
        key = (machines, self._num_parts[machines])
        group = self._group.parts.get(key)
        if group is None:
            group = self._group.parts[key] = VirtualGroup(self._world, machines)
        return VirtualComm(group, self.endpoint)

    def close(self) -> None:
        pass

    def _meet(
        self, what: str, size_bytes: int, brings: Any, finish: Callable[[dict[int, Any]], None]
    ) -> None:
        """Wait for all members; the last to come pays for all, and does the arithmetic for all."""
        group, me, number = self._group, self.endpoint, self._num_met
        self._num_met += 1
        meeting = group.meetings.get(number)
        if meeting is None:
            signal = Signal(self._world.clock)
            meeting = group.meetings[number] = _Meeting(what, size_bytes, signal)
        if (meeting.what, meeting.size_bytes) != (what, size_bytes):
            raise CommError(
                f"rank {me.rank} calls {what} of {size_bytes} bytes where others call "
                f"{meeting.what} of {meeting.size_bytes}: collectives need one order on all ranks"
            )
        meeting.brought[self.position] = brings
        if len(meeting.brought) == group.size:
            del group.meetings[number]
            meeting.began_after = me.cause

            def end() -> None:
                if self._world.device.type != "meta":
                    with torch.no_grad():
                        finish(meeting.brought)
                meeting.done.set()

            self._world.charge(group, what, size_bytes, end)
        meeting.done.wait(lambda: self._explain(meeting))
        me.waited_for = meeting.began_after

    def _explain(self, meeting: _Meeting) -> str:
        missing = sorted(rank for at, rank in enumerate(self.ranks) if at not in meeting.brought)
        named = [f"{rank}{self._world.endpoints[rank].died}" for rank in missing[:6]]
        more = f" and {len(missing) - 6} more" if len(missing) > 6 else ""
        return f"{self.endpoint.doing}: {meeting.what} waits for rank {', '.join(named)}{more}"


def _bytes_of(partials: Partials) -> int:
    """Return what the rank with most partial sums brings."""
    mine = partials.slots[0].mine
    return mine.numel() * mine.itemsize * max(map(len, partials.spread.nodes))


def _whole_sum(brought: dict[int, Partials]) -> torch.Tensor:
    """Add up everybody's partial sums, all of them at once: the same pairs as strip by strip."""
    first = brought[0]
    if "sum" not in first.plans:
        out = torch.empty_like(first.slots[0].mine)
        first.plans["sum"] = (prepare_reach(first, 0, out.numel(), out), out)
    add_up, out = first.plans["sum"]
    add_up()
    assert isinstance(out, torch.Tensor)
    return out


def _spread_sum(brought: dict[int, Partials]) -> None:
    whole = _whole_sum(brought)
    for position, partials in brought.items():
        start, stop = partials.cuts[position : position + 2]
        if start < stop:
            partials.strip(position).copy_(whole[start:stop])


def _share_sum(brought: dict[int, Partials]) -> None:
    whole = _whole_sum(brought)
    for partials in brought.values():
        partials.result.copy_(whole)


def _gather(brought: dict[int, Strips]) -> None:
    if brought[0].memory.is_common:
        return
    for position, strips in brought.items():
        for owner, theirs in brought.items():
            if owner != position:
                strips.mine(owner).copy_(theirs.mine(owner))
