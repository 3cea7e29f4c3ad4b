"""Graphs of traces: they give back the run's own times, break steps down, and find the path."""

from __future__ import annotations

import contextlib
import json

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from simulated import trace_of
from syncline.errors import ConfigError
from syncline.perf.breakdown import break_down
from syncline.perf.critical_path import critical_path
from syncline.perf.explain import explain, in_words
from syncline.perf.graph import compile_trace, retime, retime_samples
from syncline.perf.trace import BucketFacts, Header, Part, Task, Trace
from syncline.perf.what_if import compute, edited, what_if, wires
from syncline.strategies import STRATEGIES


def check_graph(trace, allowed_s=1e-9):
    """Check what holds for the graph of every trace; return it."""
    graph = compile_trace(trace)
    timing = retime(graph)
    for at, task in enumerate(trace.tasks):
        assert abs(timing.times_s[graph.starts[at]] - task.start_s) <= allowed_s
        assert abs(timing.times_s[graph.ends[at]] - task.end_s) <= allowed_s
    check_breakdown(graph, timing)
    path = critical_path(timing)
    assert path.length_s == pytest.approx(timing.run_s, rel=1e-9)
    assert path.slack_s.min() >= 0.0
    assert sum(path.shares.values()) == pytest.approx(1.0)
    return graph


def check_breakdown(graph, timing):
    """Check that parts add up to steps, whose ends are read from the trace itself."""
    breakdown = break_down(timing)
    assert {one.rank for one in breakdown.steps} == set(graph.step_ends)
    ends = {}
    for task in graph.tasks:
        kinds = ("wait", "evaluate", "checkpoint", "whole")
        if task.lane == "compute" and (task.kind not in kinds or task.bucket < 0):
            ends[task.rank, task.step] = task.end_s
    for one in breakdown.steps:
        assert one.sum_s == pytest.approx(one.step_s, rel=0.01, abs=1e-9)
        last = max(step for rank, step in ends if rank == one.rank)
        if (one.rank, one.step - 1) in ends and one.step < last:
            step_s = ends[one.rank, one.step] - ends[one.rank, one.step - 1]
            assert one.sum_s == pytest.approx(step_s, rel=0.01)
    if not graph.is_rough:  # a call may be on its way before its hook waits for it
        assert all(one.exposed_s <= one.busy_s + 1e-9 for one in breakdown.buckets)


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(sorted(STRATEGIES)),
    st.sampled_from([(2, 1), (2, 2), (4, 2), (4, 4)]),
    st.sampled_from(["1e7", "1e9"]),
    st.booleans(),
    st.sampled_from([(0, 0), (1, 0), (2, 2)]),
    st.sampled_from([1, 2]),
)
def test_what_holds_for_every_simulated_run(tmp_path, name, world, rate, varies, input_, shards):
    ranks, machines = world
    sets = [f"cluster.rate_bytes_per_s={rate}", f"strategy.shards={shards * ranks}"]
    sets += [f"data.prefetch={input_[0]}", f"data.workers={input_[1]}"]
    if varies:
        sets += ["cluster.jitter=lognormal", "cluster.jitter_sigma=0.3", "cluster.input_s=0.004"]
        sets += ["cluster.slow_ranks.1=1.5"]
    graph = check_graph(trace_of(tmp_path, name, *sets, ranks=ranks, machines=machines))
    calls = name in ("gossip", "elastic", "server")
    assert graph.is_rough == calls or name == "hybrid"
    if not calls:  # every wait has its cause in the trace
        assert graph.between_s < 1e-9


def test_a_rank_that_pauses_and_one_that_dies(tmp_path):
    faults = "cluster.faults=[{rank = 1, step = 1, kind = 'pause', seconds = 0.05}]"
    graph = check_graph(trace_of(tmp_path, "synchronous", faults))
    assert break_down(retime(graph)).parts_s["pause"] == pytest.approx(0.05 / 4 / 3)
    assert break_down(retime(graph)).parts_s["waiting"] == pytest.approx(3 * 0.05 / 4 / 3, rel=0.1)
    dies = "cluster.faults=[{rank = 1, step = 2, kind = 'death'}]"
    check_graph(trace_of(tmp_path, "gossip", dies))


