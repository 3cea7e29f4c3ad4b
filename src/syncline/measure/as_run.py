"""Layers as they take in a run, which a plain loop does not show.

There gradients are taken from autograd, buckets handed over, and a comm lane runs beside compute,
in one interpreter with it.
"""

from __future__ import annotations

from syncline.perf.breakdown import break_down
from syncline.perf.graph import compile_trace, retime
from syncline.perf.trace import Trace
from syncline.workload import Workload

_BACKWARD = ("backward", "between", "submit")
"""Parts of a step that count as backward: what the compute lane does between its tasks, too."""


def as_run(workload: Workload, trace: Trace, step_s: float | None = None) -> Workload:
    """Return the workload with forward and backward as they took in a traced run of its job.

    Layers keep their shares. Recording costs time: if a step of the same run takes `step_s` without
    it, all of the trace's times are taken to be longer by the same factor.
    """
    breakdown = break_down(retime(compile_trace(trace)))
    ranks = sum(map(len, trace.header.machines))
    shards = max(1.0, trace.header.shards / ranks)
    factor = 1.0 if step_s is None or not breakdown.step_s else step_s / breakdown.step_s
    parts = {name: factor * seconds / shards for name, seconds in breakdown.parts_s.items()}
    forward = _ratio(parts["forward"], workload.forward_s)
    backward = _ratio(sum(parts[name] for name in _BACKWARD), workload.backward_s)
    return workload.scaled(forward, backward)


def _ratio(as_run_s: float, alone_s: float) -> float:
    return as_run_s / alone_s if alone_s else 1.0
