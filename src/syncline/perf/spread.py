"""How times vary: from step to step, from rank to rank, and from task to task of one kind.

All of it is computed from what `breakdown.py` found, and from the tasks of the trace. The first
step is left out, since it includes set-up.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from syncline.perf.breakdown import Breakdown, StepParts
from syncline.perf.graph import Graph, Timing, step_times_s
from syncline.perf.trace import Task

MOST_BINS = 120
"""So many groups of steps are told apart in a picture."""
_NO_WORK = ("wait", "lane")


@dataclass(frozen=True)
class Quantiles:
    """How times are spread: nine in ten are from `low_s` to `high_s`, half between quarters."""

    count: int
    low_s: float
    quarter_s: float
    median_s: float
    three_quarters_s: float
    high_s: float
    mean_s: float


@dataclass(frozen=True)
class MeanParts:
    """Some steps: their mean, its parts, and the longest of them."""

    ranks: tuple[int, int]
    """The first and the last."""
    steps: tuple[int, int]
    """The first and the last."""
    step_s: float
    longest_s: float
    parts_s: dict[str, float]


def quantiles(times_s: Sequence[float]) -> Quantiles:
    """Return how times are spread; all zero if there are none.

    >>> found = quantiles([1.0, 2.0, 3.0])
    >>> found.median_s, found.count
    (2.0, 3)
    """
    if not len(times_s):
        return Quantiles(0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    low, quarter, median, three, high = np.quantile(times_s, (0.05, 0.25, 0.5, 0.75, 0.95)).tolist()
    return Quantiles(len(times_s), low, quarter, median, three, high, float(np.mean(times_s)))


def of_steps(timing: Timing) -> Quantiles:
    """Return how the times of steps are spread, over ranks and steps."""
    return quantiles(every_step_s(timing))


def every_step_s(timing: Timing) -> list[float]:
    """Return the time of each step of each rank, from the end of the step before."""
    found: list[float] = step_times_s(timing.graph, timing.times_s[:, np.newaxis]).ravel().tolist()
    return found


def by_rank(breakdown: Breakdown) -> list[MeanParts]:
    """Return the mean step of each rank that computes."""
    found: defaultdict[int, list[StepParts]] = defaultdict(list)
    for one in breakdown.counted:
        found[one.rank].append(one)
    return [_mean(found[rank]) for rank in sorted(found)]


def by_step(breakdown: Breakdown, most: int = MOST_BINS) -> list[MeanParts]:
    """Return the mean over ranks of each step, or of groups of steps that follow one another."""
    found: defaultdict[int, list[StepParts]] = defaultdict(list)
    for one in breakdown.counted:
        found[one.step].append(one)
    steps = sorted(found)
    edges = [len(steps) * at // min(most, len(steps)) for at in range(min(most, len(steps)) + 1)]
    groups = (steps[low:high] for low, high in itertools.pairwise(edges))
    return [_mean([one for step in group for one in found[step]]) for group in groups]


def _mean(some: Sequence[StepParts]) -> MeanParts:
    parts: defaultdict[str, float] = defaultdict(float)
    for one in some:
        for name, seconds in one.parts_s.items():
            parts[name] += seconds / len(some)
    ranks, steps = [one.rank for one in some], [one.step for one in some]
    times = [one.step_s for one in some]
    return MeanParts(
        (min(ranks), max(ranks)),
        (min(steps), max(steps)),
        sum(times) / len(times),
        max(times),
        dict(parts),
    )


def of_tasks(graph: Graph) -> dict[str, Quantiles]:
    """Return what each kind of task and bucket takes of a step of a rank, without waiting.

    Names are a kind and a bucket, as "reduce 3"; without a bucket, a kind alone.
    """
    first = graph.header.first_step
    sums: defaultdict[str, defaultdict[tuple[int, int], float]] = defaultdict(
        lambda: defaultdict(float)
    )
    for task in graph.tasks:
        if task.step > first and task.kind not in ("wait", "serve"):
            sums[_name(task)][task.rank, task.step] += work_s(task)
    return {
        name: quantiles(list(found.values())) for name, found in sorted(sums.items(), key=_place)
    }


def work_s(task: Task) -> float:
    """Return how long a task worked: all its time but waiting for others."""
    if not task.parts:
        return task.end_s - task.start_s
    return sum(part.end_s - start_s for part, start_s in task.spans() if part.kind not in _NO_WORK)


def _name(task: Task) -> str:
    return task.kind if task.bucket < 0 else f"{task.kind} {task.bucket}"


def _place(item: tuple[str, object]) -> tuple[str, int]:
    kind, _, bucket = item[0].partition(" ")
    return kind, int(bucket or -1)


def gone(graph: Graph) -> dict[int, int]:
    """Return the ranks that stopped before the run ended, and the last step that each has ended.

    A step counts as ended if the rank has a later one: a rank may die in the middle of a step.
    """
    last = {rank: max(steps) for rank, steps in graph.step_ends.items() if steps}
    end = max(last.values(), default=0)
    return {rank: step for rank, step in sorted(last.items()) if step < end}


def missing(graph: Graph) -> list[int]:
    """Return the ranks of which the trace has no task."""
    seen = {task.rank for task in graph.tasks}
    return [rank for rank in _all_ranks(graph.header.machines) if rank not in seen]


def _all_ranks(machines: Iterable[Iterable[int]]) -> list[int]:
    return sorted(rank for ranks in machines for rank in ranks)
