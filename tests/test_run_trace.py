"""Traces of real runs: graphs on one clock, for every strategy and communicator."""

from __future__ import annotations

import itertools
import time

import pytest
from benchmarks.prediction_cases import SLEEPING
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from comm.test_every_communicator import in_world
from patience import one_of_three
from ranks import run_ranks
from syncline.config import read_job
from syncline.perf.breakdown import break_down
from syncline.perf.graph import compile_trace, retime
from syncline.perf.trace import Trace
from syncline.run_trace import _compare
from syncline.strategies import STRATEGIES, make_strategy
from syncline.train import train
from traces import check_trace, members, served_calls
from training import SilentProgress, train_forked

pytestmark = pytest.mark.processes

JOB = """
[model]
name = "cnn"
[data]
name = "digits"
batch = 24
[optimizer]
name = "sgd"
lr = 0.05
[run]
steps = 6
evaluate_every = 3
checkpoint_every = 3
"""


@pytest.fixture(scope="module")
def job_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("traces") / "job.toml"
    path.write_text(JOB)
    return path


def check_measured(trace):
    """Check that a real run can be timed again, and that the parts of its steps add up."""
    graph = compile_trace(trace)
    timing = retime(graph)
    ends_s = [task.end_s for task in trace.tasks if task.lane == "compute"]
    assert timing.run_s == pytest.approx(max(ends_s) - timing.times_s[0], rel=0.01)
    for at, task in enumerate(trace.tasks):
        assert abs(timing.times_s[graph.ends[at]] - task.end_s) <= 0.01 * timing.run_s
    breakdown = break_down(timing)
    assert breakdown.parts_s["forward"] > 0
    assert breakdown.parts_s["whole"] > 0
    for one in breakdown.steps:
        assert one.sum_s == pytest.approx(one.step_s, rel=0.01)


def trace_of(job_file, folder, *sets, ranks=2):
    path = folder / "run.trace.gz"
    train_forked(job_file, folder / "run", *sets, ranks=ranks, trace=path)
    return Trace.read(path)


@pytest.mark.parametrize("strategy", sorted(STRATEGIES))
def test_a_trace_is_a_graph_on_one_clock(job_file, tmp_path, strategy):
    sets = [f"strategy.name={strategy}"]
    own = ("all_reduce", "wait_free", "merged", "sync_server")  # these say where buckets end
    if strategy not in own:
        sets.append("strategy.bucket_bytes=100000")
    if strategy == "local":
        sets.append("strategy.local.period=2")
    if not make_strategy(strategy).settings.fixes_overlap:
        sets.append("strategy.overlap=true")
    trace = trace_of(job_file, tmp_path, *sets, ranks=3)
    check_trace(trace)
    check_measured(trace)
    assert trace.header.clocks.error_s <= 20e-6
    calls = strategy in ("elastic", "server")  # gossip reads its partner's memory
    meets = strategy not in ("elastic", "server", "gossip")
    assert {len(ranks) for ranks in members(trace).values()} == ({3} if meets else set())
    assert bool(served_calls(trace)) == calls
    kinds = {task.kind for task in trace.tasks}
    assert {"whole", "report"} <= kinds
    assert {"input", "forward", "backward", "reduce", "gather", "evaluate", "checkpoint"} <= kinds
    header = trace.header
    assert header.strategy == strategy
    assert header.machines == ((0, 1, 2),)
    assert (header.shards, header.samples, header.steps) == (3, 8, 6)
    assert all(bucket.parameters and bucket.num_bytes for bucket in header.buckets)
    assert "[strategy]" in header.job


@pytest.mark.parametrize("strategy", sorted({*STRATEGIES} - {"hybrid"}))  # it has linear layers
def test_little_of_a_step_of_50_ms_is_between_tasks(tmp_path, strategy):
    job_file = tmp_path / "job.toml"
    job_file.write_text(SLEEPING.format(sizes=[40_000] * 4, compute_s=0.05))
    folders = itertools.count()

    def share_between():
        folder = tmp_path / str(next(folders))
        folder.mkdir()
        sets = [f"strategy.name={strategy}", "run.steps=8"]
        sets += ["strategy.local.period=2"] if strategy == "local" else []
        breakdown = break_down(retime(compile_trace(trace_of(job_file, folder, *sets))))
        assert breakdown.step_s >= 0.05
        return breakdown.parts_s["between"] / breakdown.step_s

    one_of_three(share_between, lambda share: share <= 0.05)


