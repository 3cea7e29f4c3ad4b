"""What happens inside a group with a leader: its members' sums to the leader, and results back.

Two ways: members read and write each other's memory (`ByMemory`), or send messages (`ByMessages`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from syncline.comm.alone import Alone
from syncline.comm.base import Communicator, Memory, Partials, Strips, even_cuts
from syncline.comm.network import Network
from syncline.comm.operations import about
from syncline.comm.real import Prepared
from syncline.comm.shared_memory import SharedMemory
from syncline.comm.traffic import Traffic
from syncline.comm.tree import Node, prepare_sum, sources_below

Pair = tuple[torch.Tensor, torch.Tensor]


class Sums(NamedTuple):
    """How a group adds up its terms, and where its leader then finds the results."""

    plan: Prepared
    sums: list[torch.Tensor]
    """On the leader: the sum of each node that the group can complete."""


class InsideGroup(Protocol):
    """The members of one group. Every member makes the same calls; `comm` has allocated memory."""

    @property
    def comm(self) -> Communicator: ...

    def plan_sums(self, partials: Partials, ends: Sequence[Node]) -> Sums:
        """Prepare the sums of `ends`, the largest nodes that the group holds."""

    def plan_strips(self, strips: Strips) -> Prepared:
        """Prepare that each member takes its own strip from the leader's memory."""

    def plan_collect(self, strips: Strips) -> Prepared:
        """Prepare that the leader's memory holds the strips of all members."""

    def plan_all(self, memory: Memory) -> Prepared:
        """Prepare that each member takes all of the leader's memory."""


class ByMemory:
    """Members on one machine. They meet before one reads what another has written."""

    def __init__(
        self, comm: SharedMemory | Alone, members: Sequence[int], leader: int, traffic: Traffic
    ) -> None:
        """`members` are positions in the whole communicator, by position in `comm`."""
        self.comm = comm
        self._members = members
        self._leader = leader
        self._traffic = traffic
        self._leads = comm.position == leader

    def _meet(self, what: str, which: int) -> None:
        if isinstance(self.comm, SharedMemory):
            self.comm.meet(what, which)

    def _copy_after_meeting(self, which: int, pairs: Sequence[Pair]) -> Prepared:
        """Prepare a meeting, and copies (own memory, a member's) after it."""

        def run(what: str) -> None:
            self._meet(what, which)
            for mine, theirs in pairs:
                mine.copy_(theirs)
            if pairs:
                self._traffic.spent("copy")

        return Prepared(run, 0)

    def plan_sums(self, partials: Partials, ends: Sequence[Node]) -> Sums:
        """Let each member add up an equal part of the elements, in place.

        A sum replaces the first of its terms: nobody else reads that part of it.
        """
        which, terms = about(partials.sums[0]), self._terms(partials)
        shares = even_cuts(partials.sums[0].mine.numel(), self.comm.size)
        low, high = shares[self.comm.position : self.comm.position + 2]
        sums, adds = [], []
        for end in ends:
            below = sources_below(end, terms)
            sums.append(below[0][1])
            if len(below) > 1:
                mine = [(node, term[low:high]) for node, term in below]
                adds.append(prepare_sum(end, mine, mine[0][1], 1.0))

        def run(what: str) -> None:
            self._meet(what, which)
            if adds:
                for add_up in adds:
                    add_up()
                self._traffic.spent("sum")
                self._meet(what, which)

        return Sums(Prepared(run, 0), sums)

    def _terms(self, partials: Partials) -> list[tuple[Node, torch.Tensor]]:
        """Return the partial sums of all members."""
        terms = []
        for at, position in enumerate(self._members):
            for node, memory in zip(partials.spread.nodes[position], partials.sums, strict=False):
                assert memory.peers is not None
                terms.append((node, memory.peers[at]))
        return terms

    def plan_strips(self, strips: Strips) -> Prepared:
        memory = strips.memory
        assert memory.peers is not None
        position = self._members[self.comm.position]
        mine = strips.mine(position)
        theirs = memory.peers[self._leader][strips.cuts[position] : strips.cuts[position + 1]]
        pairs = [] if self._leads else [(mine, theirs)]
        return self._copy_after_meeting(about(memory), pairs)

    def plan_collect(self, strips: Strips) -> Prepared:
        memory, pairs = strips.memory, []
        if self._leads and not memory.is_common:
            assert memory.peers is not None
            for at, position in enumerate(self._members):
                low, high = strips.cuts[position : position + 2]
                if at != self.comm.position and low < high:
                    pairs.append((memory.mine[low:high], memory.peers[at][low:high]))
        return self._copy_after_meeting(about(memory), pairs)

    def plan_all(self, memory: Memory) -> Prepared:
        pairs = []
        if not (memory.is_common or self._leads):
            assert memory.peers is not None
            pairs = [(memory.mine, memory.peers[self._leader])]
        return self._copy_after_meeting(about(memory), pairs)


