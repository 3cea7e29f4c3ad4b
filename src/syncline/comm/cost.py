"""What a collective costs: phases of rounds and bytes, as pure functions.

The model is the textbook one (Thakur, Rabenseifner and Gropp, "Optimization of Collective
Communication Operations in MPICH", 2005): a message of S bytes takes alpha + S beta, with alpha a
latency and 1 / beta a rate; a port sends and receives at the same time. Each message costs the rank
that handles it o, its processor's time (the overhead of Culler et al., "LogP", 1993), one after the
other; each collective across machines costs c once. Sums are not charged: they are compute.
`volume.py` says how many bytes are exchanged; this module finds the busiest port and the busiest
rank of each exchange.
With strips of S/n on n machines that is, besides c,

    direct reduce-scatter or all-gather: alpha + (n-1) o + (n-1)/n S beta
    ring reduce-scatter or all-gather: (n-1) (alpha + o) + (n-1)/n S beta
    direct all-reduce: twice that; up to SMALL_BYTES alpha + (n-1) o + (n-1) S beta
    one server for n workers, reduce and gather: 2 (alpha + n o + n S beta)
    m machines of g ranks, all-reduce:
        2 alpha_i + 2 (g-1)/g S beta_i + 2 alpha_e + 2 (m-1) o + 2 (m-1)/m S beta_e

(i: inside a machine, where there are no messages; e: across machines. The last is the usual
hierarchical all-reduce with one port per machine, except for its rounds.) These formulas assume
that links carry nothing else; `virtual/link.py` shares links among several collectives.
"""

from __future__ import annotations

from collections import Counter
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
    """`rounds` latencies and the handling of messages, then bytes through the busiest port.

    "inside" is between ranks of one machine, with a port for each rank; "across" is between
    machines, with one full-duplex port for each machine, which its ranks share.
    """

    where: Where
    rounds: int
    num_bytes: float
    messages: int = 0
    """How many messages the busiest rank handles, in its busier direction."""


def seconds(
    phases: Iterable[Phase],
    *,
    inside: Link,
    across: Link,
    message_s: float = 0.0,
    collective_s: float = 0.0,
) -> float:
    """Return the time of a collective's phases in turn, on links that carry nothing else.

    >>> from syncline.cluster import Link
    >>> link = Link(latency_s=1e-5, rate_bytes_per_s=1e9)
    >>> phases = plan("all_reduce", 8e6, machines=4, ranks_per_machine=1, algorithm="ring")
    >>> round(seconds(phases, inside=link, across=link), 6)
    0.01206
    """
    links, phases = {"inside": inside, "across": across}, tuple(phases)
    return (collective_s if is_across(phases) else 0.0) + sum(
        phase.rounds * links[phase.where].latency_s
        + phase.messages * message_s
        + phase.num_bytes / links[phase.where].rate_bytes_per_s
        for phase in phases
    )


def is_across(phases: Iterable[Phase]) -> bool:
    """Say whether a collective goes to other machines, so that it costs `collective_s`."""
    return any(phase.where == "across" for phase in phases)


def plan(
    what: str,
    size_bytes: float,
    *,
    machines: int,
    ranks_per_machine: int,
    algorithm: str = "direct",
) -> tuple[Phase, ...]:
    """Return the phases of a collective of `size_bytes` among all ranks of equal machines.

    Strips are equal, each rank has one partial sum, and an all-gather is into common memory, as for
    parameters. A barrier ignores `size_bytes`.
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
    """Return the phases of a collective, given the sizes of strips and partial sums.

    `algorithm` says how machines exchange; inside a machine it is always shared memory. A ring
    treats small sizes like large ones; it is used only where all ranks send and receive.
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
    """Return the phase of half a ring all-reduce: (n-1) (alpha + o) + (n-1)/n S beta.

    A half is a reduce-scatter or an all-gather. Patarasuk and Yuan, "Bandwidth Optimal All-reduce
    Algorithms for Clusters of Workstations", 2009. A ring cuts evenly, whatever the strips.
    """
    return Phase("across", size - 1, size_bytes * (size - 1) / size, size - 1)


def _phases_of(one: Stage, shape: GroupShape) -> list[Phase]:
    """Return the phases of a stage: its latencies, and the bytes of its busiest port."""
    if one.where == "inside":
        return [Phase("inside", one.rounds, _busiest_reader(one, one.groups))]
    found = [Phase("across", one.rounds, _busiest_machine(one, shape), _most_messages(one, shape))]
    # If machines have several ranks in a network group, messages inside a machine use its memory.
    local = _busiest_reader(one, shape.machines) if shape.kind == "network" else 0.0
    return [*found, Phase("inside", 0, local)] if local else found


def _busiest_reader(one: Stage, groups: Sequence[Sequence[int]]) -> float:
    """Return the most bytes that any rank reads from others."""
    most = 0.0
    for group in groups:
        gives = sum(one.gives[position] for position in group)
        for position in group:
            most = max(most, one.takes[position] * (gives - one.gives[position]))
    return most


def _most_messages(one: Stage, shape: GroupShape) -> int:
    """Return how many messages to or from other machines the busiest rank handles."""
    machine_of = {at: number for number, machine in enumerate(shape.machines) for at in machine}
    most = 0
    for group in one.groups:
        senders: Counter[int] = Counter(machine_of[at] for at in group if one.gives[at])
        takers: Counter[int] = Counter(machine_of[at] for at in group if one.takes[at])
        num_senders, num_takers = senders.total(), takers.total()
        for at in group:
            machine = machine_of[at]
            sent = num_takers - takers[machine] if one.gives[at] else 0
            received = num_senders - senders[machine] if one.takes[at] else 0
            most = max(most, sent, received)
    return most


def _busiest_machine(one: Stage, shape: GroupShape) -> float:
    """Return the bytes through the busiest machine's port, in its busier direction."""
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