@pytest.mark.parametrize("strategy", ["server", "elastic"])
def test_a_rank_that_only_serves_has_no_steps(tmp_path, strategy):
    graph = check_graph(trace_of(tmp_path, strategy, f"strategy.{strategy}.servers=1"))
    assert {*graph.step_ends} == {0, 1, 2}


# -- by hand ---------------------------------------------------------------------------------------

META = Header(
    strategy="synchronous",
    machines=((0,), (1,)),
    shards=2,
    samples=10,
    steps=2,
    buckets=(BucketFacts(8, ("w",)),),
    clock="virtual",
)


def rank_by_hand(rank, forwards):
    """Return two steps of a rank: forward, backward of 2, reduce, update of 1, gather, wait.

    The other rank computes forward in 1. Wire takes 3, latency 1, in each of two exchanges.
    """
    tasks, now, number = [], 0.0, 0
    for step, forward in enumerate(forwards):
        before = ((rank, number - 1), (rank, number - 2)) if step else ()
        last = ((rank, number - 2),) if step else ()
        came = now + forward + 2
        met = now + max(forward, 1) + 2
        ids = [f"0-1.0:{2 * step + at}" for at in range(2)]
        wait = (Part("wait", met, 0, ids[0]),) if met > came else ()
        reduced = (*wait, Part("latency", met + 1, 0, ids[0]), Part("wire", met + 4, 4, ids[0]))
        gathered = (
            Part("update", met + 5),
            Part("latency", met + 6, 0, ids[1]),
            Part("wire", met + 9, 4, ids[1]),
        )
        one, two, three, four = range(number, number + 4)
        tasks += [
            Task(rank, one, "compute", "forward", 0, step, now, now + forward, before),
            Task(rank, two, "compute", "backward", 0, step, now + forward, came, ((rank, one),)),
            Task(
                *(rank, three, "comm", "reduce", 0, step, came, met + 4),
                *(((rank, two), *last), reduced),
            ),
            Task(
                *(rank, four, "comm", "gather", 0, step, met + 4, met + 9, ((rank, three),)),
                gathered,
            ),
            Task(rank, four + 1, "compute", "wait", -1, step, came, met + 9, ((rank, two),)),
        ]
        now, number = met + 9, number + 5
    return tasks


def by_hand():
    """Rank 0 computes forward in 1 and 4, rank 1 always in 1."""
    slow = rank_by_hand(0, [1, 4])
    fast = rank_by_hand(1, [1, 1])
    later = [_shifted(task, 3.0) if task.step == 1 else task for task in fast]
    return Trace((*slow, *later), META)


def _shifted(task, seconds):
    """Let a task of the second step meet the other rank so much later."""
    if task.kind in ("forward", "backward"):
        return task
    move = msgspec.structs.replace
    parts = [move(part, end_s=part.end_s + seconds) for part in task.parts]
    start_s = task.start_s if task.kind in ("reduce", "wait") else task.start_s + seconds
    if task.kind == "reduce":
        parts = [Part("wait", start_s + seconds, 0, parts[0].exchange), *parts]
    return move(task, start_s=start_s, end_s=task.end_s + seconds, parts=tuple(parts))


