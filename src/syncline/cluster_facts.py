"""Facts about a cluster, each with its range and its source. Presets and cluster files hold them.

A fact that is None is not known: `cluster.py` takes it from the facts' base, a preset. No files
here (`cluster_file.py`) and no numbers (`presets.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

import msgspec

Duplex = Literal["full", "half"]
"""Whether a link carries both directions at once, each at its rate, or both together at it."""


class Fact(msgspec.Struct, frozen=True, omit_defaults=True):
    """A number, the range in which it is believed to lie, and who says so."""

    value: float
    low: float | None = None
    high: float | None = None
    source: str = ""

    @property
    def bounds(self) -> tuple[float, float]:
        """The range; a fact without one is certain."""
        low = self.value if self.low is None else self.low
        return low, self.value if self.high is None else self.high

    def at(self, part: float) -> float:
        """Return the number below which this part of the range lies; at 1/2 the value itself.

        Between the value and an end of the range the logarithm is interpolated, next to zero the
        number itself.

        >>> Fact(4.0, 1.0, 8.0).at(0.0), Fact(4.0, 1.0, 8.0).at(0.25), Fact(4.0, 1.0, 8.0).at(1.0)
        (1.0, 2.0, 8.0)
        """
        low, high = self.bounds
        start, end, way = (
            (low, self.value, 2 * part) if part < 0.5 else (self.value, high, 2 * part - 1)
        )
        if way in (0.0, 1.0) or start == end:
            return end if way == 1.0 else start
        return start * (end / start) ** way if start > 0 else start + way * (end - start)


class LinkFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A link of one level: between machines, inside one, or between a device and its host."""

    latency_s: Fact | None = None
    rate_bytes_per_s: Fact | None = None
    """What the link reaches, each way."""
    nominal_bytes_per_s: Fact | None = None
    """What its maker promises: no measured rate may be higher."""
    duplex: Duplex | None = None
    rates: tuple[tuple[float, float], ...] | None = None
    """Rates by the bytes of a message, in ascending order of bytes."""


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """One measured collective: what it was, how long it took, and how far off the fit is."""

    what: str
    size_bytes: int
    machines: int
    ranks_per_machine: int
    median_s: float
    low_s: float
    """The quartiles of its rounds."""
    high_s: float
    cpu_s: float
    """A rank's processor time for it."""
    residual: float = 0.0
    """What the simulator would charge, relative to the median, less 1."""


class ClusterFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is known of a cluster: links by level, costs on the host, rates of a rank."""

    name: str = ""
    source: str = ""
    base: str = ""
    """The preset that says what is not known here."""
    device: str = ""
    """The device that computes, by its name in `device.py`."""
    ranks_per_machine: int | None = None
    cores: int | None = None
    one_computer: bool | None = None
    """Whether its machines are parts of one computer, whose cores they share."""
    network: LinkFacts = LinkFacts()
    inside: LinkFacts = LinkFacts()
    copies: LinkFacts = LinkFacts()
    message_s: Fact | None = None
    collective_s: Fact | None = None
    byte_s: Fact | None = None
    """A rank's processor time for a byte to or from another machine."""
    flops_per_s: Fact | None = None
    update_bytes_per_s: Fact | None = None
    measured: tuple[Measured, ...] = ()


LEVELS = ("network", "inside", "copies")
NUMBERS = ("message_s", "collective_s", "byte_s", "flops_per_s", "update_bytes_per_s")


class Range(NamedTuple):
    """A number of a cluster by its key, such as network.rate_bytes_per_s, and what is known."""

    key: str
    fact: Fact


def ranges(facts: ClusterFacts) -> tuple[Range, ...]:
    """Return the facts that have a range, in a fixed order: of networks, then of ranks."""
    found = [
        *(
            Range(f"{level}.{name}", fact)
            for level in LEVELS
            for name, fact in _links(facts, level)
        ),
        *(Range(name, fact) for name in NUMBERS if (fact := getattr(facts, name)) is not None),
    ]
    return tuple(one for one in found if one.fact.bounds[0] < one.fact.bounds[1])


def draw(known: tuple[Range, ...], uniform: Callable[[], float]) -> dict[str, float]:
    """Draw each number from its range, half of the draws below its value.

    `uniform` returns numbers from 0 to 1, as `random.Random(seed).random` does.
    """
    return {one.key: one.fact.at(uniform()) for one in known}


def _links(facts: ClusterFacts, level: str) -> Iterator[tuple[str, Fact]]:
    link = getattr(facts, level)
    for name in ("latency_s", "rate_bytes_per_s"):
        if (fact := getattr(link, name)) is not None:
            yield name, fact


def filled(facts: ClusterFacts, base: ClusterFacts) -> ClusterFacts:
    """Return the facts, with those of `base` in the place of what is not known.

    A rate of one's own makes the base's rates by size void, and operations a second of one's own
    the base's device.
    """
    links = {level: _filled_link(getattr(facts, level), getattr(base, level)) for level in LEVELS}
    names = (*NUMBERS, "cores", "one_computer", "ranks_per_machine", "device")
    others = {name: _first(getattr(facts, name), getattr(base, name)) for name in names}
    if facts.flops_per_s is not None:
        others["device"] = facts.device
    return msgspec.structs.replace(facts, **links, **others)


def _filled_link(own: LinkFacts, base: LinkFacts) -> LinkFacts:
    if own.rate_bytes_per_s is not None:
        base = msgspec.structs.replace(base, rates=None, nominal_bytes_per_s=None)
    names = own.__struct_fields__
    known = {name: _first(getattr(own, name), getattr(base, name)) for name in names}
    return msgspec.structs.replace(own, **known)


def _first(own: object, base: object) -> object:
    return base if own in (None, "") else own
