"""What a collective costs: phases of rounds and bytes, as pure functions.

The model is the textbook one (Thakur, Rabenseifner and Gropp, "Optimization of Collective
Communication Operations in MPICH", 2005): a message of S bytes takes alpha + S beta, with alpha a
latency and 1 / beta a rate; a port sends and receives at the same time. Sums are not charged: they
are compute. What is exchanged is `volume.py`'s to say; here the busiest port of each exchange is
found. With strips of S/n on n machines that is

    direct reduce-scatter or all-gather: alpha + (n-1)/n S beta
    direct all-reduce: twice that; up to SMALL_BYTES alpha + (n-1) S beta
    one server for n workers, reduce and gather: 2 (alpha + n S beta)
    m machines of g ranks, all-reduce:
        2 alpha_i + 2 (g-1)/g S beta_i + 2 alpha_e + 2 (m-1)/m S beta_e

(the last is the usual hierarchical all-reduce with one port per machine, but for its rounds).
Nothing else is on the links: `virtual/link.py` shares them among several collectives.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from syncline.comm.shape import GroupShape, even_shape
from syncline.comm.volume import Stage, Volume, Where, stages

if TYPE_CHECKING:
    from syncline.cluster import Link

ALGORITHMS = ("direct", "ring")


@dataclass(frozen=True)
class Phase:
    """`rounds` latencies, then `num_bytes` through the busiest port of that kind.

    "inside" is between ranks of one machine, with a port for each rank; "across" is between
    machines, with one port for each machine, which its ranks share, and each way by itself.
    """

    where: Where
    rounds: int
    num_bytes: float


def seconds(phases: Iterable[Phase], *, inside: Link, across: Link) -> float:
    """Add up the phases, one after the other, on links that carry nothing else.

    >>> from syncline.cluster import Link
    >>> link = Link(latency_s=1e-5, rate_bytes_per_s=1e9)
    >>> phases = plan("all_reduce", 8e6, machines=4, ranks_per_machine=1, algorithm="ring")
    >>> round(seconds(phases, inside=link, across=link), 6)
    0.01206
    """
    links = {"inside": inside, "across": across}
    return sum(
        phase.rounds * links[phase.where].latency_s
        + phase.num_bytes / links[phase.where].rate_bytes_per_s
        for phase in phases
    )


def plan(
    what: str,
    size_bytes: float,
    *,
    machines: int,
    ranks_per_machine: int,
    algorithm: str = "direct",
) -> tuple[Phase, ...]:
    """Return the phases of a collective of `size_bytes` among all ranks of equal machines.

    Strips are equal, each rank has one partial sum, and a gather is into common memory, as that of
    parameters is. The size of a barrier is of no account.
    """
    assert machines >= 1, machines
    assert ranks_per_machine >= 1, ranks_per_machine
    size = machines * ranks_per_machine
    num_strips = size
    if what == "broadcast" and ranks_per_machine > 1 < machines:
        num_strips = machines
    volume = Volume(
        (size_bytes / num_strips,) * num_strips, (1,) * size, (1,) * machines, is_common=True
    )
    if what in ("all_reduce", "reduce"):  # the result is each rank's own
        volume = Volume(volume.strips, volume.sums, volume.machine_sums)
    return phases(what, even_shape(machines, ranks_per_machine), volume, algorithm)


def phases(
    what: str, shape: GroupShape, volume: Volume, algorithm: str = "direct"
) -> tuple[Phase, ...]:
    """Return the phases of a collective, given who owns which strip and who brings how much.

    `algorithm` says how machines exchange; inside a machine it is always shared memory. A ring has
    no short way for small sizes. Only exchanges in which all send and receive go round it.
    """
    if algorithm not in ALGORITHMS:
        raise ValueError(f"no algorithm is called {algorithm!r}; there are {', '.join(ALGORITHMS)}")
    found: list[Phase] = []
    for one in stages(what, shape, volume, has_short_way=algorithm == "direct"):
        if algorithm == "ring" and one.where == "across" and one.whole_bytes:
            found.append(ring_half(one.whole_bytes, len(shape.machines)))
        else:
            found += _phases_of(one, shape)
    return tuple(found)


def ring_half(size_bytes: float, size: int) -> Phase:
    """A reduce-scatter or an all-gather on a ring of n: (n-1) alpha + (n-1)/n S beta.

    Patarasuk and Yuan, "Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations",
    2009; two halves make 2 (n-1) alpha + 2 (n-1)/n S beta. A ring cuts evenly, whatever the strips.
    """
    return Phase("across", size - 1, size_bytes * (size - 1) / size)


def _phases_of(one: Stage, shape: GroupShape) -> list[Phase]:
    """Find the busiest port of an exchange."""
    if one.where == "inside":
        return [Phase("inside", one.rounds, _busiest_reader(one, one.groups))]
    found = [Phase("across", one.rounds, _busiest_machine(one, shape))]
    # Where machines have different numbers of ranks, messages inside one go through its memory.
    local = _busiest_reader(one, shape.machines) if shape.kind == "network" else 0.0
    return [*found, Phase("inside", 0, local)] if local else found


def _busiest_reader(one: Stage, groups: Sequence[Sequence[int]]) -> float:
    """Return what the rank that reads most reads of others."""
    most = 0.0
    for group in groups:
        gives = sum(one.gives[position] for position in group)
        for position in group:
            most = max(most, one.takes[position] * (gives - one.gives[position]))
    return most


def _busiest_machine(one: Stage, shape: GroupShape) -> float:
    """Return what goes the busier way through the busiest machine's port."""
    machine_of = {at: number for number, machine in enumerate(shape.machines) for at in machine}
    out, into = [0.0] * len(shape.machines), [0.0] * len(shape.machines)
    for group in one.groups:
        gives, takes = [0.0] * len(shape.machines), [0.0] * len(shape.machines)
        for position in group:
            gives[machine_of[position]] += one.gives[position]
            takes[machine_of[position]] += one.takes[position]
        all_gives, all_takes = sum(gives), sum(takes)
        for machine in range(len(shape.machines)):
            out[machine] += gives[machine] * (all_takes - takes[machine])
            into[machine] += takes[machine] * (all_gives - gives[machine])
    return max(*out, *into)