def test_a_run_by_hand():
    # Step 0 of both: 1 + 2 + (1 + 3) + 1 + (1 + 3) = 12. Step 1 of rank 0: 15; rank 1 waits for 3.
    graph = check_graph(by_hand())
    timing = retime(graph)
    assert timing.run_s == 27.0
    assert graph.between_s == 0.0
    parts = {one.rank: one.parts_s for one in break_down(timing).counted}
    both = {"backward": 2.0, "wire": 6.0, "latency": 2.0, "update": 1.0}
    assert parts[0] == both | {"forward": 4.0}
    assert parts[1] == both | {"forward": 1.0, "waiting": 3.0}
    assert break_down(timing).samples_per_s == 20 / 15
    path = critical_path(timing)
    # Forward of both steps, with the median of (4, 1) and so 2.25 of 6 beyond it in step 1.
    assert path.shares["wire"] == pytest.approx(12 / 27)
    assert path.shares["stragglers"] == pytest.approx(6 * (1 - 4.5 / 6) / 27)
    assert path.binding == "wire"
    slack = {
        (task.rank, task.kind, task.step): found
        for task, found in zip(graph.tasks, path.slack_s, strict=True)
    }
    assert slack[1, "backward", 1] == 3.0
    assert slack[0, "backward", 1] == 0.0
    assert what_if(graph, wires(2)).run_s == 27 - 6
    assert what_if(graph, compute(2)).run_s == 27 - 1.5 - 3
    # With a gather of 0 s, the next forward still comes after it: after 12 - 10.
    assert what_if(graph, wires(1e9)).run_s == pytest.approx(15)


def test_an_exchange_of_activations_begins_in_the_middle_of_measured_compute():
    # Backward of 4 asks for an exchange of 3 after 2; then compute waits for it until 5.
    tasks = []
    for rank in range(2):
        wire = (Part("wire", 5.0, 4, "0-1.0:0"),)
        tasks += [
            Task(rank, 0, "compute", "split", -1, 0, 0.0, 4.0),
            Task(rank, 1, "comm", "activations", -1, 0, 2.0, 5.0, (), wire),
            Task(rank, 2, "compute", "wait", -1, 0, 4.0, 5.0, ((rank, 0),)),
            Task(rank, 3, "compute", "backward", 0, 0, 5.0, 6.0, ((rank, 2), (rank, 1))),
        ]
    graph = check_graph(Trace(tuple(tasks), msgspec.structs.replace(META, clock="measured")))
    assert graph.between_s == 0.0
    assert critical_path(retime(graph)).shares == {"compute": 0.5, "wire": 0.5}
    assert what_if(graph, compute(2)).run_s == 1 + 3 + 0.5
    assert what_if(graph, wires(3)).run_s == 4 + 1


def test_a_task_may_end_later_by_its_slack_and_no_more(tmp_path):
    sets = ["cluster.jitter=lognormal", "cluster.jitter_sigma=0.3", "strategy.overlap=true"]
    graph = compile_trace(trace_of(tmp_path, "synchronous", *sets, machines=2))
    timing = retime(graph)
    slack_s = critical_path(timing).slack_s
    later = [at for at in range(0, graph.num_tasks, 7) if graph.ends[at]]  # not at the beginning
    for at in later:
        for more_s, expected_s in ((0.0, 0.0), (0.01, 0.01)):
            cost_s = edited(graph)
            cost_s[graph.ends[at]] += slack_s[at] + more_s
            longer_s = retime(graph, cost_s).run_s - timing.run_s
            assert longer_s == pytest.approx(expected_s, abs=1e-9)


def test_a_forward_waits_for_a_bucket_that_was_ready(tmp_path):
    # At 1 GB/s all buckets are there in time; at a ten thousandth the next forward must wait.
    sets = ["strategy.overlap=true", "cluster.rate_bytes_per_s=1e9"]
    fast = trace_of(tmp_path, "synchronous", *sets)
    slow = trace_of(tmp_path, "synchronous", *sets[:1], "cluster.rate_bytes_per_s=1e5")
    found = what_if(compile_trace(fast), wires(1e-4)).step_s
    assert found == pytest.approx(retime(compile_trace(slow)).step_s, rel=1e-6)


