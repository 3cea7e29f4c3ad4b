"""A compiled run as columns of small whole numbers, deflated: what the page times again.

Times are whole numbers of ticks. A cost is the difference of two rounded times, so that rounding
does not add up along a path. `data.js` reads what `pack` writes.
"""

from __future__ import annotations

import base64
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt

from syncline.perf.graph import Graph

_FINE_MOMENTS = 500_000
"""Longer runs have ticks of 10 ns instead of 1 ns: that saves a byte for each cost."""

Array = npt.NDArray[np.int64]


def pack(graph: Graph) -> tuple[dict[str, Any], str]:
    """Return facts of a run, and its columns as text."""
    moments, tasks = graph.moments, graph.tasks
    tick_s = 1e-9 if len(moments.first) < _FINE_MOMENTS else 1e-8
    begin_s = float(graph.recorded_s[0])
    times = np.rint((graph.recorded_s - begin_s) / tick_s).astype(np.int64)
    first, second = np.array(moments.first), np.array(moments.second)
    costs = times - np.maximum(times[first], times[second])
    here = np.arange(len(first))
    kinds = sorted({(task.lane, task.kind) for task in tasks})
    number = {kind: at for at, kind in enumerate(kinds)}
    starts, ends = np.array(graph.starts), np.array(graph.ends)
    step_ends = [
        (rank, step, moment)
        for rank, steps in graph.step_ends.items()
        for step, moment in steps.items()
    ]
    columns: list[Array] = [
        here - first,
        _signed(first - second),
        _signed(costs),
        moments.classes,
        _running(moments.tasks),
        _running(np.array([task.rank for task in tasks])),
        _running(np.array([task.step for task in tasks])),
        np.array([number[task.lane, task.kind] for task in tasks]),
        np.array([task.bucket + 1 for task in tasks]),
        _running(starts),
        _signed(ends - starts),
        *(_running(np.array(column, dtype=np.int64)) for column in _columns(step_ends)),
    ]
    facts = {
        "moments": len(first),
        "tasks": len(tasks),
        "stepEnds": len(step_ends),
        "tick": tick_s,
        "kinds": kinds,
        "lasts": graph.lasts,
        "rough": graph.rough,
        "virtual": graph.header.clock == "virtual",
    }
    data = b"".join(varints(column) for column in columns)
    return facts, base64.b64encode(zlib.compress(data, 9)).decode()


def _columns(rows: list[tuple[int, int, int]]) -> list[list[int]]:
    return [[row[at] for row in rows] for at in range(3)]


def _running(values: Array) -> Array:
    """Return the difference of each value to the one before it."""
    return _signed(np.diff(values, prepend=0))


def _signed(values: Array) -> Array:
    """Return whole numbers of any sign as ones without: 0, -1, 1, -2 ... as 0, 1, 2, 3 ..."""
    return np.where(values < 0, -2 * values - 1, 2 * values)


def varints(values: Array) -> bytes:
    """Return whole numbers in as few bytes as each needs: seven bits a byte, the lowest first.

    >>> varints(np.array([1, 127, 128, 300])).hex()
    '017f8001ac02'
    """
    sizes = np.ones(len(values), dtype=np.int64)
    rest = values >> 7
    while rest.any():
        sizes += rest > 0
        rest = rest >> 7
    ends = np.cumsum(sizes)
    out = np.zeros(int(ends[-1]) if len(ends) else 0, dtype=np.uint8)
    starts, left = ends - sizes, values.copy()
    for at in range(int(sizes.max()) if len(sizes) else 0):
        has = sizes > at
        more = sizes > at + 1
        out[(starts + at)[has]] = ((left & 127) | np.where(more, 128, 0))[has]
        left = left >> 7
    return out.tobytes()