class ByMessages:
    """Members that share no memory: each sends to its leader and gets an answer."""

    def __init__(self, comm: Network, members: Sequence[int], leader: int) -> None:
        """`members` are positions in the whole communicator, by position in `comm`."""
        self.comm = comm
        self._members = members
        self._leader = leader
        self._leads = comm.position == leader
        self._others = [at for at in range(comm.size) if at != leader]

    def plan_sums(self, partials: Partials, ends: Sequence[Node]) -> Sums:
        """Let the leader receive all terms and add them up."""
        comm, which, nodes = self.comm, about(partials.sums[0]), partials.spread.nodes
        whole, own = partials.sums[0].mine, nodes[self._members[self.comm.position]]
        mine = [(node, one.mine) for node, one in zip(own, partials.sums, strict=False)]
        if not self._leads:
            sends = [(self._leader, term) for _, term in mine]
            return Sums(comm.prepare_exchange(sends, [], which), [])
        theirs = [(at, node) for at in self._others for node in nodes[self._members[at]]]
        room = comm.scratch(len(theirs) * whole.numel(), whole.dtype).view(
            len(theirs), whole.numel()
        )
        receives = [(at, room[k]) for k, (at, _) in enumerate(theirs)]
        exchange = comm.prepare_exchange([], receives, which)
        terms = mine + [(node, room[k]) for k, (_, node) in enumerate(theirs)]
        sums, adds = [], []
        for end in ends:
            below = sources_below(end, terms)
            sums.append(below[0][1])
            adds.append(prepare_sum(end, below, below[0][1], 1.0))

        def run(what: str) -> None:
            exchange.run(what)
            for add_up in adds:
                add_up()
            comm.traffic.spent("sum")

        return Sums(Prepared(run, exchange.num_bytes), sums)

    def plan_strips(self, strips: Strips) -> Prepared:
        pieces = [strips.mine(position) for position in self._members]
        if self._leads:
            sends = [(at, pieces[at]) for at in self._others]
            return self.comm.prepare_exchange(sends, [], about(strips.memory))
        receives = [(self._leader, pieces[self.comm.position])]
        return self.comm.prepare_exchange([], receives, about(strips.memory))

    def plan_collect(self, strips: Strips) -> Prepared:
        pieces = [strips.mine(position) for position in self._members]
        if self._leads:
            receives = [(at, pieces[at]) for at in self._others]
            return self.comm.prepare_exchange([], receives, about(strips.memory))
        sends = [(self._leader, pieces[self.comm.position])]
        return self.comm.prepare_exchange(sends, [], about(strips.memory))

    def plan_all(self, memory: Memory) -> Prepared:
        if self._leads:
            sends = [(at, memory.mine) for at in self._others]
            return self.comm.prepare_exchange(sends, [], about(memory))
        return self.comm.prepare_exchange([], [(self._leader, memory.mine)], about(memory))
