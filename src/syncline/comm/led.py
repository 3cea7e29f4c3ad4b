"""Groups of ranks with a leader each: sums inside the groups, leaders across, results back inside.

Yu et al. 2019 (arXiv 1906.05936) call the leaders communicators. First each group adds up its terms
as far as the tree of sums allows. Then the leaders exchange the groups' sums, and each gets the sum
of its group's strips. Then the members of a group take their own strips from their leader. A gather
goes the same way. So only leaders send messages to other groups: fewer and larger ones than if each
rank sent its own. But every byte of a group goes through its leader.

Groups may have any shape. If each lies inside a machine, its members read each other's memory;
otherwise they send messages to their leader (`inside_group.py`). Broadcasts, barriers and
exchanges of blocks are the world's: leaders would gain nothing there.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from syncline.comm.alone import Alone
from syncline.comm.base import Communicator, Memory, Partials, Strips, check_owner
from syncline.comm.blocks import Blocks, Tensors, blocks_among
from syncline.comm.busy import BusyTime
from syncline.comm.inside_group import ByMemory, ByMessages, InsideGroup
from syncline.comm.network import Network
from syncline.comm.operations import about
from syncline.comm.real import Prepared, RealCommunicator, join_plans, plan_in_two_halves
from syncline.comm.shape import Groups, group_cuts, led_ranks, led_shape, lie_inside
from syncline.comm.shared_memory import SharedMemory
from syncline.comm.tree import Spread, prepare_sum
from syncline.comm.volume import sent_bytes, stages, volume_of_partials, volume_of_strips
from syncline.comm.window import Functions, Window

Part = SharedMemory | Network | Alone


def lead_real(world: RealCommunicator, groups: Groups, leaders: Sequence[int]) -> Led:
    """Return a communicator of all ranks of `world`. Each of them calls it."""
    messages = world.messages()
    inside = _join(world if lie_inside(groups, world.machines) else messages, groups)
    across = _join(world if messages is None else messages, [leaders])
    assert inside is not None
    led = Led(world, groups, leaders, inside, across)
    world.adopt(led)
    return led


def _join(world: Communicator | None, groups: Sequence[Sequence[int]]) -> Part | None:
    """Return the communicator of this rank's group; None if it is in none of them."""
    assert world is not None
    made = [world.subgroup(group) for group in groups]  # each rank calls all
    mine = next((one for one in made if one is not None), None)
    assert mine is None or isinstance(mine, SharedMemory | Network | Alone)
    return mine


