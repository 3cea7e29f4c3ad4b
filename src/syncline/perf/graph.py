"""A recorded run as a graph that can be timed again, with other costs.

`compile_trace` makes moments of a trace's tasks (`moments.py`), and ties them together by the
order of lanes (`lanes.py`) and by what ranks exchange (`exchanges.py`). Costs that are not edited
give the run's own times. What a cost was spent on, on which rank and in which step, is known, so
an edit is a factor on some costs (`what_if.py`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from syncline.errors import ConfigError
from syncline.perf.drafts import Draft
from syncline.perf.exchanges import Calls, groups_share_links, tie_collectives
from syncline.perf.lanes import Lanes
from syncline.perf.moments import NUMBER, CycleError, Floats, Ints, Moments
from syncline.perf.trace import Header, Task, Trace

COMPUTE = ("forward", "backward")
"""The classes of a rank's own arithmetic: what a slow rank is slow in."""

_MOST = 1 << 53
"""Ranks, steps and buckets are numbers from 0 that a float holds as well."""
_CHUNK_BYTES = 1 << 26
"""Samples are timed in chunks whose times take as much memory."""


@dataclass(frozen=True)
class Graph:
    """The moments of a run."""

    header: Header
    tasks: Sequence[Task]
    moments: Moments
    starts: Sequence[int]
    ends: Sequence[int]
    """By task: the moments when it begins and ends."""
    step_ends: dict[int, dict[int, int]]
    """By rank that computes, and by step: the moment when the step ends."""
    rough: str
    """Why other costs of communication are answered roughly only; empty if they are not."""

    @property
    def is_rough(self) -> bool:
        return bool(self.rough)

    @property
    def num_tasks(self) -> int:
        return len(self.tasks)

    @cached_property
    def recorded_s(self) -> Floats:
        """When each moment comes, unedited."""
        return self.moments.times_s()

    @cached_property
    def ranks(self) -> Ints:
        """By moment: the rank whose cost it is; -1 if it has none."""
        return self._of_tasks([task.rank for task in self.tasks])

    @cached_property
    def steps(self) -> Ints:
        """By moment: the step of its task; -1 if it has none."""
        return self._of_tasks([task.step for task in self.tasks])

    def _of_tasks(self, values: list[int]) -> Ints:
        return np.array([*values, -1], dtype=np.int64)[self.moments.tasks]

    def is_class(self, *names: str) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Say by moment whether its cost is of one of these classes."""
        return np.isin(self.moments.classes, [NUMBER[name] for name in names])

    @property
    def between_s(self) -> float:
        """The time of all ranks whose cause is not in the trace; it stays what it was."""
        return float(np.abs(self.moments.cost_s[1:][self.is_class("between")[1:]]).sum())

    @cached_property
    def lasts(self) -> list[int]:
        """The last moment of each compute lane; of each rank, if nothing computes."""
        places = [at for at, task in enumerate(self.tasks) if task.lane == "compute"]
        of_ranks = {self.tasks[at].rank: self.ends[at] for at in places or range(len(self.tasks))}
        return list(of_ranks.values())


@dataclass(frozen=True)
class Timing:
    """A run with other costs, or its own."""

    graph: Graph
    times_s: Floats
    """By moment."""

    @property
    def end(self) -> int:
        """The moment at which the run ends: the last of all compute lanes."""
        return max(self.graph.lasts, key=lambda one: float(self.times_s[one]))

    @property
    def run_s(self) -> float:
        """How long the run takes, from its beginning to the end of the last compute lane."""
        return float(self.times_s[self.end] - self.times_s[0])

    @property
    def step_s(self) -> float:
        """The mean time from the end of a step to the end of the next; over steps and ranks."""
        return float(np.mean(step_times_s(self.graph, self.times_s[:, np.newaxis])))

    @property
    def median_step_s(self) -> float:
        """The median time from the end of a step to the end of the next, over steps and ranks."""
        return float(np.median(step_times_s(self.graph, self.times_s[:, np.newaxis])))


def compile_trace(trace: Trace, source: str = "the trace") -> Graph:
    """Return a trace as a graph. Raise ConfigError if it is no possible run; errors name it so."""
    _check(trace, source)
    draft = Draft(trace)
    of_ranks: dict[int, list[int]] = defaultdict(list)
    for at, task in enumerate(trace.tasks):
        of_ranks[task.rank].append(at)
    lanes = [Lanes(draft, places) for places in of_ranks.values()]
    for lane in lanes:
        lane.tie()
    tie_collectives(draft)
    Calls(draft).tie()
    try:
        moments, places = draft.builder.build()
    except CycleError as error:
        raise _impossible(source, str(error)) from None
    return Graph(
        header=trace.header,
        tasks=trace.tasks,
        moments=moments,
        starts=[places[one] for one in draft.starts],
        ends=[places[one] for one in draft.ends],
        step_ends=_step_ends(trace, lanes, [places[one] for one in draft.ends]),
        rough=_why_rough(draft),
    )


def retime(graph: Graph, cost_s: Floats | None = None) -> Timing:
    """Return the run with other costs, by moment; with its own if none are given."""
    return Timing(graph, graph.recorded_s if cost_s is None else graph.moments.times_s(cost_s))


def retime_samples(graph: Graph, factors: Floats) -> Floats:
    """Return the times of steps where compute varies: shape (samples, ranks, steps - 1).

    `factors` has the shape (samples, ranks, steps): how many times as long each rank's forward and
    backward take. Ranks and steps are in order; ranks that compute nothing have no times.
    """
    size = max(1, _CHUNK_BYTES // (8 * len(graph.moments.first)))
    chunks = [factors[low : low + size] for low in range(0, len(factors), size)]
    return np.concatenate([_sampled(graph, chunk) for chunk in chunks])


def _sampled(graph: Graph, factors: Floats) -> Floats:
    """Time all samples of a chunk at once: each moment is a row."""
    moments, rows = graph.moments, _rows(graph, factors)
    times = np.empty((len(moments.first), len(factors)))
    times[0] = moments.costs[0]
    table = factors.reshape(len(factors), -1).T
    for at in range(1, len(times)):
        one, other, row = moments.first[at], moments.second[at], rows[at]
        before = times[one] if one == other else np.maximum(times[one], times[other])
        cost = moments.costs[at]
        np.add(before, cost if row < 0 else table[row] * cost, out=times[at])
    return np.moveaxis(step_times_s(graph, times), -1, 0)


def _rows(graph: Graph, factors: Floats) -> list[int]:
    """Return by moment where its factor is, in flat rows of ranks and steps; -1 for none."""
    ranks, steps = sorted({task.rank for task in graph.tasks}), factors.shape[2]
    if factors.shape[1] != len(ranks):
        raise ValueError(f"factors for {factors.shape[1]} ranks, but the trace has {len(ranks)}")
    step = graph.steps - graph.header.first_step
    is_compute = graph.is_class(*COMPUTE) & (step >= 0) & (step < steps)
    found: list[int] = np.where(
        is_compute, np.searchsorted(ranks, graph.ranks) * steps + step, -1
    ).tolist()
    return found


def step_times_s(graph: Graph, times_s: Floats) -> Floats:
    """Return the times of steps: (ranks that compute, steps - 1, samples), of (moments, samples).

    The first step begins before anything is known, unless there is no other.
    """
    ends = [list(steps.values()) for steps in graph.step_ends.values()]
    if not ends:
        return np.zeros((1, 1, times_s.shape[1]))
    num_steps = min(map(len, ends))
    if num_steps < 2:
        return np.array([times_s[one[0]] - times_s[0] for one in ends])[:, np.newaxis]
    return np.diff(np.array([times_s[one[:num_steps]] for one in ends]), axis=1)


def _why_rough(draft: Draft) -> str:
    if draft.calls or draft.has_calls_without_id:
        return "ranks call each other, and how their messages share links is not in the trace"
    if groups_share_links(draft):
        return "exchanges of several groups share links, in ways that are not in the trace"
    return ""


def _step_ends(
    trace: Trace, lanes: Sequence[Lanes], ends: Sequence[int]
) -> dict[int, dict[int, int]]:
    """Return the moment at which each step of each rank ends, that is of its compute lane.

    The wait for the last update, and what is done at the end of a run, come after the last step.
    """
    found: dict[int, dict[int, int]] = {}
    for lane in lanes:
        of_rank: dict[int, int] = {}
        for at in steps_of(trace.tasks, lane.compute):
            of_rank[trace.tasks[at].step] = ends[at]
        if of_rank:
            found[trace.tasks[lane.compute[0]].rank] = of_rank
    return found


def steps_of(tasks: Sequence[Task], compute: Sequence[int]) -> Sequence[int]:
    """Return the tasks of a compute lane up to the end of its last step; none without compute."""
    number = len(compute)
    while number and _is_after(tasks[compute[number - 1]]):
        number -= 1
    has_compute = any(tasks[at].kind in (*COMPUTE, "split") for at in compute)
    return compute[:number] if has_compute else []


def _is_after(task: Task) -> bool:
    """Say whether a task at the end of a run is no part of a step."""
    if task.kind == "wait":
        return task.bucket >= 0  # the exchange in line is part of the step
    return task.kind in ("evaluate", "checkpoint", "whole", "report")


def _check(trace: Trace, source: str) -> None:
    """Refuse what is no run: no tasks, or a lane that does two things at once."""
    if not trace.tasks:
        raise ConfigError(
            source,
            "it has no tasks",
            "a run is explained by what its ranks did",
            "Record a run of at least one step.",
        )
    error_s = trace.header.clocks.error_s + 1e-9
    last: dict[int, Task] = {}
    for task in trace.tasks:
        if not (0 <= task.rank < _MOST and 0 <= task.step < _MOST and task.bucket < _MOST):
            raise _impossible(
                source, f"task {task.number} is of rank {task.rank}, step {task.step}"
            )
        if task.lane == "compute":
            before = last.get(task.rank)
            if before is not None and task.start_s < before.end_s - error_s:
                found = f"tasks {before.number} and {task.number} of rank {task.rank} overlap"
                raise _impossible(source, found)
            last[task.rank] = task


def _impossible(source: str, found: str) -> ConfigError:
    return ConfigError(
        source,
        found,
        "a compute lane does one thing at a time, and nothing waits for what comes after it",
        "It is no trace of a run: record it once more.",
    )
