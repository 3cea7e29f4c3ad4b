"""One rank's part in a plan: its communicators, its shards, and the sums it takes part in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from syncline.comm.alone import Alone
from syncline.comm.base import Communicator
from syncline.comm.tree import LeafPlan, Spread, plan_leaves, spread_over
from syncline.contract import Group, Plan, Strategy, World, check_shards
from syncline.sizes import Size


@dataclass(frozen=True)
class Part:
    """This rank's part in the sums of one group."""

    comm: Communicator
    shards: tuple[int, ...]
    """The shards whose terms are added up, in the order of the tree's leaves."""
    spread: Spread
    leaves: dict[int, LeafPlan]
    """By shard: where this rank puts its term."""

    @property
    def scale(self) -> float:
        """The factor that turns the sum into a mean."""
        return 1.0 / self.spread.shards


class Share:
    """What one rank does in every step of a plan."""

    def __init__(self, plan: Plan, comm: Communicator) -> None:
        """Make the communicators of all groups. Every rank of the world calls it."""
        self.rank = comm.ranks[comm.position]
        self.plan = plan
        self.mine = plan.shards[self.rank]
        """The shards that this rank computes."""
        communicators = _Communicators(comm)
        self.families = [_part(plan, communicators.of(family.groups)) for family in plan.families]
        """This rank's part in the sums of each family's group."""
        self.step = _part(plan, communicators.of(plan.step_groups))
        """Its part in the step group's sums: flags, statistics, losses, norms."""
        self.is_served = _is_served(plan, self.step.comm.ranks)
        """Whether a rank of the step group computes nothing and serves the others' steps."""
        self.tells = self.rank == min(self.step.comm.ranks)
        """Whether this rank gives the numbers that only one rank of the step group gives."""


def make_plan(strategy: Strategy, world: World, sizes: Sequence[Size], shards: int) -> Plan:
    """Return a strategy's plan; refuse numbers of ranks and shards that cannot work."""
    settings = strategy.settings
    settings.check(world.size)
    check_shards(shards, settings.num_workers(world.size))
    return strategy.plan(world, sizes, shards)


def world_of(comm: Communicator) -> World:
    """Return the facts about a world's ranks that plans are made from."""
    return World(comm.machines)


class _Communicators:
    """Makes the communicators of each partition of the world, once."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._made: dict[tuple[Group, ...], Communicator] = {}

    def of(self, groups: tuple[Group, ...]) -> Communicator:
        """Return the communicator of this rank's group."""
        if groups not in self._made:
            self._made[groups] = next(self._make(groups))
        return self._made[groups]

    def _make(self, groups: tuple[Group, ...]) -> Iterator[Communicator]:
        comm = self._comm
        if len(groups) == 1:
            yield comm
        elif all(len(group) == 1 for group in groups):
            yield Alone(comm.ranks[comm.position], comm.traffic)
        else:
            made = [comm.subgroup(group) for group in groups]  # a collective: each rank calls all
            yield from (one for one in made if one is not None)


@lru_cache(maxsize=64)  # all ranks of a virtual group call it with the same arguments
def _terms_of(plan: Plan, positions: tuple[int, ...]) -> tuple[tuple[int, ...], Spread]:
    """Return the shards that a group adds up, and how they are spread over its positions."""
    ranks = sorted(positions)
    shards = tuple(shard for rank in ranks for shard in plan.shards[rank])
    return shards, spread_over([len(plan.shards[rank]) for rank in ranks], ranks, positions)


@lru_cache(maxsize=64)  # as above
def _is_served(plan: Plan, positions: tuple[int, ...]) -> bool:
    return plan.serves(tuple(sorted(positions)))


def _part(plan: Plan, comm: Communicator) -> Part:
    shards, spread = _terms_of(plan, comm.ranks)
    plans = plan_leaves(spread.nodes[comm.position])[0]
    mine = plan.shards[comm.ranks[comm.position]]
    leaves = {shard: plans[shards.index(shard)] for shard in mine}
    return Part(comm, shards, spread, leaves)
