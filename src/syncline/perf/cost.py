"""What a collective costs: phases of rounds and bytes, as pure functions.

The model is the textbook one (Thakur, Rabenseifner and Gropp, "Optimization of Collective
Communication Operations in MPICH", 2005): a message of S bytes takes alpha + S beta, with alpha a
latency and 1 / beta a rate; a port sends and receives at the same time. Sums are not charged: they
are compute. The three communicators below are ours, phase by phase as `comm/` does them.

A rank sends `size_bytes` once, as one partial sum. Nothing else is on the links: `virtual/link.py`
shares them among several collectives.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from syncline.cluster import Link

COLLECTIVES = ("all_gather", "all_reduce", "barrier", "broadcast", "reduce", "reduce_scatter")
ALGORITHMS = ("direct", "ring")

SMALL_BYTES = 1 << 16
"""Up to here everybody sends everything to everybody: one round instead of two."""

PIECE_BYTES = 1 << 20
"""A broadcast inside a machine goes through memory of this size, piece by piece."""

TOKEN_BYTES = 4
"""What is added up to find out that all have come to a barrier."""

Where = Literal["inside", "across"]


@dataclass(frozen=True)
class Phase:
    """`rounds` latencies, then `num_bytes` each way through the busiest port of that kind.

    "inside" is between ranks of one machine, with a port for each rank; "across" is between
    machines, with one port for each machine, which its ranks share.
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

    `algorithm` says how machines exchange; inside a machine it is always shared memory. The size
    of a barrier is of no account.
    """
    if what not in COLLECTIVES:
        raise ValueError(f"no collective is called {what!r}; there are {', '.join(COLLECTIVES)}")
    if algorithm not in ALGORITHMS:
        raise ValueError(f"no algorithm is called {algorithm!r}; there are {', '.join(ALGORITHMS)}")
    assert machines >= 1, machines
    assert ranks_per_machine >= 1, ranks_per_machine
    if machines == ranks_per_machine == 1:
        return ()
    if machines == 1:
        return shared_memory(what, size_bytes, ranks_per_machine)
    if ranks_per_machine == 1:
        return network(what, size_bytes, machines, algorithm)
    return hierarchical(what, size_bytes, machines, ranks_per_machine, algorithm)


def ring_half(size_bytes: float, size: int) -> Phase:
    """A reduce-scatter or an all-gather on a ring of n: (n-1) alpha + (n-1)/n S beta.

    Patarasuk and Yuan, "Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations",
    2009; two halves make 2 (n-1) alpha + 2 (n-1)/n S beta.
    """
    return Phase("across", size - 1, size_bytes * (size - 1) / size)


def direct_half(size_bytes: float, size: int) -> Phase:
    """The same bytes as on a ring, but all strips at once: alpha + (n-1)/n S beta.

    Also one rank dealing out strips, or collecting them: the busiest port is then that rank's.
    """
    return Phase("across", 1, size_bytes * (size - 1) / size)


def direct_to_all(size_bytes: float, size: int) -> Phase:
    """Everything to everybody, by one or by all: alpha + (n-1) S beta."""
    return Phase("across", 1, size_bytes * (size - 1))


def network(
    what: str, size_bytes: float, machines: int, algorithm: str = "direct"
) -> tuple[Phase, ...]:
    """Machines of one rank each (`comm/network.py`; with "ring", what others do).

    A ring has no short way for small sizes. Only halves go round it: dealing out and collecting
    are direct in any case.
    """
    half = (ring_half if algorithm == "ring" else direct_half)(size_bytes, machines)
    one_rank = direct_half(size_bytes, machines)
    is_short = size_bytes <= SMALL_BYTES and algorithm == "direct"
    match what:
        case "reduce_scatter" | "all_gather":
            return (half,)
        case "all_reduce":
            return (direct_to_all(size_bytes, machines),) if is_short else (half, half)
        case "reduce":
            return half, one_rank
        case "broadcast":
            return (direct_to_all(size_bytes, machines),) if is_short else (one_rank, half)
        case _:
            return network("all_reduce", TOKEN_BYTES, machines, algorithm)


def shared_memory(what: str, size_bytes: float, ranks: int) -> tuple[Phase, ...]:
    """One machine (`comm/shared_memory.py`): a round is a meeting, bytes are read from peers.

    Parameters are common memory, so that gathering them is a meeting and nothing more. The result
    of an all-reduce is each rank's own, and is copied.
    """
    meeting = Phase("inside", 1, 0.0)
    strips = Phase("inside", 1, size_bytes * (ranks - 1) / ranks)
    match what:
        case "reduce_scatter":
            return (strips,)
        case "all_reduce" if size_bytes <= SMALL_BYTES:
            return (Phase("inside", 1, size_bytes * (ranks - 1)),)
        case "all_reduce" | "reduce":
            return strips, strips
        case "broadcast":
            # The root writes each piece, then the others read it.
            through = Phase("inside", int(-(-size_bytes // PIECE_BYTES)), size_bytes)
            return through, through
        case _:
            return (meeting,)


def hierarchical(
    what: str, size_bytes: float, machines: int, ranks: int, algorithm: str = "direct"
) -> tuple[Phase, ...]:
    """Several machines of several ranks (`comm/hierarchical.py`): columns inside, then across.

    Each of g ranks sums a column of S/g and carries it across by itself. The machine's port sees
    all g columns, so across it is as if m machines of one rank exchanged S. A direct all-reduce is

        2 alpha_i + 2 (g-1)/g S beta_i + 2 alpha_e + 2 (m-1)/m S beta_e

    (the usual hierarchical all-reduce with one port per machine, but for its rounds). There is no
    short way for small sizes, and a reduce gives the result to all.
    """
    columns = Phase("inside", 1, size_bytes * (ranks - 1) / ranks)
    strips = network("reduce_scatter", size_bytes, machines, algorithm)
    meeting = Phase("inside", 1, 0.0)
    match what:
        case "reduce_scatter":
            return columns, *strips
        case "all_gather":
            return *strips, meeting
        case "all_reduce" | "reduce":
            return columns, *strips, *strips, columns
        case "broadcast":
            # Only the ranks that share the root's local rank cross; then each machine copies.
            return (
                *network("broadcast", size_bytes, machines, algorithm),
                *shared_memory("broadcast", size_bytes, ranks),
            )
        case _:
            tokens = network("all_reduce", ranks * TOKEN_BYTES, machines, algorithm)
            return meeting, *tokens, meeting
