"""How many bytes each rank of a group sends in a collective, stage by stage. Pure functions.

The stages are those of the three communicators in `comm/`. Where no message is sent that could be
counted (shared memory, virtual time), `traffic.py` counts these bytes; `cost.py` charges time for
the same bytes.

In every stage position p hands `gives[p] * takes[q]` bytes to every other position q of its
group. In a reduce `gives` is a number of partial sums and `takes` the bytes of a strip. In a gather
`gives` is the bytes of a strip and `takes` is 1. In an `all_to_all` both are those of its blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

from syncline.comm.limits import SCRATCH_BYTES, SMALL_BYTES, TOKEN_BYTES
from syncline.comm.shape import GroupShape, Kind, Machines, kind_of, lie_inside

if TYPE_CHECKING:
    from syncline.comm.base import Partials, Strips
    from syncline.comm.blocks import Blocks

COLLECTIVES = (
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "reduce",
    "reduce_scatter",
)

Where = Literal["inside", "across"]


@dataclass(frozen=True)
class Stage:
    """One exchange: the ranks of each group hand bytes to each other, all at once."""

    where: Where
    """Inside machines (peers read memory) or across them (messages)."""
    groups: Machines
    """Positions that exchange with each other. A position in no group takes no part."""
    gives: Sequence[float]
    takes: Sequence[float]
    rounds: int = 1
    """How many latencies it takes: meetings inside a machine, or messages one after the other."""
    whole_bytes: float = 0.0
    """The size of the vector if all ranks send and receive, as in a ring; else 0."""
    is_payload: bool = True
    apart: Machines = ()
    """Positions that do not exchange with each other in this stage, though they are in a group."""

    def sent_by(self, position: int) -> float:
        """Return how many bytes a position hands to its peers."""
        found: float = 0
        for groups, sign in ((self.groups, 1), (self.apart, -1)) if self.is_payload else ():
            for group in groups:
                if position in group:
                    takes = sum(self.takes[peer] for peer in group) - self.takes[position]
                    found += sign * self.gives[position] * takes
        return found

    def sent(self) -> list[float]:
        """Return the bytes that each position hands to its peers, in time linear in positions."""
        found = [0.0] * len(self.gives)
        for groups, sign in ((self.groups, 1), (self.apart, -1)) if self.is_payload else ():
            for group in groups:
                takes = sum(self.takes[position] for position in group)
                for position in group:
                    others = takes - self.takes[position]
                    found[position] += sign * self.gives[position] * others
        return found


@dataclass(frozen=True)
class Volume:
    """The sizes of a collective's data, in bytes, and where the data lies."""

    strips: tuple[float, ...]
    """The size of each position's strip."""
    sums: tuple[int, ...] = ()
    """How many partial sums each position holds."""
    machine_sums: tuple[int, ...] = ()
    """How many partial sums each machine, or each group with a leader, has once its ranks have
    added up theirs."""
    root: int = 0
    is_common: bool = False
    """Whether the ranks of a machine gather into one memory."""
    gives: tuple[float, ...] = ()
    takes: tuple[float, ...] = ()
    """Of an `all_to_all`: `gives[i] * takes[j]` bytes go from position i to position j."""
    is_for_all: bool = False
    """Whether each position of an `all_to_all` sends the same bytes to all others."""

    @property
    def size_bytes(self) -> float:
        return sum(self.strips)


def stages(
    what: str, shape: GroupShape, volume: Volume, *, has_short_way: bool = True
) -> tuple[Stage, ...]:
    """Return the stages of a collective, in order.

    With `has_short_way` a small vector is sent whole to all ranks. A broadcast of a large one sends
    a strip to each position, or to each machine in a hierarchical group, and then gathers them.
    """
    if what not in COLLECTIVES:
        raise ValueError(f"no collective is called {what!r}; there are {', '.join(COLLECTIVES)}")
    if shape.kind == "alone":
        return ()
    if what == "all_to_all":
        # Leaders do not speak for groups in it: it is the world's.
        kind = kind_of(shape.machines) if shape.kind == "led" else shape.kind
        return _all_to_all(kind, shape, volume)
    is_short = has_short_way and volume.size_bytes <= SMALL_BYTES
    if shape.kind == "shared memory":
        return _shared_memory(what, shape, volume, is_short)
    if shape.kind == "network":
        return _network(what, shape.everybody, volume, is_short)
    if shape.kind == "led":
        return _led(what, shape, volume)
    return _hierarchical(what, shape, volume, is_short)


def _ones(num_positions: int, only: int | None = None) -> list[float]:
    return [1.0 if only is None or at == only else 0.0 for at in range(num_positions)]


def _meeting(shape: GroupShape) -> Stage:
    nothing = _ones(sum(map(len, shape.machines)), -1)
    return Stage("inside", shape.machines, nothing, nothing, is_payload=False)


