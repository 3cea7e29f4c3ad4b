"""Fits a cluster's links to measured collectives, with the simulator's own cost function.

`cost.py` is linear in what is unknown: for each level a latency and, by the size of messages, the
seconds of a byte; a cost of each message and of each collective. So the fit is a small problem of
least squares in numbers that are not negative, of relative errors: a microsecond in ten counts as
much as a millisecond in ten, half of a time as much as twice of it (|log|). Large errors do not
count by their square, so that rows which another program disturbed do not decide.
Processor times of small collectives tell the cost of messages from the latency.

What is fitted faster than the hardware is refused: it would be an error of the measurement.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from syncline.cluster import Cluster, cluster_from
from syncline.cluster_facts import ClusterFacts, Fact, LinkFacts, Measured
from syncline.comm.cost import Phase, is_across, plan, seconds
from syncline.errors import MeasureError
from syncline.measure.least_squares import Floats, robust
from syncline.measure.sweep import SMALL

KNOTS = tuple(1 << power for power in range(14, 25, 2))
"""Bytes of messages, 16 KB to 16 MB, at which the seconds of a byte are fitted."""

_LEVELS = ("inside", "across")
_PRIOR = 0.05
"""The weight of the one rate that fits all sizes, for sizes that times hardly depend on."""
_SEED = 1
_LARGE = 1 << 18
"""Collectives of so many bytes tell what a byte costs the processor."""
_SOURCE = "syncline measure links"


class Limit(NamedTuple):
    """The highest rate that a link can have, and why."""

    rate_bytes_per_s: float
    why: str


_ENDLESS = Limit(1e15, "no link reaches")


def fitted(
    rows: Sequence[Measured],
    limits: Mapping[str, Limit],
    most_ranks: int | None = None,
    *,
    draws: int = 40,
) -> ClusterFacts:
    """Return the facts that fit the measured rows, with their ranges and the rows' residuals.

    `limits` are by level, "inside" or "across". Of groups of more than `most_ranks` ranks, which
    have no core for each rank, only processor times are used. A range holds 90 % of what fits
    `draws` tables whose rows are drawn from these, with repetitions.
    """
    used = [one for one in rows if most_ranks is None or _ranks(one) <= most_ranks]
    model, best = _within(used, rows, limits)
    facts = _facts(model, best, model.draws(draws), limits)
    facts = msgspec.structs.replace(facts, byte_s=_byte_cost(used, facts))
    cluster = cluster_from(facts)
    measured = tuple(
        msgspec.structs.replace(one, residual=predicted_s(cluster, one) / one.median_s - 1)
        for one in used
    )
    return msgspec.structs.replace(facts, measured=measured)


def predicted_s(cluster: Cluster, one: Measured) -> float:
    """Return what the simulator charges for a measured collective."""
    return seconds(
        phases_of(one),
        inside=cluster.inside,
        across=cluster.network,
        message_s=cluster.message_s,
        collective_s=cluster.collective_s,
    )


def phases_of(one: Measured) -> tuple[Phase, ...]:
    """Return the phases of a measured collective, as the simulator has them."""
    return plan(
        one.what, one.size_bytes, machines=one.machines, ranks_per_machine=one.ranks_per_machine
    )


def _byte_cost(rows: Sequence[Measured], facts: ClusterFacts) -> Fact | None:
    """Return a rank's processor time for a byte to or from another machine, from large collectives.

    What is left of their processor time when messages and the collective are taken off: copies to
    and from the network's streams, and sums.
    """
    if facts.message_s is None or facts.collective_s is None:
        return None
    found = []
    for one in rows:
        phases = [phase for phase in phases_of(one) if phase.where == "across"]
        both = 2 * sum(phase.num_bytes for phase in phases) / one.ranks_per_machine
        if phases and one.size_bytes >= _LARGE and one.cpu_s > 0:
            messages_s = sum(phase.messages for phase in phases) * facts.message_s.value
            found.append(max(0.0, one.cpu_s - facts.collective_s.value - messages_s) / both)
    if not found:
        return None
    low, middle, high = np.quantile(found, (0.05, 0.5, 0.95)).tolist()
    return _rounded(Fact(middle, low, high, _SOURCE))


def _ranks(one: Measured) -> int:
    return one.machines * one.ranks_per_machine


class _Model:
    """The rows as a matrix: what each unknown costs in each row, divided by what was measured."""

    def __init__(
        self,
        used: Sequence[Measured],
        all_rows: Sequence[Measured],
        knots: Mapping[str, Sequence[int]],
    ) -> None:
        found = [phases_of(one) for one in used]
        self.knots = dict(knots)
        self.names = [
            *((level, knot) for level in _LEVELS for knot in (0, *self.knots[level])),
            *(("message", 0), ("collective", 0)),
        ]
        """Knot 0 is a level's latency."""
        rows = [self._row(phases) / one.median_s for phases, one in zip(found, used, strict=True)]
        for one in all_rows:
            phases = phases_of(one)
            if one.size_bytes <= SMALL and one.cpu_s > 0 and is_across(phases):
                rows.append(self._of_processor(phases) / one.cpu_s)
        self.targets = np.ones(len(rows))
        self.matrix: Floats = np.array(rows).reshape(len(rows), len(self.names))

    def _row(self, phases: Sequence[Phase]) -> Floats:
        found = self._of_processor(phases)
        for phase in phases:
            found[self.names.index((phase.where, 0))] += phase.rounds
            for knot, part in _parts(self.knots[phase.where], phase.message_bytes):
                found[self.names.index((phase.where, knot))] += part * phase.num_bytes
        return found

    def _of_processor(self, phases: Sequence[Phase]) -> Floats:
        found = np.zeros(len(self.names))
        found[-2] = sum(phase.messages for phase in phases)
        found[-1] = float(is_across(phases))
        return found

    def solve(self, counts: Floats) -> Floats:
        """Return the unknowns, with each row counted so often."""
        flat = self._flattened(counts)
        with_prior = np.vstack([self.matrix, *self._prior(flat)])
        weights = np.concatenate([counts, np.full(len(with_prior) - len(counts), _PRIOR)])
        return robust(with_prior, weights, len(counts))

    def _flattened(self, counts: Floats) -> Floats:
        """Return the unknowns if each level has one rate for all sizes."""
        columns, at = [], []
        for level, knot in self.names:
            key = (level, min(knot, 1))
            if key not in columns:
                columns.append(key)
            at.append(columns.index(key))
        merged = np.zeros((len(self.matrix), len(columns)))
        for column, to in enumerate(at):
            merged[:, to] += self.matrix[:, column]
        return robust(merged, counts, len(counts))[at]

    def _prior(self, flat: Floats) -> list[Floats]:
        """Return a row for each rate, which says that it is the one that fits all sizes."""
        rows = []
        for column, (_, knot) in enumerate(self.names):
            if knot and flat[column] > 0:
                row = np.zeros(len(self.names))
                row[column] = 1 / flat[column]
                rows.append(row)
        return rows

    def draws(self, number: int) -> Floats:
        """Return what fits rows that are drawn from these at random, with repetitions."""
        random = np.random.default_rng(_SEED)
        num = len(self.targets)
        counts = (np.bincount(random.integers(0, num, num), minlength=num) for _ in range(number))
        return np.array([self.solve(one.astype(float)) for one in counts])


