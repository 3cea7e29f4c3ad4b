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
    direct all-to-all, where each rank cuts S into blocks: as the direct reduce-scatter
    one server for n workers, reduce and gather: 2 (alpha + n o + n S beta)
    m machines of g ranks, all-reduce:
        2 alpha_i + 2 (g-1)/g S beta_i + 2 alpha_e + 2 (m-1) o + 2 (m-1)/m S beta_e

(i: inside a machine, where there are no messages; e: across machines. The last is the usual
hierarchical all-reduce with one port per machine, except for its rounds.) These formulas assume
that links carry nothing else; `virtual/link.py` shares links among several collectives.

If ranks have a device beside their host, each rank first copies what goes to other machines to the
host, and then what came from there to the device. On a half-duplex link the bytes of both ways
count together; where rates depend on the size of messages, the time that small ones lose is added.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from syncline.comm.copies import copied_bytes
from syncline.comm.shape import GroupShape, even_shape
from syncline.comm.volume import Stage, Volume, Where, stages

if TYPE_CHECKING:
    from syncline.cluster import Link

ALGORITHMS = ("direct", "ring")


@dataclass(frozen=True)
class Phase:
    """`rounds` latencies and the handling of messages, then bytes through the busiest port.

    "inside" is between ranks of one machine, with a port for each rank; "across" is between
    machines, with one port for each machine, which its ranks share; "copy" is between a rank's
    device and its host, with nobody else on the way.
    """

    where: Where | Literal["copy"]
    rounds: int
    num_bytes: float
    """Through the busiest port, in its busier direction."""
    messages: int = 0
    """How many messages the busiest rank handles, in its busier direction."""
    both_bytes: float = 0.0
    """Through the busiest machine's port in both directions together; else as `num_bytes`."""
    message_bytes: float = 0.0
    """The largest part that one rank hands to another."""

    def bytes_on(self, link: Link) -> float:
        """Return the bytes that its busiest port carries one after the other."""
        return self.both_bytes if link.duplex == "half" else self.num_bytes

    def delay_s(self, link: Link, message_s: float = 0.0) -> float:
        """Return the time besides that of the bytes at the link's rate."""
        return (
            self.rounds * link.latency_s
            + self.messages * message_s
            + link.lost_s(self.bytes_on(link), self.message_bytes)
        )