def _network(what: str, everybody: Machines, volume: Volume, is_short: bool) -> tuple[Stage, ...]:
    """Messages from rank to rank (`network.py`): strips, or whole vectors if small."""
    size, strips, whole = len(volume.strips), volume.strips, volume.size_bytes
    ones, to_root = _ones(size), _ones(size, volume.root)
    reduce = Stage("across", everybody, volume.sums, strips, whole_bytes=whole)
    gather = Stage("across", everybody, strips, ones, whole_bytes=whole)
    match what:
        case "reduce_scatter":
            return (reduce,)
        case "all_gather":
            return (gather,)
        case "all_reduce":
            everything = [count * whole for count in volume.sums]
            short = Stage("across", everybody, everything, ones)
            return (short,) if is_short else (reduce, gather)
        case "reduce":
            return reduce, Stage("across", everybody, strips, to_root)
        case "broadcast":
            everything = [whole * one for one in to_root]
            short = Stage("across", everybody, everything, ones)
            dealt = Stage("across", everybody, to_root, strips)
            return (short,) if is_short else (dealt, gather)
        case _:
            tokens = [float(TOKEN_BYTES)] * size
            return (Stage("across", everybody, tokens, ones, is_payload=False),)


def _shared_memory(
    what: str, shape: GroupShape, volume: Volume, is_short: bool
) -> tuple[Stage, ...]:
    """One machine (`shared_memory.py`): a stage is a meeting, then ranks read peers' memory."""
    group, size, strips = shape.machines, len(volume.strips), volume.strips
    ones, to_root = _ones(size), _ones(size, volume.root)
    reduce = Stage("inside", group, volume.sums, strips)
    gather = Stage("inside", group, strips, ones)
    match what:
        case "reduce_scatter":
            return (reduce,)
        case "all_gather":
            return (_meeting(shape),) if volume.is_common else (gather,)
        case "all_reduce":
            everything = [count * volume.size_bytes for count in volume.sums]
            return (Stage("inside", group, everything, ones),) if is_short else (reduce, gather)
        case "reduce":
            return reduce, Stage("inside", group, strips, to_root)
        case "broadcast":
            return _through_scratch(group, [volume.size_bytes * one for one in to_root], ones)
        case _:
            return (_meeting(shape),)


