"""A run explained: what its steps took, what they waited for, and what would help most.

`explain` puts the analyses of a trace together, and `in_words` says the same in a page of text.
`numbers.py` has all numbers.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from syncline.perf.breakdown import Breakdown, break_down
from syncline.perf.critical_path import CriticalPath, Piece, critical_path, of_step
from syncline.perf.graph import Graph, compile_trace, retime
from syncline.perf.trace import Trace
from syncline.perf.what_if import Answer, rank_edits

_LEAST_GAIN = 0.005
"""Edits that gain less are not told in words."""
_LEAST_SHARE = 0.01
"""Stretches of the path that are shorter than this share of a step are not told in words."""

NAMES = {
    "waiting": "waiting for slower ranks",
    "wire": "wire",
    "messages": "handling messages",
    "inside": "exchange inside machines",
    "sum": "sums",
    "copy": "copies",
    "work": "code of the strategy",
    "submit": "handing over",
    "unknown": "unknown waits",
    "report": "reporting",
    "whole": "gathering parameters",
    "between": "between tasks",
    "stragglers": "slow ranks",
}
"""How parts and resources are called in words, where not by their own name."""


@dataclass(frozen=True)
class Explanation:
    """What is known of a run."""

    graph: Graph
    breakdown: Breakdown
    path: CriticalPath
    answers: tuple[Answer, ...]

    @property
    def binding(self) -> str:
        """The resource that binds, in words."""
        name = self.path.binding
        if name == "compute" and len(self.path.compute_ranks) > 1:
            rank, share = next(iter(self.path.compute_ranks.items()))
            return f"compute ({share:.0%} of it rank {rank}'s)"
        if name == "compute":
            return f"compute of rank {next(iter(self.path.compute_ranks))}"
        return NAMES.get(name, name)


def explain(trace: Trace, source: str = "the trace") -> Explanation:
    """Explain a run; raise ConfigError, which names `source`, if the trace is of none."""
    with _without_collector():
        graph = compile_trace(trace, source)
        timing = retime(graph)
        answers = tuple(rank_edits(graph))
        return Explanation(graph, break_down(timing), critical_path(timing), answers)


@contextlib.contextmanager
def _without_collector() -> Iterator[None]:
    """Keep the cyclic collector from going through millions of lists: none of them is garbage."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def in_words(found: Explanation) -> str:
    """Return the explanation as text."""
    return "\n".join(_lines(found))


def _lines(found: Explanation) -> Iterator[str]:
    header, breakdown = found.graph.header, found.breakdown
    clock = "simulated" if header.clock == "virtual" else "measured"
    ranks, machines = sum(map(len, header.machines)), len(header.machines)
    where = f"{_count(ranks, 'rank')} on {_count(machines, 'machine')}"
    yield f"{header.strategy}, {where}, {_count(header.steps, 'step')}, {clock}"
    yield ""
    yield f"a step takes {_ms(breakdown.step_s)}, {short(breakdown.samples_per_s)} samples/s:"
    yield from _parts(breakdown)
    yield from _buckets(breakdown)
    yield ""
    yield from _path(found)
    yield ""
    yield f"what binds: {found.binding}"
    yield from _answers(found)


def _parts(breakdown: Breakdown) -> Iterator[str]:
    whole_s = breakdown.step_s or 1.0
    parts = breakdown.parts_s
    for name, seconds in parts.items():
        if abs(seconds) >= 5e-5 * whole_s:
            yield _row(NAMES.get(name, name), seconds, whole_s)
    yield _row("together", sum(parts.values()), whole_s)


def _row(name: str, seconds: float, whole_s: float) -> str:
    return f"  {name:<26}{_ms(seconds):>12}{seconds / whole_s:>9.1%}"


def _buckets(breakdown: Breakdown) -> Iterator[str]:
    if breakdown.exchange_s:
        took = f"exchanging buckets takes {_ms(breakdown.exchange_s)} of a step"
        yield f"  {took}; {breakdown.hidden:.0%} of it is hidden"


def _path(found: Explanation) -> Iterator[str]:
    """Say what the path through the run consists of, and how it goes through the last step."""
    path = found.path
    shares = [
        f"{NAMES.get(name, name)} {share:.0%}"
        for name, share in path.shares.items()
        if share >= _LEAST_SHARE
    ]
    yield f"critical path, {_ms(path.length_s)}: {', '.join(shares)}"
    header = found.graph.header
    step = max(header.first_step, path.last_step - 1)  # the last one ends with the run
    pieces = list(of_step(path, step))
    whole_s = sum(piece.seconds for piece in pieces)
    yield f"  in step {step}:"
    long = [piece for piece in pieces if piece.seconds >= _LEAST_SHARE * whole_s]
    told = [(f"rank {piece.rank}: {_doing(piece)}", piece.seconds) for piece in long]
    for what, same in itertools.groupby(told, key=lambda one: one[0]):
        yield f"  {_ms(sum(seconds for _, seconds in same)):>12}  {what}"


def _doing(piece: Piece) -> str:
    """Say what a stretch of the path is."""
    bucket = f", bucket {piece.bucket}" if piece.bucket >= 0 else ""
    if piece.kind in ("forward", "backward"):
        return piece.kind
    if piece.kind == piece.task:
        return f"{NAMES.get(piece.kind, piece.kind)}{bucket}"
    return f"{NAMES.get(piece.kind, piece.kind)} ({piece.task}{bucket})"


def _answers(found: Explanation) -> Iterator[str]:
    helpful = [one for one in found.answers if one.gain >= _LEAST_GAIN]
    if not helpful:
        yield "what would help: none of the edits by as much as 0.5 %"
        return
    rough = " (rough)" if found.graph.is_rough else ""
    yield f"what would help most{rough}:"
    for one in helpful:
        yield f"  {one.edit.name:<32}{_ms(one.step_s):>10}  {one.gain:.1%} less"
    if found.graph.rough:
        yield f"  rough: {found.graph.rough}"


def short(number: float) -> str:
    """Return a number with four digits, or all those before the point.

    >>> short(1.23456), short(12345.6)
    ('1.235', '12,346')
    """
    return f"{number:,.0f}" if abs(number) >= 1000 else f"{number:.4g}"


def _ms(seconds: float) -> str:
    return f"{short(seconds * 1e3)} ms"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
