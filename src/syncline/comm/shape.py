"""How a group's ranks lie on machines, and what therefore carries its bytes. Pure functions.

`machines` are the ranks of a group by machine, machines in order. Real and virtual communicators
both call these functions, so a group has the same positions and the same kind of communicator in
real and in virtual time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import zip_longest
from typing import Literal

Machines = tuple[tuple[int, ...], ...]
Groups = tuple[tuple[int, ...], ...]
"""Ranks in groups, each rank once."""

Kind = Literal["alone", "shared memory", "network", "hierarchical", "led"]


def choose(machines: Machines, ranks: Collection[int]) -> Machines:
    """Return a subgroup's ranks by machine, without the machines that have none of them.

    >>> choose(((0, 1), (2, 3)), {3, 0, 1})
    ((0, 1), (3,))
    """
    chosen = (tuple(rank for rank in machine if rank in ranks) for machine in machines)
    return tuple(machine for machine in chosen if machine)


def positions_of(machines: Machines) -> tuple[int, ...]:
    """Return the ranks by position: the first of each machine, then the second of each, ...

    >>> positions_of(((0, 1), (2, 3), (4,)))
    (0, 2, 4, 1, 3)
    """
    rounds = zip_longest(*machines)
    return tuple(rank for one in rounds for rank in one if rank is not None)


@lru_cache(maxsize=64)  # all ranks of a virtual group call it with the same arguments
def places_on_machines(machines: Machines, ranks: tuple[int, ...]) -> tuple[int, ...]:
    """Return by position how many positions before it lie on the same machine.

    >>> places_on_machines(((0, 1), (2, 3)), (0, 2, 1, 3))
    (0, 0, 1, 1)
    """
    machine_of = {rank: at for at, machine in enumerate(machines) for rank in machine}
    found: Counter[int] = Counter()
    places = []
    for rank in ranks:
        places.append(found[machine_of[rank]])
        found[machine_of[rank]] += 1
    return tuple(places)


def kind_of(machines: Machines) -> Kind:
    """Say what carries the bytes of a group.

    If its machines have different numbers of its ranks, the group uses the network only: in a
    hierarchical group the k-th ranks of all machines together carry the k-th column of a bucket.

    >>> kind_of(((0, 1), (2, 3))), kind_of(((0, 1), (2,)))
    ('hierarchical', 'network')
    """
    sizes = {len(machine) for machine in machines}
    if len(machines) == 1:
        return "alone" if sizes == {1} else "shared memory"
    return "hierarchical" if len(sizes) == 1 and sizes != {1} else "network"


def by_machine(ranks: Sequence[int], ranks_per_machine: int) -> Machines:
    """Return ranks by machine where rank r is on machine r // ranks_per_machine.

    >>> by_machine([0, 2, 1, 3], 2)
    ((0, 1), (2, 3))
    """
    machines: dict[int, list[int]] = {}
    for rank in ranks:
        machines.setdefault(rank // ranks_per_machine, []).append(rank)
    return tuple(tuple(machines[machine]) for machine in sorted(machines))


@dataclass(frozen=True)
class GroupShape:
    """How the positions of a group lie on machines, and what carries its bytes."""

    kind: Kind
    machines: Machines
    """Positions by machine."""
    columns: Machines
    """`columns[k]` has the k-th position of each machine: they carry column k of a bucket."""
    groups: Groups = ()
    """Positions by group, if leaders speak for groups: the strips of a group lie side by side."""
    leaders: tuple[int, ...] = ()
    """The position of each group's leader."""

    @property
    def everybody(self) -> Machines:
        """All positions, as one group."""
        return (tuple(sorted(position for machine in self.machines for position in machine)),)


def shape_of(machines: Machines) -> GroupShape:
    """Return a group's shape from its ranks by machine."""
    at = {rank: position for position, rank in enumerate(positions_of(machines))}
    by_position = tuple(tuple(at[rank] for rank in machine) for machine in machines)
    rounds = zip_longest(*by_position)
    columns = tuple(tuple(one for one in column if one is not None) for column in rounds)
    return GroupShape(kind_of(machines), by_position, columns)


def led_ranks(groups: Groups) -> tuple[int, ...]:
    """Return the ranks by position, if leaders speak for groups: one group after the other."""
    return tuple(rank for group in groups for rank in group)


def led_shape(machines: Machines, groups: Groups, leaders: Sequence[int]) -> GroupShape:
    """Return the shape of all ranks of some machines, if leaders speak for groups.

    >>> led_shape(((0, 1), (2, 3)), ((0, 2), (1, 3)), (0, 1)).machines
    ((0, 2), (1, 3))
    """
    at = {rank: position for position, rank in enumerate(led_ranks(groups))}
    by_machine, by_group = (
        tuple(tuple(at[rank] for rank in part) for part in parts) for parts in (machines, groups)
    )
    speakers = tuple(at[leader] for leader in leaders)
    return GroupShape("led", by_machine, (), by_group, speakers)


def lie_inside(groups: Groups, machines: Machines) -> bool:
    """Say whether no group has ranks of more than one machine."""
    return all(len(choose(machines, group)) == 1 for group in groups)


def group_cuts(shape: GroupShape, cuts: Sequence[int]) -> tuple[int, ...]:
    """Return where each group's strips begin, and where the last ones end."""
    return (*(cuts[group[0]] for group in shape.groups), cuts[-1])


def even_shape(machines: int, ranks_per_machine: int) -> GroupShape:
    """Return the shape of a group with equally many ranks on every machine."""
    return shape_of(by_machine(range(machines * ranks_per_machine), ranks_per_machine))
