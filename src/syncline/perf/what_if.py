"""What if: how fast a recorded run would be with other costs.

An edit is a factor on the costs of some classes, or a rule for the compute of slow ranks. The
recorded graph is then timed again (`graph.py`). Where ranks meet in collectives that is right up
to messages of several exchanges that share a link; where they call each other (`Graph.is_rough`),
links are shared in ways that a trace does not have, and the answer is marked. `interpolated` is
for those: it takes a function that simulates the run anew.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from syncline.perf.graph import COMPUTE, Graph, Timing, retime
from syncline.perf.moments import NUMBER, Floats, Ints


@dataclass(frozen=True)
class Edit:
    """Other costs: `factors` by class of `moments.CLASSES`; 0.5 is half the time, 0 is free."""

    name: str
    factors: Mapping[str, float] = field(default_factory=dict)
    no_stragglers: bool = False
    """Whether each rank's compute takes what the median rank's takes, in each step."""


@dataclass(frozen=True)
class Answer:
    """What an edit would do."""

    edit: Edit
    step_s: float
    """The mean time of a step, edited."""
    gain: float
    """The share of a step's time that it saves; below 0 if steps get longer."""
    is_rough: bool
    """Whether how messages share links is not in the trace."""


def wires(rate: float) -> Edit:
    """Return the edit that lets links between machines carry `rate` times the bytes a second."""
    assert rate > 0, rate
    name = "wires twice as fast" if rate == 2 else f"wires {rate:g} times as fast"
    return Edit(name, {"wire": 1 / rate})


def latency(factor: float) -> Edit:
    """Return the edit that makes the latency between machines `factor` times as long."""
    assert factor >= 0, factor
    return Edit("no latency" if factor == 0 else f"latency x {factor:g}", {"latency": factor})


def compute(rate: float) -> Edit:
    """Return the edit that makes forward and backward `rate` times as fast, on every rank."""
    assert rate > 0, rate
    name = "compute twice as fast" if rate == 2 else f"compute {rate:g} times as fast"
    return Edit(name, dict.fromkeys(COMPUTE, 1 / rate))


NO_STRAGGLERS = Edit("no slow ranks", no_stragglers=True)
STANDARD = (
    wires(2),
    latency(0),
    Edit("no cost for messages", {"messages": 0.0}),
    Edit("free exchanges inside machines", {"inside": 0.0, "sum": 0.0, "copy": 0.0}),
    compute(2),
    NO_STRAGGLERS,
    Edit("free input", {"input": 0.0}),
    Edit("free update", {"update": 0.0}),
)
"""The edits that `rank_edits` tries."""


def edited(graph: Graph, *edits: Edit) -> Floats:
    """Return the costs of all moments after some edits, one after the other."""
    cost_s = graph.moments.cost_s.copy()
    for edit in edits:
        table = np.ones(len(NUMBER))
        for name, factor in edit.factors.items():
            table[NUMBER[name]] = factor
        cost_s[1:] *= table[graph.moments.classes[1:]]
        if edit.no_stragglers:
            cost_s[1:] *= _as_median(graph, cost_s)[1:]
    return cost_s


def what_if(graph: Graph, *edits: Edit) -> Timing:
    """Return the run with edited costs."""
    return retime(graph, edited(graph, *edits))


def answer(graph: Graph, edit: Edit) -> Answer:
    """Return what an edit would do to the time of a step."""
    before_s, after_s = retime(graph).step_s, what_if(graph, edit).step_s
    gain = 1.0 - after_s / before_s if before_s else 0.0
    return Answer(edit, after_s, gain, graph.is_rough)


def rank_edits(graph: Graph, edits: Sequence[Edit] = STANDARD) -> list[Answer]:
    """Return what each edit would do, the most helpful first."""
    return sorted((answer(graph, edit) for edit in edits), key=lambda one: -one.gain)


def compute_s(graph: Graph, cost_s: Floats) -> tuple[Floats, Ints, Ints]:
    """Return each rank's compute in each step, and by moment the row and column of its cost.

    Rows are ranks that compute, in order; columns are steps. A moment that is no compute has -1.
    """
    is_compute = graph.is_class(*COMPUTE)
    ranks = np.unique(graph.ranks[is_compute])
    steps = np.unique(graph.steps[is_compute])
    rows = np.where(is_compute, np.searchsorted(ranks, graph.ranks), -1)
    columns = np.where(is_compute, np.searchsorted(steps, graph.steps), -1)
    table = np.zeros((len(ranks), len(steps)))
    np.add.at(table, (rows[is_compute], columns[is_compute]), cost_s[is_compute])
    return table, rows, columns


def _as_median(graph: Graph, cost_s: Floats) -> Floats:
    """Return by moment the factor that gives each rank the median rank's compute, step by step."""
    table, rows, columns = compute_s(graph, cost_s)
    factors = np.ones(len(cost_s))
    if not table.size:
        return factors
    typical = typical_s(table)
    ratio = np.divide(typical, table, out=np.ones_like(table), where=table > 0)
    is_compute = rows >= 0
    factors[is_compute] = ratio[rows[is_compute], columns[is_compute]]
    return factors


def typical_s(table: Floats) -> Floats:
    """Return the median rank's compute in each step, of what `compute_s` returns."""
    return np.array([_median_of(column) for column in table.T])


def _median_of(column: Floats) -> float:
    """Return the median of the ranks that compute in a step."""
    taken = column[column > 0]
    return float(np.median(taken)) if len(taken) else 0.0


def interpolated(
    simulate: Callable[[float], float], rates: Sequence[float]
) -> Callable[[float], float]:
    """Return the step time by rate of the wires, from simulations at a few rates.

    `simulate` returns the step time in seconds with links that carry so many times the bytes a
    second. Between two rates it is interpolated in the time of a byte, 1 / rate; outside of them
    ValueError is raised.
    """
    known = sorted(rates, reverse=True)
    if not known or not 0 < known[-1] <= known[0] < math.inf:
        raise ValueError(f"rates are positive and finite, not {list(rates)}")
    byte_s = [1 / rate for rate in known]
    steps_s = [simulate(rate) for rate in known]

    def step_s(rate: float) -> float:
        if not known[-1] <= rate <= known[0]:
            raise ValueError(f"{rate:g} is not between {known[-1]:g} and {known[0]:g}")
        return float(np.interp(1 / rate, byte_s, steps_s))

    return step_s