def _knots(found: Sequence[Sequence[Phase]], level: str) -> tuple[int, ...]:
    """Return the sizes of messages at which a level's rate is fitted, those that were measured."""
    sizes = [
        one.message_bytes
        for phases in found
        for one in phases
        if one.where == level and one.num_bytes
    ]
    if not sizes:
        return ()
    inside = tuple(knot for knot in KNOTS if knot <= max(sizes))
    return inside or KNOTS[:1]


def _parts(knots: Sequence[int], size: float) -> list[tuple[int, float]]:
    """Return how much each knot counts for messages of a size, as `Link.seconds_per_byte`."""
    if not knots or size <= knots[0]:
        return [(knots[0], 1.0)] if knots else []
    for below, above in itertools.pairwise(knots):
        if size <= above:
            part = math.log(size / below) / math.log(above / below)
            return [(below, 1 - part), (above, part)]
    return [(knots[-1], 1.0)]


def _within(
    used: Sequence[Measured], rows: Sequence[Measured], limits: Mapping[str, Limit]
) -> tuple[_Model, Floats]:
    """Fit rates for as many sizes of messages as the times tell apart.

    With fewer sizes a rate is that of more times. One rate of all sizes that the hardware cannot
    have is refused.
    """
    found = [phases_of(one) for one in used]
    knots = {level: _knots(found, level) for level in _LEVELS}
    while True:
        model = _Model(used, rows, knots)
        best = model.solve(np.ones(len(model.targets)))
        too_fast = [
            level
            for (level, knot), value in zip(model.names, best, strict=True)
            if knot and value * limits.get(level, _ENDLESS).rate_bytes_per_s < 1
        ]
        if not too_fast:
            return model, best
        level = too_fast[0]
        if len(knots[level]) == 1:
            raise _refusal(level, best[model.names.index((level, knots[level][0]))], limits)
        knots[level] = knots[level][-1::-2][::-1]


