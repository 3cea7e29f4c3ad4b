"""A cluster: the few facts about hardware that a simulation needs.

All machines are equal, and all ranks. Rates are achievable ones, not nominal ones. A preset
describes one rank on one machine; `cluster_of` makes a cluster with a job's number of ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

from syncline.errors import ConfigError
from syncline.faults import Conditions, Fault, Jitter

if TYPE_CHECKING:
    from syncline.config import ClusterSettings

LinkModel = Literal["exact", "fast"]
"""How messages share links: max-min fairly, or nearly so, which is faster to simulate."""


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """A message of n bytes takes latency_s + n / rate_bytes_per_s if it has the link alone."""

    latency_s: float
    rate_bytes_per_s: float


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """Equal machines with equal ranks on one network."""

    machines: int
    ranks_per_machine: int
    network: Link
    """A machine's full-duplex link to the network, which all its ranks share."""
    inside: Link
    """Between ranks of a machine; the rate is that of one rank."""
    flops_per_s: float
    """A rank's rate in convolutions and matrix products."""
    update_bytes_per_s: float
    """How many bytes of parameters a rank's optimizer updates in a second."""
    message_s: float = 0.0
    """A rank's processor time to send a message to another machine and to get one from there."""
    collective_s: float = 0.0
    """What a collective across machines costs besides its messages, latencies and bytes."""
    cores: int | None = None
    """Cores of a machine; None for as many as it has ranks."""

    @property
    def ranks(self) -> int:
        return self.machines * self.ranks_per_machine


def _of_cpus(latency_s: float, rate_bytes_per_s: float) -> Cluster:
    """Return a cluster of one rank on one core of a commodity machine.

    Measured on such a core: copies write 8 GB/s, sums 6.8 GB/s; small all-reduces over TCP streams
    take 23.4, 40.5, 58.8, 91.9 and 125.5 us of processor time on 2, 3, 4, 6 and 8 ranks, which is
    6.8 us and 17.0 us for each message (`benchmarks/messages.py`). The link does not matter for
    that. `flops_per_s` is assumed.
    """
    return Cluster(
        machines=1,
        ranks_per_machine=1,
        network=Link(latency_s=latency_s, rate_bytes_per_s=rate_bytes_per_s),
        inside=Link(latency_s=20e-6, rate_bytes_per_s=6e9),
        flops_per_s=5e10,
        update_bytes_per_s=6e9,
        message_s=17e-6,
        collective_s=7e-6,
    )


PRESETS: dict[str, Cluster] = {
    # 88 % of the nominal rate, as gloo's issue 21 reports; latency assumed: TCP takes 50 to 100 us.
    "1gbit": _of_cpus(75e-6, 0.110e9),
    # Both assumed: TCP reaches 1.10 to 1.17 of 1.25 GB/s.
    "10gbit": _of_cpus(30e-6, 1.12e9),
    # Both assumed: 93 to 97 % of 3.125 GB/s, and kernel TCP takes 15 to 30 us.
    "25gbit": _of_cpus(20e-6, 2.97e9),
    # Both assumed: 93 to 97 % of 12.5 GB/s, and RoCE takes 2 to 5 us. TCP is far slower: gloo's
    # issue 248 has 1.07 GB/s for one core on 40 Gbit/s.
    "100gbit": _of_cpus(4e-6, 11.9e9),
}


def cluster_of(settings: ClusterSettings, ranks: int, machines: int | None = None) -> Cluster:
    """Build the cluster that a job describes, for this many ranks.

    `machines` wins over the settings; if neither says how many, each rank has its own.

    >>> from syncline.config import ClusterSettings
    >>> cluster = cluster_of(ClusterSettings(preset="10gbit"), ranks=8, machines=2)
    >>> cluster.ranks_per_machine, cluster.network.rate_bytes_per_s
    (4, 1120000000.0)
    """
    machines = settings.machines if machines is None else machines
    machines = ranks if machines is None else machines
    if machines < 1 or ranks % machines:
        fitting = [str(n) for n in range(1, ranks + 1) if ranks % n == 0]
        raise ConfigError(
            "cluster.machines",
            f"got {machines} with {ranks} rank{'s' if ranks > 1 else ''}",
            "each machine has as many ranks as any other",
            f"Use {', '.join(fitting)}.",
        )
    base = PRESETS[settings.preset]
    return Cluster(
        machines=machines,
        ranks_per_machine=ranks // machines,
        network=_link(base.network, settings.latency_s, settings.rate_bytes_per_s),
        inside=_link(base.inside, settings.inside_latency_s, settings.inside_rate_bytes_per_s),
        flops_per_s=_or(settings.flops_per_s, base.flops_per_s),
        update_bytes_per_s=_or(settings.update_bytes_per_s, base.update_bytes_per_s),
        message_s=_or(settings.message_s, base.message_s),
        collective_s=_or(settings.collective_s, base.collective_s),
        cores=settings.cores,
    )


def conditions_of(
    settings: ClusterSettings, seed: int, faults: tuple[Fault, ...] = ()
) -> Conditions:
    """Return the faults, jitter and slow ranks of a run; `Conditions.check` needs its size too."""
    return Conditions(
        faults=(*settings.faults, *faults),
        jitter=Jitter(
            kind=settings.jitter, sigma=settings.jitter_sigma, shift=settings.jitter_shift
        ),
        slow_ranks={int(rank): factor for rank, factor in settings.slow_ranks.items()},
        link_changes=settings.link_changes,
        seed=seed,
    )


def _link(base: Link, latency_s: float | None, rate_bytes_per_s: float | None) -> Link:
    return Link(
        latency_s=_or(latency_s, base.latency_s),
        rate_bytes_per_s=_or(rate_bytes_per_s, base.rate_bytes_per_s),
    )


def _or(given: float | None, otherwise: float) -> float:
    return otherwise if given is None else given