def seconds(
    phases: Iterable[Phase],
    *,
    inside: Link,
    across: Link,
    message_s: float = 0.0,
    collective_s: float = 0.0,
    copies: Link | None = None,
) -> float:
    """Return the time of a collective's phases in turn, on links that carry nothing else.

    Phases "copy" need `copies`.

    >>> from syncline.cluster import Link
    >>> link = Link(latency_s=1e-5, rate_bytes_per_s=1e9)
    >>> phases = plan("all_reduce", 8e6, machines=4, ranks_per_machine=1, algorithm="ring")
    >>> round(seconds(phases, inside=link, across=link), 6)
    0.01206
    """
    phases = tuple(phases)
    found = collective_s if is_across(phases) else 0.0
    for phase in phases:
        link = {"inside": inside, "across": across, "copy": copies}[phase.where]
        assert link is not None, "copies need a link"
        found += phase.delay_s(link, message_s) + phase.bytes_on(link) / link.rate_bytes_per_s
    return found


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
    has_copies: bool = False,
) -> tuple[Phase, ...]:
    """Return the phases of a collective of `size_bytes` among all ranks of equal machines.

    Strips are equal, each rank has one partial sum, and an all-gather is into common memory, as for
    parameters. In an all-to-all each rank cuts `size_bytes` into one block for each rank. A barrier
    ignores `size_bytes`.
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
    if what == "all_to_all":
        volume = Volume(volume.strips, gives=(size_bytes / size,) * size, takes=(1,) * size)
    shape = even_shape(machines, ranks_per_machine)
    return phases(what, shape, volume, algorithm, has_copies=has_copies)


def phases(
    what: str,
    shape: GroupShape,
    volume: Volume,
    algorithm: str = "direct",
    *,
    has_copies: bool = False,
) -> tuple[Phase, ...]:
    """Return the phases of a collective, given the sizes of strips and partial sums.

    `algorithm` says how machines exchange; inside a machine it is always shared memory. A ring
    treats small sizes like large ones; it is used only where all ranks send and receive. With
    `has_copies` ranks copy what goes to other machines from their device, and back to it.
    """
    if algorithm not in ALGORITHMS:
        raise ValueError(f"no algorithm is called {algorithm!r}; there are {', '.join(ALGORITHMS)}")
    found: list[Phase] = []
    for one in stages(what, shape, volume, has_short_way=algorithm == "direct"):
        if algorithm == "ring" and one.where == "across" and one.whole_bytes:
            found.append(ring_half(one.whole_bytes, len(shape.leaders or shape.machines)))
        else:
            found += _phases_of(one, shape)
    return with_copies(found, copied_bytes(what, shape, volume)) if has_copies else tuple(found)


def with_copies(found: Sequence[Phase], copied: tuple[float, float]) -> tuple[Phase, ...]:
    """Return phases with copies before the first one across machines and after the last one."""
    across = [at for at, phase in enumerate(found) if phase.where == "across"]
    if not across:
        return tuple(found)
    out, back = ([copy] if copy.num_bytes else [] for copy in map(_copy, copied))
    first, end = across[0], across[-1] + 1
    return (*found[:first], *out, *found[first:end], *back, *found[end:])


def _copy(num_bytes: float) -> Phase:
    return Phase("copy", 1, num_bytes, 0, num_bytes, num_bytes)


def ring_half(size_bytes: float, size: int) -> Phase:
    """Return the phase of half a ring all-reduce: (n-1) (alpha + o) + (n-1)/n S beta.

    A half is a reduce-scatter or an all-gather. Patarasuk and Yuan, "Bandwidth Optimal All-reduce
    Algorithms for Clusters of Workstations", 2009. A ring cuts evenly, whatever the strips.
    """
    num_bytes = size_bytes * (size - 1) / size
    return Phase("across", size - 1, num_bytes, size - 1, 2 * num_bytes, size_bytes / size)


def _phases_of(one: Stage, shape: GroupShape) -> list[Phase]:
    """Return the phases of a stage: its latencies, and the bytes of its busiest port."""
    largest = _largest_message(one)
    if one.where == "inside":
        reads = _busiest_reader(one, one.groups)
        return [Phase("inside", one.rounds, reads, 0, reads, largest)]
    way, both = _busiest_machine(one, shape)
    found = [Phase("across", one.rounds, way, _most_messages(one, shape), both, largest)]
    # If machines have several ranks in a network group, messages inside a machine use its memory.
    # Likewise for leaders on one machine, and for groups that do not lie inside machines.
    is_mixed = shape.kind in ("network", "led")
    local = _local_reader(one, shape) if is_mixed else 0.0
    return [*found, Phase("inside", 0, local, 0, local, largest)] if local else found


def _largest_message(one: Stage) -> float:
    """Return the most bytes that any rank may hand to another one."""
    return max(
        max(one.gives[position] for position in group)
        * max(one.takes[position] for position in group)
        for group in one.groups
    )


def _busiest_reader(one: Stage, groups: Sequence[Sequence[int]]) -> float:
    """Return the most bytes that any rank reads from others."""
    most = 0.0
    for group in groups:
        gives = sum(one.gives[position] for position in group)
        for position in group:
            most = max(most, one.takes[position] * (gives - one.gives[position]))
    return most


def _local_reader(one: Stage, shape: GroupShape) -> float:
    """Return the most bytes that any rank gets from ranks of its own machine."""
    together = [
        [at for at in group if at in machine] for group in one.groups for machine in shape.machines
    ]
    return _busiest_reader(one, together)


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


def _busiest_machine(one: Stage, shape: GroupShape) -> tuple[float, float]:
    """Return the bytes through the busiest machine's port: its busier direction, and both."""
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
    return max(*out, *into), max(map(sum, zip(out, into, strict=True)))
