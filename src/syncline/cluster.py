"""A cluster: the few facts about hardware that a simulation needs.

All machines are equal, and all ranks. Rates are achievable ones, not nominal ones. Links have
levels: between machines, inside one, between a device and its host. A preset describes one rank on
one machine; `cluster_of` makes a cluster with a job's number of ranks.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from syncline.cluster_facts import NUMBERS, ClusterFacts, Duplex, LinkFacts, filled
from syncline.comm.shape import Machines, by_machine
from syncline.device import DEFAULT as CORE
from syncline.errors import ConfigError
from syncline.faults import Conditions, Fault, Jitter
from syncline.presets import DEFAULT
from syncline.presets import PRESETS as _FACTS

if TYPE_CHECKING:
    from syncline.config import ClusterSettings

LinkModel = Literal["exact", "fast"]
"""How messages share links: max-min fairly, or nearly so, which is faster to simulate."""


class Link(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A message of n bytes takes latency_s + n / rate_bytes_per_s if it has the link alone."""

    latency_s: float
    rate_bytes_per_s: float
    duplex: Duplex = "full"
    rates: tuple[tuple[float, float], ...] = ()
    """Rates by the bytes of a message, none above `rate_bytes_per_s`; empty if that is all's."""

    def seconds_per_byte(self, message_bytes: float) -> float:
        """Return the time of each byte of such a message, interpolated over logarithms of bytes.

        >>> link = Link(latency_s=0, rate_bytes_per_s=1.0, rates=((100, 0.25), (10000, 1.0)))
        >>> [link.seconds_per_byte(size) for size in (1, 1000, 1e6)]
        [4.0, 2.5, 1.0]
        """
        if not self.rates:
            return 1.0 / self.rate_bytes_per_s
        at = bisect.bisect_left(self.rates, (message_bytes,))
        if at in (0, len(self.rates)):
            return 1.0 / self.rates[min(at, len(self.rates) - 1)][1]
        (below, slow), (above, fast) = self.rates[at - 1 : at + 1]
        part = math.log(message_bytes / below) / math.log(above / below)
        return (1 - part) / slow + part / fast

    def lost_s(self, num_bytes: float, message_bytes: float) -> float:
        """Return how much longer bytes take in messages of this size than at the link's rate."""
        if not self.rates:
            return 0.0
        return num_bytes * (self.seconds_per_byte(message_bytes) - 1.0 / self.rate_bytes_per_s)

    def moving_s(self, num_bytes: float) -> float:
        """Return how long the bytes of one message take, besides the latency."""
        return num_bytes / self.rate_bytes_per_s + self.lost_s(num_bytes, num_bytes)


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """Equal machines with equal ranks on one network."""

    machines: int
    ranks_per_machine: int
    network: Link
    """A machine's link to the network, which all its ranks share."""
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
    """Cores of a machine, which its ranks share; None if no rank ever waits for one."""
    one_computer: bool = False
    """Whether all machines are parts of one computer, whose cores they share: the lab."""
    byte_s: float = 0.0
    """A rank's processor time for a byte that it sends to another machine or gets from there."""
    copies: Link | None = None
    """Between a rank's device and its host, where messages come from; None if they are one."""
    device: str = ""
    """What computes, if its times are known by kind of layer (`device.py`); else `flops_per_s`."""

    @property
    def ranks(self) -> int:
        return self.machines * self.ranks_per_machine

    @property
    def shares_cores(self) -> bool:
        """Whether ranks compute on cores whose number is known: not on a device of their own."""
        return self.cores is not None and self.device in ("", CORE)

    @property
    def by_machine(self) -> Machines:
        """All ranks by machine."""
        return by_machine(range(self.ranks), self.ranks_per_machine)

    def to_dict(self) -> dict[str, Any]:
        """Return the cluster as plain data, without the facts that it does not have."""
        found: dict[str, Any] = msgspec.to_builtins(self)
        usual = {"copies": None, "device": "", "one_computer": False, "byte_s": 0.0}
        return {
            key: value for key, value in found.items() if key not in usual or value != usual[key]
        }


def known_facts(facts: ClusterFacts) -> ClusterFacts:
    """Return facts together with those of their base, and of its base."""
    if facts is _FACTS[DEFAULT]:
        return facts
    return filled(facts, known_facts(_FACTS[facts.base or DEFAULT]))


def cluster_from(facts: ClusterFacts) -> Cluster:
    """Return one rank on one machine of the cluster that the facts describe."""
    facts = known_facts(facts)
    network, inside = _known_link(facts.network), _known_link(facts.inside)
    assert network is not None
    assert inside is not None
    return Cluster(
        machines=1,
        ranks_per_machine=1,
        network=network,
        inside=inside,
        copies=_known_link(facts.copies),
        cores=facts.cores,
        one_computer=facts.one_computer or False,
        device=facts.device,
        **{name: getattr(facts, name).value for name in NUMBERS},
    )


