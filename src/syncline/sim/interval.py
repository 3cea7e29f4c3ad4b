"""How far a prediction may be off: the step is simulated again at both ends of what is known.

Each fact of the cluster that has a range, and the time of the layers, is moved to either end alone;
all else stays. The changes of the step's logarithm are put together as independent errors are, by
the root of the sum of squares, upwards and downwards apart, with what the simulator itself leaves
out. Ranges are meant to hold the truth nine times in ten, and so is the interval. Nothing is drawn
at random: the same input gives the same interval, and it is known which fact matters how much.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from syncline.cluster import Cluster, at_values
from syncline.cluster_facts import ClusterFacts, Fact, ranges
from syncline.config import ClusterSettings
from syncline.device import DEVICES
from syncline.workload import Layer, Workload

MODEL = 0.06
"""What is left out, as a part of the step: code between tasks, memory that lanes share. A judgement
of 2026-11-19, before the first run of `benchmarks.prediction`, which says how often it holds."""
CROWDED = 0.12
"""The same where ranks compute that have no core each: it also matters whose turn it is."""
NINE_IN_TEN = 1.64
"""Standard deviations of a normal distribution, both ways."""
LEAST_COMPUTE = 0.02
"""Of measured layers: a machine does not keep its speed better than that."""
UNKNOWN_COMPUTE = 0.05
"""Of layers of which no spread is known: those of imported files."""
_SETTINGS = {
    "latency_s": "network.latency_s",
    "rate_bytes_per_s": "network.rate_bytes_per_s",
    "inside_latency_s": "inside.latency_s",
    "inside_rate_bytes_per_s": "inside.rate_bytes_per_s",
    "copy_latency_s": "copies.latency_s",
    "copy_rate_bytes_per_s": "copies.rate_bytes_per_s",
}
"""Settings of a job's cluster that are other names of its facts."""
_EFFICIENCIES = {"conv": "conv_efficiency", "linear": "linear_efficiency"}
_ACROSS = ("network.", "copies.", "message_s", "collective_s", "byte_s")

StepOf = Callable[[Cluster, Workload], float]
"""Simulates; returns the seconds of a step."""


class Doubt(NamedTuple):
    """A fact that is not known exactly: its range, and the step at both ends."""

    key: str
    low: float
    high: float
    at_low_s: float
    at_high_s: float


@dataclass(frozen=True)
class Interval:
    """Where the time of a step lies, nine times in ten."""

    low_s: float
    high_s: float
    doubts: tuple[Doubt, ...]
    """The facts that widen it, the most important first."""
    model: float
    """What the simulator leaves out, as a part of the step."""
    based_on: tuple[str, ...]
    """What the numbers come from, in lines."""


class _Change(NamedTuple):
    """A fact at both ends of its range."""

    key: str
    low: float
    high: float
    at_low: tuple[Cluster, Workload]
    at_high: tuple[Cluster, Workload]


def find_interval(
    step_of: StepOf,
    cluster: Cluster,
    workload: Workload,
    facts: ClusterFacts,
    given: Collection[str] = (),
    *,
    threads: int = 1,
    middle_s: float | None = None,
    around_s: float | None = None,
) -> Interval:
    """Return where a step's time lies; `facts` are all that is known of the cluster.

    Facts whose keys are in `given` are certain: a job says them. Ranks compute on `threads` each.
    `middle_s` is the step as it is simulated, if that is known already; the interval lies around
    it, or around another step of the same run.
    """
    middle_s = step_of(cluster, workload) if middle_s is None else middle_s
    doubts = [
        Doubt(one.key, one.low, one.high, step_of(*one.at_low), step_of(*one.at_high))
        for one in _changes(cluster, workload, facts, given)
    ]
    doubts.sort(key=lambda one: -_width(one, middle_s))
    model = CROWDED if _is_crowded(cluster, threads) else MODEL
    ways = [_logs(one, middle_s) for one in doubts] + [(-math.log1p(model), math.log1p(model))]
    down, up = np.sqrt(np.square(np.array(ways)).sum(axis=0)).tolist()
    around_s = middle_s if around_s is None else around_s
    return Interval(
        around_s * math.exp(-down),
        around_s * math.exp(up),
        tuple(one for one in doubts if _width(one, middle_s) > 0),
        model,
        tuple(_based_on(workload, facts)),
    )


def given_keys(settings: ClusterSettings) -> frozenset[str]:
    """Return the facts that a job's own table says."""
    names = [name for name in settings.__struct_fields__ if getattr(settings, name) is not None]
    return frozenset(_SETTINGS.get(name, name) for name in names)


def count_simulations(
    cluster: Cluster, workload: Workload, facts: ClusterFacts, given: Collection[str] = ()
) -> int:
    """Return how many simulations an interval takes."""
    return 2 * sum(1 for _ in _changes(cluster, workload, facts, given))


