"""Layers as they take in a run: a simulated run gives back the times that it was told."""

from __future__ import annotations

import msgspec
import pytest

from simulated import job_of, trace_of
from syncline.cluster import cluster_of
from syncline.measure.as_run import as_run
from syncline.perf.breakdown import break_down
from syncline.perf.graph import compile_trace, retime
from syncline.sim.job import find_workload


def test_a_run_s_own_times_come_back(tmp_path):
    job = job_of(tmp_path, "synchronous").resolved(2)
    told = find_workload(job, cluster_of(job.cluster, 2))
    trace = trace_of(tmp_path, "synchronous", ranks=2)
    other = msgspec.structs.replace(
        told,
        layers=tuple(
            msgspec.structs.replace(one, forward_s=3 * one.forward_s, backward_s=one.backward_s / 2)
            for one in told.layers
        ),
    )
    found = as_run(other, trace)
    assert found.forward_s == pytest.approx(told.forward_s)
    assert found.backward_s == pytest.approx(told.backward_s)
    shares = [one.forward_s / found.forward_s for one in found.layers]
    assert shares == pytest.approx([one.forward_s / told.forward_s for one in told.layers])


def test_what_recording_costs_is_taken_off(tmp_path):
    job = job_of(tmp_path, "synchronous").resolved(2)
    told = find_workload(job, cluster_of(job.cluster, 2))
    trace = trace_of(tmp_path, "synchronous", ranks=2)
    slow = as_run(told, trace)
    step_s = break_down(retime(compile_trace(trace))).step_s
    assert as_run(told, trace, step_s / 2).forward_s == pytest.approx(slow.forward_s / 2)