def _known_link(facts: LinkFacts) -> Link | None:
    if facts.latency_s is None or facts.rate_bytes_per_s is None:
        return None
    return Link(
        latency_s=facts.latency_s.value,
        rate_bytes_per_s=facts.rate_bytes_per_s.value,
        duplex=facts.duplex or "full",
        rates=facts.rates or (),
    )


PRESETS: dict[str, Cluster] = {name: cluster_from(facts) for name, facts in _FACTS.items()}


def cluster_of(
    settings: ClusterSettings,
    ranks: int,
    machines: int | None = None,
    facts: ClusterFacts | None = None,
) -> Cluster:
    """Build the cluster that a job describes, for this many ranks.

    `facts` win over the preset of the settings; its other settings win over both. `machines` wins
    over the settings. If neither says how many, the facts may say how many ranks a machine has;
    else each rank has its own.

    >>> from syncline.config import ClusterSettings
    >>> cluster = cluster_of(ClusterSettings(preset="10gbit"), ranks=8, machines=2)
    >>> cluster.ranks_per_machine, cluster.network.rate_bytes_per_s
    (4, 1120000000.0)
    """
    facts = known_facts(_FACTS[settings.preset] if facts is None else facts)
    base = cluster_from(facts)
    machines = settings.machines if machines is None else machines
    machines = _usual_machines(ranks, facts.ranks_per_machine) if machines is None else machines
    if machines < 1 or ranks % machines:
        fitting = [str(n) for n in range(1, ranks + 1) if ranks % n == 0]
        raise ConfigError(
            "cluster.machines",
            f"got {machines} with {ranks} rank{'s' if ranks > 1 else ''}",
            "each machine has as many ranks as any other",
            f"Use {', '.join(fitting)}.",
        )
    return Cluster(
        machines=machines,
        ranks_per_machine=ranks // machines,
        network=_link(base.network, settings.latency_s, settings.rate_bytes_per_s, settings.duplex),
        inside=_link(base.inside, settings.inside_latency_s, settings.inside_rate_bytes_per_s),
        flops_per_s=_or(settings.flops_per_s, base.flops_per_s),
        update_bytes_per_s=_or(settings.update_bytes_per_s, base.update_bytes_per_s),
        message_s=_or(settings.message_s, base.message_s),
        collective_s=_or(settings.collective_s, base.collective_s),
        cores=base.cores if settings.cores is None else settings.cores,
        one_computer=base.one_computer if settings.one_computer is None else settings.one_computer,
        byte_s=_or(settings.byte_s, base.byte_s),
        copies=_copies(base.copies, settings),
        device=settings.device or (base.device if settings.flops_per_s is None else ""),
    )


def _usual_machines(ranks: int, ranks_per_machine: int | None) -> int:
    """Return how many machines the ranks fill, if a machine has this many."""
    if ranks_per_machine is None:
        return ranks
    return -(-ranks // ranks_per_machine)


def _copies(base: Link | None, settings: ClusterSettings) -> Link | None:
    """Return the link between device and host: a rate makes one, a latency alone does not."""
    latency_s, rate = settings.copy_latency_s, settings.copy_rate_bytes_per_s
    if base is None and rate is None:
        if latency_s is not None:
            raise ConfigError(
                "cluster.copy_latency_s",
                f"got {latency_s:g} on a cluster whose ranks have no device",
                "a copy takes this and its bytes at cluster.copy_rate_bytes_per_s",
                "Write for example cluster.copy_rate_bytes_per_s = 12e9.",
            )
        return None
    return _link(base or Link(latency_s=0.0, rate_bytes_per_s=rate or 1.0), latency_s, rate)


def at_values(cluster: Cluster, values: Mapping[str, float]) -> Cluster:
    """Return the cluster with other numbers, by the keys of `cluster_facts.Range`.

    Rates by size change with the rate. Numbers of levels that the cluster lacks are left out.
    """
    changed: dict[str, Any] = {}
    for key, value in values.items():
        level, _, name = key.rpartition(".")
        if not level:
            changed[name] = value
        elif (link := changed.get(level, getattr(cluster, level))) is not None:
            changed[level] = _changed_link(link, name, value)
    return msgspec.structs.replace(cluster, **changed)


def _changed_link(link: Link, name: str, value: float) -> Link:
    if name != "rate_bytes_per_s":
        return msgspec.structs.replace(link, **{name: value})
    by = value / link.rate_bytes_per_s
    rates = tuple((size, rate * by) for size, rate in link.rates)
    return msgspec.structs.replace(link, rate_bytes_per_s=value, rates=rates)


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


def _link(
    base: Link,
    latency_s: float | None,
    rate_bytes_per_s: float | None,
    duplex: Duplex | None = None,
) -> Link:
    return Link(
        latency_s=_or(latency_s, base.latency_s),
        rate_bytes_per_s=_or(rate_bytes_per_s, base.rate_bytes_per_s),
        duplex=duplex or base.duplex,
        rates=base.rates if rate_bytes_per_s is None else (),
    )


def _or(given: float | None, otherwise: float) -> float:
    return otherwise if given is None else given
