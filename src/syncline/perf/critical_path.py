"""The critical path of a run: what each moment had waited for last, from the end to the beginning.

The path goes from rank to rank, where one waited for another. Its pieces together are as long as
the run. A task's slack is how much later it may end without the run ending later.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from syncline.perf.graph import COMPUTE, Graph, Timing
from syncline.perf.moments import CLASSES, Floats
from syncline.perf.what_if import compute_s, typical_s

K = TypeVar("K", int, str)


@dataclass(frozen=True)
class Piece:
    """A stretch of the path on which the same is done, by one rank."""

    kind: str
    """A class of `moments.CLASSES`."""
    rank: int
    """-1 before anything has begun."""
    task: str
    """The kind of the task."""
    bucket: int
    step: int
    start_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True)
class CriticalPath:
    """The path, from the beginning to the end of the run."""

    pieces: tuple[Piece, ...]
    shares: dict[str, float]
    """Of the path's length, by resource, the greatest first: "compute", "stragglers" (compute
    beyond that of the median rank in the step), and the other classes."""
    compute_ranks: dict[int, float]
    """The ranks whose compute is on the path, and their share of it; the greatest first."""
    slack_s: Floats
    """By task."""

    @property
    def length_s(self) -> float:
        return sum(piece.seconds for piece in self.pieces)

    @property
    def binding(self) -> str:
        """The resource with the greatest share."""
        return next(iter(self.shares), "nothing")

    @property
    def last_step(self) -> int:
        return max((piece.step for piece in self.pieces), default=0)


def critical_path(timing: Timing) -> CriticalPath:
    """Return the path to the end of the run, and each task's slack."""
    graph, times_s = timing.graph, timing.times_s
    moments = _walk(graph, times_s, timing.end)
    pieces = _grouped(graph, times_s, moments)
    latest = graph.moments.latest_s(times_s, float(times_s[timing.end]), _costs(graph, times_s))
    slack = (latest - times_s)[graph.ends]
    return CriticalPath(tuple(pieces), _shares(timing, moments), _compute_ranks(pieces), slack)


def _costs(graph: Graph, times_s: Floats) -> Floats:
    """Return the costs that these times have: what is left after the later of the two before."""
    moments = graph.moments
    cost_s: Floats = times_s - times_s[moments.first].clip(min=times_s[moments.second])
    return cost_s


def _walk(graph: Graph, times_s: Floats, end: int) -> list[int]:
    """Return the moments on the path, in order; each comes after the one before it."""
    first, second = graph.moments.first, graph.moments.second
    path = [end]
    while path[-1]:
        one, other = first[path[-1]], second[path[-1]]
        path.append(one if times_s[one] >= times_s[other] else other)
    return path[::-1]


def _grouped(graph: Graph, times_s: Floats, moments: list[int]) -> list[Piece]:
    """Return the path's pieces, moments of one task and class as one."""
    found: list[Piece] = []
    for before, here in itertools.pairwise(moments):
        start_s, end_s = float(times_s[before]), float(times_s[here])
        if start_s == end_s:
            continue
        piece = _piece(graph, here, start_s, end_s)
        if found and _key(found[-1]) == _key(piece):
            piece = _piece(graph, here, found.pop().start_s, end_s)
        found.append(piece)
    return found


def _key(piece: Piece) -> tuple[str, int, str, int, int]:
    return piece.kind, piece.rank, piece.task, piece.bucket, piece.step


def _piece(graph: Graph, here: int, start_s: float, end_s: float) -> Piece:
    kind, at = CLASSES[graph.moments.classes[here]], int(graph.moments.tasks[here])
    if at < 0:
        return Piece(kind, -1, "", -1, graph.header.first_step, start_s, end_s)
    task = graph.tasks[at]
    return Piece(kind, task.rank, task.kind, task.bucket, task.step, start_s, end_s)


def _shares(timing: Timing, path: list[int]) -> dict[str, float]:
    """Return each resource's share of the path."""
    graph, times_s = timing.graph, timing.times_s
    table, rows, columns = compute_s(graph, _costs(graph, times_s))
    typical = typical_s(table)
    seconds: defaultdict[str, float] = defaultdict(float)
    for before, here in itertools.pairwise(path):
        taken_s, kind = float(times_s[here] - times_s[before]), CLASSES[graph.moments.classes[here]]
        if kind not in COMPUTE:
            seconds[kind] += taken_s
            continue
        whole_s = float(table[rows[here], columns[here]])
        beyond = max(0.0, 1 - float(typical[columns[here]]) / whole_s) if whole_s else 0.0
        seconds["stragglers"] += taken_s * beyond
        seconds["compute"] += taken_s * (1 - beyond)
    return {name: share for name, share in _greatest_first(seconds).items() if share > 0}


def _compute_ranks(pieces: list[Piece]) -> dict[int, float]:
    seconds: defaultdict[int, float] = defaultdict(float)
    for piece in pieces:
        if piece.kind in COMPUTE:
            seconds[piece.rank] += piece.seconds
    return _greatest_first(seconds)


def _greatest_first(seconds: Mapping[K, float]) -> dict[K, float]:
    """Return shares of the whole."""
    whole_s = sum(seconds.values())
    order = sorted(seconds.items(), key=lambda one: -one[1])
    return {name: found / whole_s for name, found in order} if whole_s > 0 else {}


def of_step(path: CriticalPath, step: int) -> Iterator[Piece]:
    """Yield the pieces of one step, compute of one rank and kind as one."""
    last: Piece | None = None
    for piece in path.pieces:
        if piece.step != step:
            continue
        if last is not None and _same_work(last, piece):
            last = Piece(*_key(last), last.start_s, piece.end_s)
            continue
        if last is not None:
            yield last
        last = piece
    if last is not None:
        yield last


def _same_work(one: Piece, other: Piece) -> bool:
    is_next = one.rank == other.rank and one.kind == other.kind
    return is_next and (one.kind in COMPUTE or one.task == other.task)