def _logs(doubt: Doubt, middle_s: float) -> tuple[float, float]:
    """Return how far the step's logarithm goes down, and up."""
    if not middle_s:
        return 0.0, 0.0
    ends = [math.log(max(one, 1e-12) / middle_s) for one in (doubt.at_low_s, doubt.at_high_s)]
    return min(0.0, *ends), max(0.0, *ends)


def _width(doubt: Doubt, middle_s: float) -> float:
    down, up = _logs(doubt, middle_s)
    return up - down


def _changes(
    cluster: Cluster, workload: Workload, facts: ClusterFacts, given: Collection[str]
) -> Iterator[_Change]:
    """Yield each fact that matters on this cluster."""
    for key, fact in ranges(facts):
        if key in given or not _matters(key, cluster) or key == "flops_per_s":
            continue
        low, high = fact.bounds
        ends = [(at_values(cluster, {key: value}), workload) for value in (low, high)]
        yield _Change(key, low, high, *ends)
    off = _residual(facts, cluster)
    rates = _rates_of_links(cluster, given) if off else {}
    if rates:
        ends = [
            (at_values(cluster, {key: rate * by for key, rate in rates.items()}), workload)
            for by in (1 - off, 1 + off)
        ]
        yield _Change("links, residual of the fit", 1 - off, 1 + off, *ends)
    for key, low, high, is_one in _compute_factors(workload, facts, given):
        ends = [(cluster, workload.scaled(by, by, is_one)) for by in (low, high)]
        yield _Change(key, low, high, *ends)


def _matters(key: str, cluster: Cluster) -> bool:
    if key == "byte_s" and not cluster.shares_cores:
        return False
    if key.startswith(_ACROSS):
        return cluster.machines > 1 and (cluster.copies is not None or not key.startswith("copies"))
    return not key.startswith("inside.") or cluster.ranks_per_machine > 1


def _rates_of_links(cluster: Cluster, given: Collection[str]) -> dict[str, float]:
    """Return the rates of the links that were measured, and that this cluster uses."""
    found = {
        "network.rate_bytes_per_s": cluster.network.rate_bytes_per_s,
        "inside.rate_bytes_per_s": cluster.inside.rate_bytes_per_s,
    }
    return {k: rate for k, rate in found.items() if k not in given and _matters(k, cluster)}


def _residual(facts: ClusterFacts, cluster: Cluster) -> float:
    """Return how far nine in ten of the measured collectives are from the fit, where bytes count.

    Of those between machines, or inside one, as the cluster has it, the quarter that takes longest:
    a step's time is in the large ones.
    """
    rows = [one for one in facts.measured if (one.machines > 1) == (cluster.machines > 1)]
    rows.sort(key=lambda one: -one.median_s)
    errors = [abs(one.residual) for one in rows[: max(1, len(rows) // 4)]]
    return min(0.5, float(np.quantile(errors, 0.9))) if errors else 0.0


def _compute_factors(
    workload: Workload, facts: ClusterFacts, given: Collection[str]
) -> Iterator[tuple[str, float, float, Callable[[Layer], bool]]]:
    """Yield ranges of the layers' times, as factors, and the layers that each is of."""
    device = DEVICES.get(str(workload.machine.get("device", "")))
    if workload.made_by == "derived" and device is None:
        if facts.flops_per_s is not None and "flops_per_s" not in given:
            low, high = facts.flops_per_s.bounds
            value = facts.flops_per_s.value
            yield "flops_per_s", value / high, value / low, lambda layer: True
        return
    if device is not None and workload.made_by == "derived":
        for kind in sorted({layer.kind or "other" for layer in workload.layers}):
            name = _EFFICIENCIES.get(kind, "memory_bytes_per_s")
            fact: Fact = getattr(device, name)
            low, high = fact.bounds
            is_one = functools.partial(_is_of, kind)
            yield f"{device.name}, {name} of {kind}", fact.value / high, fact.value / low, is_one
        return
    spread = UNKNOWN_COMPUTE
    if workload.made_by == "measured":
        spread = max(LEAST_COMPUTE, NINE_IN_TEN * (workload.spread or 0.0))
    yield "forward and backward", 1 / (1 + spread), 1 + spread, lambda layer: True


def _is_of(kind: str, layer: Layer) -> bool:
    return (layer.kind or "other") == kind


def _is_crowded(cluster: Cluster, threads: int) -> bool:
    """Say whether ranks compute on fewer cores than they have threads."""
    if not cluster.shares_cores or cluster.cores is None:
        return False
    ranks = cluster.ranks if cluster.one_computer else cluster.ranks_per_machine
    return ranks * threads > cluster.cores


def _based_on(workload: Workload, facts: ClusterFacts) -> Iterator[str]:
    machine = workload.machine
    where = machine.get("processor") or machine.get("device") or ""
    at_once = machine.get("ranks")
    ranks = f", {at_once} at once" if isinstance(at_once, int) and at_once > 1 else ""
    how = workload.made_by or "a file's times"
    yield f"layers: {how}{f', {where}' if where else ''}{ranks}"
    links = facts.source or facts.name or "a preset"
    yield f"links: {links}{', measured' if facts.measured else ''}"