def _through_scratch(
    groups: Machines, gives: Sequence[float], takes: Sequence[float]
) -> tuple[Stage, ...]:
    """Two stages: the root writes the pieces; the others read them, which takes as long."""
    rounds = int(-(-max(gives) // SCRATCH_BYTES))
    read = Stage("inside", groups, gives, takes, rounds)
    return replace(read, is_payload=False), read


def _hierarchical(
    what: str, shape: GroupShape, volume: Volume, is_short: bool
) -> tuple[Stage, ...]:
    """Several machines of several ranks (`hierarchical.py`): columns inside, then across.

    Small sums are not treated differently, and a reduce gives the result to all ranks.
    """
    machines, columns, strips = shape.machines, shape.columns, volume.strips
    num_machines, whole = len(machines), volume.size_bytes
    size = num_machines * len(columns)
    ones, meeting = _ones(size), _meeting(shape)
    if what == "barrier":
        tokens = [float(TOKEN_BYTES)] * size
        return meeting, Stage("across", columns, tokens, ones, is_payload=False), meeting
    if what == "broadcast":
        # The ranks of the root's column exchange; then each of them copies for its machine.
        column, first = divmod(volume.root, num_machines)
        carried = Volume(strips, root=first)
        across = [
            replace(
                one,
                groups=(columns[column],),
                gives=_spread_out(one.gives, columns[column], size),
                takes=_spread_out(one.takes, columns[column], size),
            )
            for one in _network(what, ((),), carried, is_short)
        ]
        gives = _spread_out([whole] * num_machines, columns[column], size)
        return *across, *_through_scratch(machines, gives, ones)
    cuts = [sum(strips[at] for at in column) for column in columns]
    of_column = [cuts[position // num_machines] for position in range(size)]
    gather = (
        Stage("across", columns, strips, ones, whole_bytes=whole),
        meeting if volume.is_common else Stage("inside", machines, of_column, ones),
    )
    if what == "all_gather":
        return gather
    left = [volume.machine_sums[position % num_machines] for position in range(size)]
    reduce = (
        Stage("inside", machines, volume.sums, of_column),
        Stage("across", columns, left, strips, whole_bytes=whole),
    )
    return reduce if what == "reduce_scatter" else reduce + gather


def _all_to_all(kind: Kind, shape: GroupShape, volume: Volume) -> tuple[Stage, ...]:
    """Blocks from rank to rank: through staging memory inside machines, by messages across."""
    machines, gives, takes = shape.machines, volume.gives, volume.takes
    if kind == "alone":
        return ()
    if kind == "network":
        return (Stage("across", shape.everybody, gives, takes),)
    # Staging takes as long as if peers' blocks were read the other way round. What is for all alike
    # is staged once.
    num_copies = 1 if volume.is_for_all else len(machines[0]) - 1
    staged = [take * num_copies / (len(machines[0]) - 1) for take in takes]
    inside = (
        Stage("inside", machines, staged, gives, rounds=0, is_payload=False),
        Stage("inside", machines, gives, takes),
    )
    if kind == "shared memory":
        return inside
    return *inside, Stage("across", shape.everybody, gives, takes, apart=machines)


def _led(what: str, shape: GroupShape, volume: Volume) -> tuple[Stage, ...]:
    """Leaders speak for groups (`led.py`): inside, across, inside. The sums of groups are whole.

    Small sums are not treated differently, and a reduce gives the result to all ranks.
    """
    groups, leaders, size = shape.groups, shape.leaders, len(volume.strips)
    ones, whole = _ones(size), volume.size_bytes
    on_leaders = _spread_out([1.0] * len(leaders), leaders, size)
    of_group = [sum(volume.strips[at] for at in group) for group in groups]
    group_bytes = _spread_out(of_group, leaders, size)
    wheres: tuple[Where, Where] = ("across", "across" if len(shape.machines) > 1 else "inside")
    if lie_inside(groups, shape.machines):
        wheres = ("inside", wheres[1])
    inside, across = wheres
    meeting = Stage(inside, groups, _ones(size, -1), _ones(size, -1), is_payload=False)
    if what == "reduce_scatter":
        parts = [0.0] * size
        for group in groups:
            for at in group:
                parts[at] = whole / len(group)
        sums = _spread_out(volume.machine_sums, leaders, size)
        by_memory = (Stage(inside, groups, volume.sums, parts), meeting)
        by_messages = (Stage(inside, groups, volume.sums, [whole * one for one in on_leaders]),)
        return (
            *(by_memory if inside == "inside" else by_messages),
            Stage(across, (leaders,), sums, group_bytes, whole_bytes=whole),
            Stage(inside, groups, on_leaders, volume.strips),
        )
    if what == "all_gather":
        collect = Stage(inside, groups, volume.strips, on_leaders)
        give = Stage(inside, groups, [whole * one for one in on_leaders], ones)
        is_free = volume.is_common and inside == "inside"
        return (
            meeting if is_free else collect,
            Stage(across, (leaders,), group_bytes, on_leaders, whole_bytes=whole),
            meeting if is_free else give,
        )
    assert what in ("all_reduce", "reduce"), f"a {what} does not go through leaders"
    own = replace(volume, is_common=False)
    return _led("reduce_scatter", shape, own) + _led("all_gather", shape, own)


def _spread_out(values: Sequence[float], positions: Sequence[int], size: int) -> list[float]:
    """Return a value for each position: those given for `positions`, 0 for the others."""
    found = [0.0] * size
    for position, value in zip(positions, values, strict=True):
        found[position] = value
    return found


def volume_of_partials(partials: Partials, shape: GroupShape, root: int = 0) -> Volume:
    """Return the volume of a sum."""
    spread = partials.spread
    machine_sums: tuple[int, ...] = ()
    if shape.kind in ("hierarchical", "led"):
        parts = shape.groups or shape.machines
        machine_sums = tuple(map(len, spread.across_groups(parts).nodes))
    strips = strip_bytes(partials.cuts, partials.result.itemsize)
    return Volume(strips, tuple(map(len, spread.nodes)), machine_sums, root)


def volume_of_strips(strips: Strips) -> Volume:
    """Return the volume of a gather."""
    memory = strips.memory
    return Volume(strip_bytes(strips.cuts, memory.mine.itemsize), is_common=memory.is_common)


def volume_of_blocks(blocks: Blocks, is_for_all: bool) -> Volume:
    """Return the volume of an `all_to_all`; a position's strip is what it sends to others."""
    strips = tuple(map(blocks.sent_by, range(len(blocks.gives))))
    return Volume(strips, gives=blocks.gives, takes=blocks.takes, is_for_all=is_for_all)


def strip_bytes(cuts: Sequence[int], element_bytes: int) -> tuple[int, ...]:
    return tuple((stop - start) * element_bytes for start, stop in pairwise(cuts))


def sent_bytes(found: Iterable[Stage], position: int, where: Where | None = None) -> int:
    """Return the bytes a position hands to its peers, in all stages or in those of `where`."""
    chosen = (one for one in found if where in (None, one.where))
    return int(sum(one.sent_by(position) for one in chosen))
