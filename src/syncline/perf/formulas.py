"""Closed formulas for the time of a step: what the simulator is held against, and quick estimates.

Each formula names its source. None knows of jitter, of links that are shared with others, or of
ranks that are not alike: that is what the simulator is for. Times are seconds, layers are in their
order of use. n is the number of ranks, S the bytes of a vector, alpha a link's latency, beta the
seconds that it takes for a byte, gamma the seconds to add a byte.

No torch here.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from syncline.comm.cost import ring_half

if TYPE_CHECKING:
    from syncline.cluster import Link


# S-SGD (Shi et al. 2018, arXiv 1805.03812).


@dataclass(frozen=True, kw_only=True)
class StepParts:
    """The parts of a step of one rank."""

    forward_s: float
    backward_s: float
    input_s: float = 0.0
    """Reading a batch, and copying it to the device."""
    update_s: float = 0.0
    exchange_s: float = 0.0
    """The exchange of all gradients; with overlap the part that backward does not hide."""

    @property
    def alone_s(self) -> float:
        """One rank: t_io + t_h2d + t_f + t_b + t_u."""
        return self.input_s + self.forward_s + self.backward_s + self.update_s

    @property
    def in_line_s(self) -> float:
        """Nothing overlaps (naive S-SGD): t_io + t_h2d + t_f + t_b + t_c + t_u."""
        return self.alone_s + self.exchange_s

    @property
    def input_ahead_s(self) -> float:
        """Input is loaded ahead: max(t_io + t_h2d, t_f + t_b + t_c + t_u).

        With wait-free backpropagation t_c is what is not hidden, `WaitFree.exposed_s`.

        >>> StepParts(forward_s=1.0, backward_s=2.0, input_s=4.0, exchange_s=0.5).input_ahead_s
        4.0
        """
        return max(self.input_s, self.in_line_s - self.input_s)


@dataclass(frozen=True)
class WaitFree:
    """When each layer's exchange begins and ends, counted from the beginning of backward."""

    begins_s: tuple[float, ...]
    ends_s: tuple[float, ...]
    backward_s: float

    @property
    def exposed_s(self) -> float:
        """The part of the exchange after backward: (tau_c[1] + t_c[1]) - (tau_b[1] + t_b[1])."""
        return max(0.0, self.ends_s[0] - self.backward_s)


def wait_free(backward_s: Sequence[float], exchange_s: Sequence[float]) -> WaitFree:
    """Return when exchanges happen in wait-free backpropagation.

    tau_b[L] = 0, tau_b[l] = tau_b[l + 1] + t_b[l + 1]
    tau_c[L] = t_b[L], tau_c[l] = max(tau_c[l + 1] + t_c[l + 1], tau_b[l] + t_b[l])

    (Shi et al. 2018). An exchange of 0 s is one that is not there.

    >>> found = wait_free([2.0, 2.0, 2.0], [1.0, 1.0, 4.0])
    >>> found.begins_s, found.exposed_s
    ((7.0, 6.0, 2.0), 2.0)
    """
    ready = end = 0.0
    begins, ends = [], []
    for layer_s, message_s in zip(reversed(backward_s), reversed(exchange_s), strict=True):
        ready += layer_s
        begins.append(max(end, ready))
        end = begins[-1] + message_s
        ends.append(end)
    return WaitFree(tuple(reversed(begins)), tuple(reversed(ends)), ready)


def merged_layers(
    num_bytes: Sequence[float], backward_s: Sequence[float], startup_s: float, byte_s: float
) -> list[int]:
    """Return the first layer of each message of MG-WFBP (Shi et al. 2019, arXiv 1811.11141).

    A message of S bytes takes startup_s + S * byte_s. The rule, for l from the last layer down to
    the second: let ready[l] be the end of its backward and tau[l] the beginning of its exchange,
    which takes t_c[l]. If ready[l - 1] < tau[l] + t_c[l], and either tau[l] > ready[l - 1] or
    ready[l - 1] - tau[l] < the start-up time, then l is sent together with l - 1, and tau is
    computed again.

    >>> merged_layers([0.5, 0.5, 4.0], [9.0, 0.5, 2.0], startup_s=1.0, byte_s=1.0)
    [0, 1]
    """
    count = len(num_bytes)
    sent = [float(size) for size in num_bytes]
    """Bytes sent with each layer; 0 if it is sent with the layer before it."""
    ready = list(itertools.accumulate(reversed(backward_s)))[::-1]
    free = 0.0  # when the exchanges of all later layers have ended
    for layer in range(count - 1, 0, -1):
        begin, before = max(free, ready[layer]), ready[layer - 1]
        end = begin + (startup_s + sent[layer] * byte_s if sent[layer] else 0.0)
        if before < end and (begin > before or before - begin < startup_s):
            sent[layer - 1] += sent[layer]
            sent[layer] = 0.0
        else:
            free = end
    return [layer for layer in range(count) if layer == 0 or sent[layer]]