def test_inline_what_follows_the_sums_comes_after_them(job_file, tmp_path):
    path = tmp_path / "run.trace"
    job = read_job(job_file, ["strategy.name=all_reduce", "strategy.comm=network"])

    def work():
        train(job, tmp_path / "run", False, SilentProgress(), path)

    run_ranks(2, work, machines=2)
    tasks = Trace.read(path).tasks
    sums = {(one.rank, one.step): (one.rank, one.number) for one in tasks if one.kind == "reduce"}
    steps = [one for one in tasks if one.kind == "step"]
    assert steps
    assert all(sums[one.rank, one.step] in one.after for one in steps)
    parts = break_down(retime(compile_trace(Trace.read(path)))).parts_s
    assert parts["unknown"] <= 0.05 * sum(parts.values())


@pytest.mark.parametrize("strategy", ["synchronous", "server", "gossip"])
def test_so_it_is_on_two_machines(job_file, tmp_path, strategy):
    path = tmp_path / "run.trace"
    sets = [f"strategy.name={strategy}", "strategy.bucket_bytes=100000", "strategy.overlap=true"]
    job = read_job(job_file, sets)

    def work():
        train(job, tmp_path / "run", False, SilentProgress(), path)

    run_ranks(4, work, machines=2)
    trace = Trace.read(path)
    check_trace(trace)
    assert trace.header.machines == ((0, 1), (2, 3))
    assert 0.0 < trace.header.clocks.latency_s <= trace.header.clocks.error_s
    assert any(part.kind == "wire" for task in trace.tasks for part in task.parts)
    assert bool(served_calls(trace)) == (strategy != "synchronous")


def test_inline_backward_is_one_task_and_clipping_is_waited_for(job_file, tmp_path):
    sets = ["strategy.overlap=false", "optimizer.clip_norm=0.5"]
    trace = trace_of(job_file, tmp_path, *sets)
    check_trace(trace)
    backward = [task for task in trace.tasks if task.kind == "backward"]
    assert {(task.bucket, task.step) for task in backward} == {(-1, step) for step in range(6)}
    clips = {(task.rank, task.number) for task in trace.tasks if task.kind == "clip"}
    assert len(clips) == 2 * 6
    later = [task for task in trace.tasks if task.lane == "compute" and clips & set(task.after)]
    assert len(later) == len(clips)


@settings(max_examples=4, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(["synchronous", "gossip", "elastic", "server", "merged"]),
    st.sampled_from([2, 3]),
    st.booleans(),
    st.booleans(),
)
def test_what_holds_for_every_trace(job_file, tmp_path_factory, strategy, ranks, overlap, clips):
    sets = [f"strategy.name={strategy}", "run.steps=3", "run.evaluate_every=2"]
    if not make_strategy(strategy).settings.fixes_overlap:
        sets.append(f"strategy.overlap={str(overlap).lower()}")
    if clips and STRATEGIES[strategy].settings.is_synchronous:
        sets.append("optimizer.clip_norm=0.5")
    check_trace(trace_of(job_file, tmp_path_factory.mktemp("one"), *sets, ranks=ranks))


def test_a_run_that_is_resumed_is_traced_from_there(job_file, tmp_path):
    train_forked(job_file, tmp_path / "run", "run.steps=3", ranks=2)
    path = tmp_path / "rest.trace"
    train_forked(job_file, tmp_path / "run", "run.steps=6", ranks=2, trace=path, resume=True)
    trace = Trace.read(path)
    check_trace(trace)
    assert (trace.header.first_step, trace.header.steps) == (3, 3)
    assert {task.step for task in trace.tasks} == {3, 4, 5}


WORLDS = ["shared memory, 3 ranks", "network, 3 ranks", "2 machines with 2 ranks"]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("offset_s", [0.0, 1.0])
def test_an_offset_between_clocks_is_recovered(world, offset_s):
    def measure(comm):
        # Rank 0's own clock, and others that are ahead.
        me = comm.ranks[comm.position]
        found = _compare(comm, lambda: time.perf_counter() + offset_s * me)
        return [list(found.offsets_s), found.error_s]

    for offsets_s, error_s in in_world(world, measure):
        for rank, found_s in enumerate(offsets_s):
            assert abs(found_s + offset_s * rank) <= error_s
        assert error_s < 0.1  # a busy machine; what a quiet one has is in docs/traces.md