class Led(RealCommunicator):
    """Collectives of all ranks of a world, in which leaders speak for their groups."""

    def __init__(
        self,
        world: RealCommunicator,
        groups: Groups,
        leaders: Sequence[int],
        inside: Part,
        across: Part | None,
    ) -> None:
        """`inside` has this rank's group; `across` has the leaders, and is None on other ranks."""
        super().__init__(world.context)
        self._world = world
        self._across = across
        self._parts = [one for one in (inside, across) if one is not None]
        self.machines, self.num_machines = world.machines, world.num_machines
        self.num_channels = world.num_channels
        self.ranks = led_ranks(groups)
        self.size = len(self.ranks)
        self.position = self.ranks.index(self.context.rank)
        self._in_world = tuple(self.ranks.index(rank) for rank in world.ranks)
        """By position in the world: the position here."""
        self._shape = led_shape(world.machines, groups, leaders)
        self._leaders = tuple(leaders)
        self._mine = next(k for k, group in enumerate(groups) if self.context.rank in group)
        """The number of this rank's group."""
        members = [self.ranks.index(rank) for rank in inside.ranks]
        leader = inside.ranks.index(leaders[self._mine])
        self._inside: InsideGroup = (
            ByMessages(inside, members, leader)
            if isinstance(inside, Network)
            else ByMemory(inside, members, leader, self.traffic)
        )
        self.name = f"{world.name}, through leaders of {len(groups)} groups"
        self._num_allocated = 0
        self.leaders_busy = self._busy = BusyTime()

    def allocate(self, num_elements: int, dtype: torch.dtype) -> Memory:
        return self._count(self._inside.comm.allocate(num_elements, dtype))

    def allocate_common(self, num_elements: int, dtype: torch.dtype) -> Memory:
        return self._count(self._inside.comm.allocate_common(num_elements, dtype))

    def _count(self, memory: Memory) -> Memory:
        """Number the memory as on all ranks: groups may have made other memory before."""
        memory.number = self._num_allocated
        self._num_allocated += 1
        return memory

    def announce(self, partials: Partials) -> None:
        pass

    def plan_reduce_scatter(self, partials: Partials) -> Prepared:
        """Prepare three stages: sums inside, the exchange of leaders, each member's strip back."""
        check_owner(partials.sums, self._inside.comm)
        spread = partials.spread.across_groups(self._shape.groups)
        cuts = group_cuts(self._shape, partials.cuts)
        bring = self._inside.plan_sums(partials, spread.nodes[self._mine])
        # Nobody else reads or writes this part of the leader's own sum until all have met again.
        out = partials.sums[0].mine[cuts[self._mine] : cuts[self._mine + 1]]
        across = self._plan_sum_across(spread, bring.sums, cuts, out, partials)
        give = self._inside.plan_strips(partials.gathered)
        volume = volume_of_partials(partials, self._shape)
        read = sent_bytes(stages("reduce_scatter", self._shape, volume), self.position, "inside")
        return self._join(bring.plan, across, give, read)

    def plan_all_gather(self, strips: Strips) -> Prepared:
        check_owner([strips.memory], self._inside.comm)
        cuts = group_cuts(self._shape, strips.cuts)
        collect = self._inside.plan_collect(strips)
        across = self._plan_gather_across(strips.memory, cuts)
        give = self._inside.plan_all(strips.memory)
        volume = volume_of_strips(strips)
        read = sent_bytes(stages("all_gather", self._shape, volume), self.position, "inside")
        return self._join(collect, across, give, read)

    def _join(
        self, bring: Prepared, across: Prepared | None, give: Prepared, read_bytes: int
    ) -> Prepared:
        """Return the three stages as one; `read_bytes` are those that peers read in memory."""
        busy = self._busy

        def run(what: str) -> None:
            bring.run(what)
            busy.begin()
            if across is not None:
                across.run(what)
            give.run(what)
            busy.end()

        sent = sum(one.num_bytes for one in (bring, across, give) if one is not None)
        return Prepared(run, sent + read_bytes)

    def plan_all_reduce(self, partials: Partials) -> Prepared:
        return plan_in_two_halves(self, partials)

    def plan_reduce(self, partials: Partials, root: int) -> Prepared:
        """Give the sum to all ranks: it comes to every leader anyway."""
        gather = self.plan_all_gather(partials.gathered)
        return join_plans(self.plan_reduce_scatter(partials), gather)

    # What leaders do.

    def _order(self, across: Part) -> list[int]:
        """Return the number of the group that each position of the leaders speaks for."""
        return [self._leaders.index(rank) for rank in across.ranks]

    def _plan_sum_across(
        self,
        spread: Spread,
        sums: Sequence[torch.Tensor],
        cuts: Sequence[int],
        out: torch.Tensor,
        partials: Partials,
    ) -> Prepared | None:
        """Prepare the sum over groups of this group's part, into `out`; None if not a leader."""
        across, scale = self._across, partials.scale
        if across is None:
            return None
        order = self._order(across)
        nodes = [spread.nodes[group] for group in order]
        ranges = [(cuts[group], cuts[group + 1]) for group in order]
        if isinstance(across, Network):
            which = about(partials.sums[0])
            return across.prepare(spread.shards, nodes, sums, ranges, out, scale, which)
        if isinstance(across, Alone):
            sources = list(zip(nodes[0], sums, strict=True))
            add_up = prepare_sum((0, spread.shards), sources, out, scale)
            return Prepared(lambda what: add_up(), 0)
        # On one machine leaders read each other's memory: copies, since these are their groups'.
        assert order == sorted(order), "groups are in the order of their leaders"
        lent = [
            across.allocate(partials.result.numel(), out.dtype) for _ in range(max(map(len, nodes)))
        ]
        whole = Partials(lent, tuple(cuts), Spread(spread.shards, tuple(nodes)), scale)
        exchange = across.plan_reduce_scatter(whole)

        def run(what: str) -> None:
            for copy, mine in zip(lent, sums, strict=False):
                copy.mine.copy_(mine)
            exchange.run(what)
            out.copy_(whole.strip(across.position))
            self.traffic.spent("copy")

        return Prepared(run, 0)

    def _plan_gather_across(self, memory: Memory, cuts: Sequence[int]) -> Prepared | None:
        """Prepare the exchange of the groups' parts of a memory; None if not a leader."""
        across, mine = self._across, self._mine
        if across is None or isinstance(across, Alone):
            return None
        pieces = [memory.mine[cuts[group] : cuts[group + 1]] for group in self._order(across)]
        others = [peer for peer in range(across.size) if peer != across.position]
        if isinstance(across, Network):
            return across.prepare_exchange(
                [(peer, pieces[across.position]) for peer in others],
                [(peer, pieces[peer]) for peer in others],
                about(memory),
            )
        whole = Strips(across.allocate(len(memory.mine), memory.mine.dtype), tuple(cuts))
        exchange = across.plan_all_gather(whole)

        def run(what: str) -> None:
            whole.mine(mine).copy_(pieces[mine])
            exchange.run(what)
            for peer in others:
                pieces[peer].copy_(whole.mine(peer))
            self.traffic.spent("copy")

        return Prepared(run, 0)

    # What the world does.

    def copy_from(self, tensor: torch.Tensor, root: int) -> int:
        return self._world.copy_from(tensor, self._world.ranks.index(self.ranks[root]))

    def exchange_blocks(self, sends: Tensors, receives: Tensors, blocks: Blocks) -> None:
        order = self._in_world
        self._world.exchange_blocks(
            [sends[at] for at in order], [receives[at] for at in order], blocks_among(blocks, order)
        )

    def meet(self, what: str) -> None:
        self._world.meet(what)

    def end_lending(self) -> None:
        for part in self._parts:
            part.end_lending()

    def window(self, num_elements: int, dtype: torch.dtype, functions: Functions) -> Window:
        raise AssertionError("calls do not go through leaders: make windows of the world's ranks")

    def subgroup(self, ranks: Sequence[int]) -> Communicator | None:
        return self._world.subgroup(ranks)

    def release(self) -> None:
        for part in self._parts:
            part.close()