# Collectives. `ring_half` of comm/cost.py is the ring's.


def ring_s(size_bytes: float, ranks: int, link: Link, add_s: float = 0.0) -> float:
    """Return the time of a ring all-reduce; `add_s` is gamma.

    2 (n - 1) alpha + 2 (n - 1) / n S beta + (n - 1) / n S gamma

    (Patarasuk and Yuan 2009).

    >>> from syncline.cluster import Link
    >>> round(ring_s(8e6, 4, Link(latency_s=1e-5, rate_bytes_per_s=1e9)), 6)
    0.01206
    """
    half = ring_half(size_bytes, ranks)
    moved_s = half.rounds * link.latency_s + half.num_bytes / link.rate_bytes_per_s
    return 2 * moved_s + half.num_bytes * add_s


def recursive_doubling_s(size_bytes: float, ranks: int, link: Link, add_s: float = 0.0) -> float:
    """Return the time of an all-reduce in which whole vectors are exchanged with ever new partners.

    ceil(log2 n) (alpha + S beta + S gamma)

    (Thakur, Rabenseifner and Gropp 2005).
    """
    rounds = math.ceil(math.log2(ranks))
    return rounds * (_message_s(size_bytes, link) + size_bytes * add_s)


def halving_doubling_s(size_bytes: float, ranks: int, link: Link, add_s: float = 0.0) -> float:
    """Return the time of a reduce-scatter by halving and an all-gather by doubling.

    2 log2 n alpha + 2 (n - 1) / n S beta + (n - 1) / n S gamma

    (Thakur, Rabenseifner and Gropp 2005). If n is no power of two, ranks beyond the largest one
    below n fold their vector into a partner's first and get the result at last: two messages of S,
    and one sum of S.

    >>> from syncline.cluster import Link
    >>> link = Link(latency_s=1.0, rate_bytes_per_s=1.0)
    >>> halving_doubling_s(8.0, 4, link), halving_doubling_s(8.0, 5, link)
    (16.0, 34.0)
    """
    rounds = math.floor(math.log2(ranks))
    power = 2**rounds
    part_bytes = (power - 1) / power * size_bytes
    found = 2 * rounds * link.latency_s + 2 * part_bytes / link.rate_bytes_per_s
    if power < ranks:
        found += 2 * _message_s(size_bytes, link) + size_bytes * add_s
    return found + part_bytes * add_s


def hierarchical_s(
    size_bytes: float,
    machines: int,
    per_machine: int,
    inside: Link,
    across: Link,
    algorithm: Literal["direct", "ring"] = "ring",
) -> float:
    """Return the time of an all-reduce of m machines with g ranks each and one port to the network.

    2 (g - 1) alpha_i + 2 (g - 1) / g S beta_i + 2 (m - 1) alpha_e + 2 (m - 1) / m S beta_e

    A reduce-scatter inside machines, then an all-reduce of every part across them, side by side,
    then an all-gather inside. With "direct" exchanges a level takes one latency where a ring takes
    g - 1 or m - 1.
    """
    found = 0.0
    for ranks, link in ((per_machine, inside), (machines, across)):
        rounds = ranks - 1 if algorithm == "ring" else min(1, ranks - 1)
        moved_bytes = (ranks - 1) / ranks * size_bytes
        found += 2 * (rounds * link.latency_s + moved_bytes / link.rate_bytes_per_s)
    return found


def leaders_s(
    size_bytes: float, machines: int, per_machine: int, inside: Link, across: Link
) -> float:
    """Return the time of a reduce to leaders, a ring of the leaders, and a broadcast.

    T_reduce(g, S) + T_ring(m, S) + T_broadcast(g, S), with reduce and broadcast as binomial trees
    of ceil(log2 g) messages of S.
    """
    rounds = math.ceil(math.log2(per_machine))
    return 2 * rounds * _message_s(size_bytes, inside) + ring_s(size_bytes, machines, across)


