"""Ranks in virtual time: the communicator's contract for many ranks in one process.

A collective begins when its last member has come. It takes the phases of `cost.py`, as flows
through the members' links, which collectives under way at the same time share. Then one sum along
the fixed tree serves all members; with sizes only (`meta` memory) there is nothing to add. Memory
that the ranks of a machine would share is one memory for the whole world here: ranks that hold
equal parameters hold them once.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from functools import cached_property
from typing import Any

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
from syncline.comm.blocks import Blocks, Tensors, check_blocks, is_one_tensor
from syncline.comm.group_numbers import GroupNames
from syncline.comm.hub import NUM_CHANNELS
from syncline.comm.shape import by_machine, choose, kind_of
from syncline.comm.virtual_bundle import Calls
from syncline.comm.virtual_endpoint import Booked, Endpoint
from syncline.comm.virtual_group import (
    END_OF_LENDING,
    Charge,
    Gathering,
    VirtualGroup,
    copy_blocks,
    copy_from,
    gather_strips,
    share_sum,
    spread_sum,
    whole_sum,
)
from syncline.comm.virtual_ports import rates_of, ways_of
from syncline.comm.virtual_stream import Streams
from syncline.comm.virtual_window import VirtualWindow
from syncline.comm.window import Counted, Functions, Window
from syncline.errors import CommError
from syncline.virtual.clock import Clock, Signal
from syncline.virtual.fast_link import FastLinks
from syncline.virtual.fill import slack_of
from syncline.virtual.link import Links, Port
from syncline.virtual.processors import Cores
from syncline.virtual.turns import Turns


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
        one_for_all: bool = False,
        threads: int = 1,
    ) -> None:
        self.clock = clock
        self.cluster = cluster
        self.algorithm = algorithm
        self.one_for_all = one_for_all
        """Whether one rank runs: it stands for all, which would do the same at the same time."""
        self.device = torch.device("cpu" if learns else "meta")
        self.last_death_s = -1.0
        self.gone: set[int] = set()
        """The ranks that have died."""
        self.cores = Cores(clock, cluster, threads)
        turns = (Turns(clock, f"the comm lane of rank {rank}") for rank in range(cluster.ranks))
        self.endpoints = [Endpoint(rank, one, self.cores) for rank, one in enumerate(turns)]
        self.copies = cluster.copies if cluster.machines > 1 else None
        """Between devices and hosts, if messages go through them."""
        self.ways, rates = ways_of(cluster), rates_of(cluster)
        self.links: Links | FastLinks = Links(clock, rates)
        if has_fast_links:
            self.links = FastLinks(clock, rates, slack_of(cluster.ranks), cluster.ranks**2)
        self.calls: Calls | None = None
        """Calls to the owners of many strips, if they are bundled (`virtual_bundle.py`)."""
        if isinstance(self.links, FastLinks) and not learns:
            self.calls = Calls(self, self.links, cluster.ranks)
        self.streams = Streams()
        machines = by_machine(range(cluster.ranks), cluster.ranks_per_machine)
        self.names = GroupNames()
        self._everybody = VirtualGroup(self, machines)

    def machine_of(self, rank: int) -> int:
        return rank // self.cluster.ranks_per_machine

    def communicator(self, rank: int) -> VirtualComm:
        """Return a rank's communicator of all ranks."""
        return VirtualComm(self._everybody, self.endpoints[rank])

    def carry(
        self,
        one: int,
        other: int,
        num_bytes: int,
        done: Callable[[], None],
        *,
        is_answer: bool = False,
    ) -> float:
        """Send a message from one rank to another; call `done` when it has arrived.

        Return when it can move, behind messages before it. A rank sends its messages to other
        machines one after the other, each for `message_s`. That of an answer has passed while the
        call was served.
        """
        ports, link = self.ports_between(one, other)
        start = functools.partial(self.links.start, ports, float(num_bytes))
        if self.is_inside(one, other):
            moving_s = self.clock.now_s + link.latency_s + link.lost_s(num_bytes, num_bytes)
            self.clock.at(moving_s, start, done)
        else:
            self.cores.take_for_call(other if is_answer else one, num_bytes, is_answer=is_answer)
            sent_s = self.clock.now_s if is_answer else self.send_messages(one, 1)
            moving_s = sent_s + link.latency_s + link.lost_s(num_bytes, num_bytes)
            if isinstance(self.links, FastLinks):
                self.clock.at(moving_s, start, done, one * self.cluster.ranks + other)
            else:
                self.clock.at(moving_s, self.streams.send, (one, other), start, done)
        return moving_s

    def send_messages(self, rank: int, number: int) -> float:
        """Let a rank send messages to other machines; return when the last of them has left it."""
        sender = self.endpoints[rank]
        began_s = max(self.clock.now_s, sender.sent_s)
        sender.sent_s = began_s + number * self.cluster.message_s
        return sender.sent_s

    def ports_between(self, one: int, other: int) -> tuple[list[Port], Link]:
        """Return the ports that a message from one rank to another goes through, and the link."""
        if self.is_inside(one, other):
            return [("inside", one), ("inside", other)], self.cluster.inside
        out, into = self.ways
        ports: list[Port] = [(out, self.machine_of(one)), (into, self.machine_of(other))]
        return ports, self.cluster.network

    def is_inside(self, one: int, other: int) -> bool:
        """Say whether two ranks are on one machine, where they read each other's memory."""
        return self.machine_of(one) == self.machine_of(other)

    def serving_s(self, caller: int, owner: int, num_bytes: int) -> float:
        """Return how long a call keeps its owner's comm lane busy, besides its function.

        The owner reads the values and writes the answer: in the caller's memory on one machine;
        else in its own, and it sends a message.
        """
        cluster = self.cluster
        if caller != owner and self.is_inside(caller, owner):
            return cluster.inside.moving_s(num_bytes)
        message_s = 0.0 if caller == owner else cluster.message_s
        return message_s + num_bytes / cluster.update_bytes_per_s

    def die(self, endpoint: Endpoint, how: str) -> None:
        """Let a rank die: calls to it end unanswered, and waiting ranks check again."""
        endpoint.died = how
        self.gone.add(endpoint.rank)
        endpoint.turns.end()
        if self.calls is not None:
            self.calls.die(endpoint.rank)
        self.last_death_s = self.clock.now_s
        for pending in list(endpoint.asked):
            pending.done.set()
        endpoint.asked.clear()
        for other in self.endpoints:
            other.notify(self.clock)


