"""One rank's part in a plan: its communicators, its shards, and the sums it takes part in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from syncline.comm.alone import Alone
from syncline.comm.base import Communicator
from syncline.comm.leaders import lead
from syncline.comm.tree import LeafPlan, Spread, plan_leaves, spread_over
from syncline.contract import Plan, Strategy, World, check_shards
from syncline.groups import Group, Leaders
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
    stands_for: int = 1
    """How many shards a term is the sum of."""

    @property
    def scale(self) -> float:
        """The factor that turns the sum into a mean."""
        return 1.0 / (self.spread.shards * self.stands_for)


class Share:
    """What one rank does in every step of a plan."""

    def __init__(self, plan: Plan, comm: Communicator) -> None:
        """Make the communicators of all groups. Every rank of the world calls it."""
        self.rank = comm.ranks[comm.position]
        self.plan = plan
        self.mine = plan.shards[self.rank]
        """The shards that this rank computes."""
        communicators = _Communicators(comm)
        self.families = [
            _part(plan, communicators.of(family.groups, family.leaders), family.stands_for)
            for family in plan.families
        ]
        """This rank's part in the sums of each family's group."""
        self.place = 0 if plan.split is None else plan.split.place_of(self.rank)
        """This rank's place in the group that has split layers."""
        self.activations = None if plan.split is None else _join(comm, plan.split.groups)
        """The ranks of that group. Nothing else is exchanged over this communicator."""
        self.step = _part(plan, communicators.of(plan.step_groups, plan.step_leaders))
        """Its part in the step group's sums: flags, statistics, losses, norms."""
        self.is_served = _is_served(plan, self.step.comm.ranks)
        """Whether a rank of the step group computes nothing and serves the others' steps."""
        self.tells = self.rank == min(self.step.comm.ranks)
        """Whether this rank gives the numbers that only one rank of the step group gives."""


def make_plan(strategy: Strategy, world: World, sizes: Sequence[Size], shards: int) -> Plan:
    """Return a strategy's plan; refuse numbers of ranks and shards that cannot work."""
    settings = strategy.settings
    settings.check(world.size)
    check_shards(shards, len(settings.workers(world.machines)))
    return strategy.plan(world, sizes, shards)


def world_of(comm: Communicator) -> World:
    """Return the facts about a world's ranks that plans are made from."""
    return World(comm.machines)


class _Communicators:
    """Makes the communicators of each partition of the world, once."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._made: dict[tuple[tuple[Group, ...], Leaders | None], Communicator] = {}

    def of(self, groups: tuple[Group, ...], leaders: Leaders | None) -> Communicator:
        """Return the communicator of this rank's group."""
        key = (groups, leaders)
        if key not in self._made:
            self._made[key] = self._make(*key)
        return self._made[key]

    def _make(self, groups: tuple[Group, ...], leaders: Leaders | None) -> Communicator:
        comm = self._comm
        if leaders is not None:
            return lead(comm, leaders.groups, leaders.ranks)
        if len(groups) == 1:
            return comm
        if all(len(group) == 1 for group in groups):
            return Alone(comm.ranks[comm.position], comm.traffic)
        return _join(comm, groups)


def _join(comm: Communicator, groups: Sequence[Group]) -> Communicator:
    """Return the communicator of this rank's group. Each rank of `comm` calls it."""
    made = [comm.subgroup(group) for group in groups]
    return next(one for one in made if one is not None)


@lru_cache(maxsize=64)  # all ranks of a virtual group call it with the same arguments
def _terms_of(plan: Plan, positions: tuple[int, ...]) -> tuple[tuple[int, ...], Spread]:
    """Return the shards that a group adds up, and how they are spread over its positions."""
    ranks = sorted(positions)
    shards = tuple(shard for rank in ranks for shard in plan.shards[rank])
    return shards, spread_over([len(plan.shards[rank]) for rank in ranks], ranks, positions)


@lru_cache(maxsize=64)  # as above
def _is_served(plan: Plan, positions: tuple[int, ...]) -> bool:
    return plan.serves(tuple(sorted(positions)))


def _part(plan: Plan, comm: Communicator, stands_for: int = 1) -> Part:
    shards, spread = _terms_of(plan, comm.ranks)
    plans = plan_leaves(spread.nodes[comm.position])[0]
    mine = plan.shards[comm.ranks[comm.position]]
    leaves = {shard: plans[shards.index(shard)] for shard in mine}
    return Part(comm, shards, spread, leaves, stands_for)