def _message_s(size_bytes: float, link: Link) -> float:
    return link.latency_s + size_bytes / link.rate_bytes_per_s


# An asynchronous server: a closed network of queues (Lazowska et al., "Quantitative System
# Performance", 1984, chapter 5).


@dataclass(frozen=True)
class Bounds:
    """What a value lies between."""

    low: float
    high: float

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high


@dataclass(frozen=True, kw_only=True)
class ServerCycle:
    """A worker's cycle: it computes, then passes stations of the server, one after the other."""

    think_s: float
    """Z: what a worker does by itself: forward, backward, latencies."""
    demands_s: tuple[float, ...]
    """The time at each station: its port in, its updates, its port out. A station serves one
    worker at a time, or shares its rate among them."""

    @property
    def alone_s(self) -> float:
        return self.think_s + sum(self.demands_s)

    @property
    def knee(self) -> float:
        """From how many workers on the busiest station limits: (Z + sum D) / max D."""
        return self.alone_s / max(self.demands_s)

    def cycles_per_s(self, workers: int) -> Bounds:
        """Return the bounds of all workers' cycles in a second.

        n / (Z + n sum D) <= X(n) <= min(n / (Z + sum D), 1 / max D)

        >>> cycle = ServerCycle(think_s=2.0, demands_s=(1.0, 0.5, 0.5))
        >>> cycle.knee, cycle.cycles_per_s(2)
        (4.0, Bounds(low=0.3333333333333333, high=0.5))
        """
        most = min(workers / self.alone_s, 1 / max(self.demands_s))
        return Bounds(workers / (self.think_s + workers * sum(self.demands_s)), most)

    def mean_cycles_per_s(self, workers: int) -> float:
        """Return all workers' cycles in a second, if compute times vary from step to step.

        For n = 1, 2, ...: R_k = D_k (1 + Q_k), X = n / (Z + sum R), Q_k = X R_k with the queues Q
        of n - 1 workers (mean value analysis, Reiser and Lavenberg 1980). It is exact where
        stations share their rate, as ports do, whatever the distributions (Baskett et al. 1975).
        Workers that never vary stay in step, and reach as little as the lower bound.

        >>> cycle = ServerCycle(think_s=2.0, demands_s=(1.0, 0.5))
        >>> round(cycle.mean_cycles_per_s(1), 3), round(cycle.mean_cycles_per_s(50), 3)
        (0.286, 1.0)
        """
        queues, rate = [0.0] * len(self.demands_s), 0.0
        for many in range(1, workers + 1):
            stays = [d * (1 + q) for d, q in zip(self.demands_s, queues, strict=True)]
            rate = many / (self.think_s + sum(stays))
            queues = [rate * stay for stay in stays]
        return rate


def mean_staleness(workers: int) -> int:
    """Return the mean staleness of updates, if workers are alike and each has one under way: n - 1.

    Between a worker's pull and its next push every other worker pushes once.
    """
    return workers - 1


def staleness_of(rate: float, all_rates: Sequence[float]) -> float:
    """Return the mean staleness of a worker's updates: the updates of others for each of its own.

    `all_rates` are the updates per second of all workers: sum / own - 1.

    >>> staleness_of(0.5, [1.0, 1.0, 0.5])
    4.0
    """
    return sum(all_rates) / rate - 1


# Layered SGD (Yu et al. 2019, arXiv 1906.05936).


@dataclass(frozen=True, kw_only=True)
class LayeredParts:
    """A step of layered SGD as published: leaders exchange while workers load the next batch."""

    step: StepParts
    """Its exchange is that of all ranks, of conventional SGD."""
    reduce_s: float
    """Inside a group, to its leader."""
    leaders_s: float
    """The exchange of the leaders."""
    broadcast_s: float
    """Inside a group, from its leader."""

    @property
    def layered_s(self) -> float:
        """t_f + t_b + t_reduce + max(t_leaders, t_io) + t_broadcast + t_u."""
        inside_s = self.reduce_s + self.broadcast_s
        rest_s = self.step.forward_s + self.step.backward_s + self.step.update_s
        return rest_s + inside_s + max(self.leaders_s, self.step.input_s)

    @property
    def gain_s(self) -> float:
        """What it saves: min(t_leaders, t_io), and what its exchanges take less than the other.

        Without input it saves only the latter.
        """
        return self.step.in_line_s - self.layered_s