class VirtualComm:
    """One virtual rank's communicator of a group."""

    name = "virtual"
    leaders_busy = None  # a trace says it

    def __init__(self, group: VirtualGroup, me: Endpoint) -> None:
        self.group = group
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
        self.num_parts: Counter[Hashable] = Counter()
        """How many parts this rank has asked for, by their ranks: all ranks ask in one order."""

    def allocate(self, num_elements: int, dtype: torch.dtype) -> Memory:
        everybody = self.group.allocate(self._num_allocated, num_elements, dtype)
        self._num_allocated += 1
        if len(everybody) == 1:
            return Memory(everybody[0], everybody * self.size, owner=self.group)
        return Memory(everybody[self.position], everybody, owner=self.group)

    def allocate_common(self, num_elements: int, dtype: torch.dtype) -> Memory:
        memory = self.group.share(self._num_allocated, num_elements, dtype)
        self._num_allocated += 1
        return Memory(memory, is_common=True, owner=self.group)

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
            check_owner(partials.sums, self.group)
            charge = partials.plans[what] = self.group.charge_sum(what, partials)
        self._collect(charge, partials, finish)

    def reduce(self, partials: Partials, root: int) -> None:
        def give_to_root(brought: dict[int, Partials]) -> None:
            brought[root].sums[0].mine.copy_(whole_sum(brought))

        check_owner(partials.sums, self.group)
        self._collect(self.group.charge_sum("reduce", partials, root), partials, give_to_root)

    def all_gather(self, strips: Strips) -> None:
        charge = strips.plans.get("all_gather")
        if charge is None:
            check_owner([strips.memory], self.group)
            charge = strips.plans["all_gather"] = self.group.charge_gather(strips)
        self._collect(charge, strips, gather_strips)

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        # Detach now: when it is copied, the tensor may refer to another rank's memory.
        tensor = each_element_once(tensor.detach())
        charge = self.group.charge_broadcast(tensor.numel(), tensor.itemsize, root)
        self._collect(charge, tensor, copy_from(root))

    def all_to_all(self, sends: Tensors, receives: Tensors, blocks: Blocks) -> None:
        charge = self.group.charge_blocks(blocks, is_one_tensor(sends, self.position))
        if self._world.device.type != "meta":
            check_blocks(sends, receives, blocks, self.position, self.size)
            sends, receives = [[one.detach() for one in each] for each in (sends, receives)]
        self._collect(charge, (sends, receives), copy_blocks)

    def barrier(self) -> None:
        self._collect(self.group.charge_barrier(), None, lambda brought: None)

    def end_lending(self) -> None:
        """Meet the ranks of this machine: in a real run only they read this rank's memory."""
        if self.group.shape.kind == "shared memory":
            self._meet(END_OF_LENDING, None, lambda brought: None)
        elif self.group.shape.kind == "hierarchical":
            self._inside.end_lending()

    @cached_property
    def _inside(self) -> VirtualComm:
        """This machine's ranks of the group."""
        (mine,) = (machine for machine in self.machines if self.endpoint.rank in machine)
        return VirtualComm(self.group.part((mine,), 0), self.endpoint)

    def window(self, num_elements: int, dtype: torch.dtype, functions: Functions) -> Window:
        number = self._num_windows
        self._num_windows += 1
        num_bytes = num_elements * dtype.itemsize
        calls, me = self._world.calls, self.endpoint
        if calls is not None and any(isinstance(one, Counted) for one in functions.values()):
            me.turns = Booked(self._world.clock, calls, me.rank)
        return VirtualWindow(self.group, self.endpoint, number, num_bytes, functions)

    def subgroup(self, ranks: Sequence[int]) -> Communicator | None:
        machines = choose(self.machines, ranks)
        self.num_parts[machines] += 1
        if self.endpoint.rank not in ranks:
            return None
        if kind_of(machines) == "alone":
            return Alone(self.endpoint.rank, self.traffic, self._world.device)
        return VirtualComm(self.group.part(machines, self.num_parts[machines]), self.endpoint)

    def close(self) -> None:
        pass

    def _collect(
        self, charge: Charge, brings: Any, finish: Callable[[dict[int, Any]], None]
    ) -> None:
        """Count a collective's bytes and join it. A rank alone sends nothing."""
        if self.size > 1:
            sent = self.group.sent_by(self.position, charge)
            self.traffic.add(self.endpoint.channel, charge.what, sent)
        self._meet(charge, brings, finish)

    def _meet(self, charge: Charge, brings: Any, finish: Callable[[dict[int, Any]], None]) -> None:
        """Wait for all members. The last to come lets the time pass and computes for all."""
        group, me = self.group, self.endpoint
        # Exchanges of blocks run beside hooks, which have the endpoint's channel.
        channel = NUM_CHANNELS if charge.what == "all_to_all" else me.channel
        number = (channel, self._num_met[channel])
        self._num_met[channel] += 1
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
        if len(gathering.brought) == group.num_callers:
            del group.gatherings[number]
            gathering.met_s = self._world.clock.now_s

            def end() -> None:
                if self._world.device.type != "meta":
                    with torch.no_grad():
                        finish(gathering.brought)
                gathering.done.set()

            group.take_cores(charge)
            group.pay(charge.phases, end)
        gathering.done.wait(lambda: group.explain(gathering, me.doing))
        recorder = me.traffic.recorder
        if recorder is not None:
            exchange, met_s = f"{group.name}.{number[0]}:{number[1]}", gathering.met_s
            copied_s = group.copied_s(charge.phases)
            recorder.end_exchange(exchange, met_s, group.fixed_parts(charge.phases), copied_s)