def _refusal(level: str, value: float, limits: Mapping[str, Limit]) -> MeasureError:
    limit = limits.get(level, _ENDLESS)
    where = "between machines" if level == "across" else "inside a machine"
    rate = "an endless rate" if value == 0 else f"{1 / value / 1e9:.3g} GB/s"
    return MeasureError(
        f"measure links: {rate} was fitted {where}, but {limit.why} "
        f"{limit.rate_bytes_per_s / 1e9:.3g} GB/s. Measure again on a quiet machine, with more "
        "--rounds or larger --sizes."
    )


def _facts(model: _Model, best: Floats, draws: Floats, limits: Mapping[str, Limit]) -> ClusterFacts:
    facts = {name: _fact(float(best[at]), draws[:, at]) for at, name in enumerate(model.names)}
    links = {}
    for level in _LEVELS:
        if model.knots[level]:
            links[level] = _link(facts, level, model.knots[level], limits.get(level))
    has_messages = bool(model.knots["across"])
    return ClusterFacts(
        network=links.get("across", LinkFacts()),
        inside=links.get("inside", LinkFacts()),
        message_s=_rounded(facts["message", 0]) if has_messages else None,
        collective_s=_rounded(facts["collective", 0]) if has_messages else None,
    )


def _fact(value: float, draws: Floats) -> Fact:
    low, high = np.quantile(draws, (0.05, 0.95)).tolist()
    return Fact(value, min(low, value), max(high, value), _SOURCE)


def _rounded(fact: Fact) -> Fact:
    """Return a fact with numbers of four digits: more are not known."""
    low, high = fact.bounds
    return Fact(_four_digits(fact.value), _four_digits(low), _four_digits(high), fact.source)


def _four_digits(value: float) -> float:
    return float(f"{value:.4g}")


def _link(
    facts: Mapping[tuple[str, int], Fact], level: str, knots: Sequence[int], limit: Limit | None
) -> LinkFacts:
    """Return a level: its highest rate, and the rates by size that were fitted."""
    rates = tuple((float(knot), _four_digits(1 / facts[level, knot].value)) for knot in knots)
    fastest = min((facts[level, knot] for knot in knots), key=lambda one: one.value)
    low, high = fastest.bounds
    most = 1 / fastest.value if limit is None else limit.rate_bytes_per_s
    reached = Fact(1 / fastest.value, 1 / high, min(1 / low, most) if low else most, _SOURCE)
    nominal = None
    if limit is not None:
        nominal = Fact(_four_digits(limit.rate_bytes_per_s), source=limit.why)
    return LinkFacts(
        latency_s=_rounded(facts[level, 0]),
        rate_bytes_per_s=_rounded(reached),
        nominal_bytes_per_s=nominal,
        rates=rates if len(rates) > 1 else None,
    )