def test_samples_are_timed_as_one_by_one(tmp_path):
    graph = compile_trace(trace_of(tmp_path, "wait_free", ranks=2, steps=3))
    factors = np.random.default_rng(0).lognormal(sigma=0.3, size=(5, 2, 3))
    found = retime_samples(graph, factors)
    assert found.shape == (5, 2, 2)
    for sample, steps_s in zip(factors, found, strict=True):
        cost_s = edited(graph)
        is_compute = graph.is_class("forward", "backward")
        cost_s[is_compute] *= sample[graph.ranks[is_compute], graph.steps[is_compute]]
        assert steps_s.mean() == pytest.approx(retime(graph, cost_s).step_s)
    with pytest.raises(ValueError, match="factors for 3 ranks, but the trace has 2"):
        retime_samples(graph, np.ones((1, 3, 3)))


# -- what is no run --------------------------------------------------------------------------------


def compute_task(number, start_s, end_s, after=(), **others):
    fields = {"rank": 0, "lane": "compute", "kind": "forward", "bucket": 0, "step": 0} | others
    return Task(number=number, start_s=start_s, end_s=end_s, after=after, **fields)


@pytest.mark.parametrize(
    ("tasks", "found"),
    [
        ((), "x: it has no tasks, but"),
        ((compute_task(0, 0, 2), compute_task(1, 1, 3)), "x: tasks 0 and 1 of rank 0 overlap, but"),
        (
            (compute_task(0, 0, 0, ((0, 1),)), compute_task(1, 0, 0, ((0, 0),))),
            "x: 4 moments wait for each other, but",
        ),
        (
            (compute_task(0, 0, 1, step=1 << 60),),
            "x: task 0 is of rank 0, step 1152921504606846976",
        ),
    ],
)
def test_what_is_no_run_is_refused_in_one_line(tasks, found):
    with pytest.raises(ConfigError) as caught:
        explain(Trace(tasks), "x")
    assert str(caught.value).startswith(found)
    assert "\n" not in str(caught.value)


NAMES = st.sampled_from(
    [
        "",
        "0-1.0:0",
        "0-1.0:1",
        "calls 0-1.0:1>0:1",
        "calls 0-1.0:0>0:1",
        "x>y",
        "1>0",
        "0-9999999999.1:1",
    ]
)
KINDS = st.sampled_from(
    [
        "wait",
        "wire",
        "latency",
        "update",
        "serve",
        "send",
        "answer",
        "lane",
        "forward",
        "reduce",
        "?",
    ]
)


@settings(max_examples=150)
@given(st.data())
def test_a_trace_that_is_changed_anywhere_is_explained_or_refused(data):
    rows = [json.loads(line) for line in by_hand().to_bytes().splitlines()]
    for _ in range(data.draw(st.integers(1, 4))):
        row = data.draw(st.sampled_from(rows[1:]))
        what = data.draw(st.integers(0, 6))
        number = data.draw(st.integers(-1, 11))
        if what == 0:
            row[2] = data.draw(st.sampled_from(["compute", "comm", ""]))
        elif what == 1:
            row[3] = data.draw(KINDS)
        elif what == 2:
            row[data.draw(st.sampled_from([4, 5]))] = data.draw(st.integers(-1, 1 << 62))
        elif what == 3:
            row[8] = [[number % 2, abs(number) % 10]]
        elif what == 4:
            row[data.draw(st.sampled_from([6, 7]))] = data.draw(st.floats(0, 30))
        elif row[9]:
            part = data.draw(st.sampled_from(row[9]))
            part[:] = [*part, 0, "", []][:5] if len(part) < 5 else part
            part[0], part[3], part[4] = data.draw(KINDS), data.draw(NAMES), [number]
    text = "".join(f"{json.dumps(row)}\n" for row in rows)
    with contextlib.suppress(ConfigError):
        found = explain(Trace.from_bytes(text.encode()))
        assert in_words(found)
        assert np.isfinite(retime(found.graph).times_s).all()
