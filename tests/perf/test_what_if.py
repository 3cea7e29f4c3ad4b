"""What-if: edited graphs against runs that are simulated anew."""

from __future__ import annotations

import pytest

from simulated import trace_of
from syncline.perf.graph import compile_trace, retime
from syncline.perf.what_if import (
    NO_STRAGGLERS,
    Edit,
    compute,
    interpolated,
    latency,
    rank_edits,
    what_if,
    wires,
)

EDITS = [
    (wires(2), "cluster.rate_bytes_per_s=4e7"),
    (wires(0.5), "cluster.rate_bytes_per_s=1e7"),
    (latency(20), "cluster.latency_s=2e-3"),
    (compute(2), "cluster.flops_per_s=4e9"),
    (NO_STRAGGLERS, "cluster.slow_ranks={}"),
    (Edit("free update", {"update": 0.0}), "cluster.update_bytes_per_s=1e15"),
]
SLOW = "cluster.slow_ranks={ 1 = 1.5 }"
MEET = ["all_reduce", "layered", "local", "merged", "sync_server", "synchronous", "wait_free"]


@pytest.mark.parametrize("machines", [2, 4])
@pytest.mark.parametrize("strategy", MEET)
def test_an_edited_run_is_as_if_simulated_anew(tmp_path, strategy, machines):
    sets = [SLOW, "cluster.inside_rate_bytes_per_s=1e8"]
    if strategy in ("layered", "synchronous"):
        sets.append("strategy.overlap=true")
    graph = compile_trace(trace_of(tmp_path, strategy, *sets, machines=machines))
    assert not graph.is_rough
    for edit, setting in EDITS:
        if strategy == "merged" and edit.name.startswith("compute"):
            continue  # it would choose other buckets
        again = trace_of(tmp_path, strategy, *sets, setting, machines=machines)
        expected = retime(compile_trace(again)).step_s
        assert what_if(graph, edit).step_s == pytest.approx(expected, rel=1e-6), edit.name


@pytest.mark.parametrize(("workers", "input_s"), [(0, 0.09), (2, 0.2)])
def test_batches_that_are_loaded_ahead_come_from_their_loader(tmp_path, workers, input_s):
    # A loader has a batch every 90 or 100 ms, compute takes about 40 ms: more would not help.
    sets = [f"cluster.input_s={input_s}", "data.prefetch=2", f"data.workers={workers}"]
    graph = compile_trace(trace_of(tmp_path, "synchronous", *sets, steps=12))
    again = trace_of(tmp_path, "synchronous", *sets, "cluster.flops_per_s=4e9", steps=12)
    expected = retime(compile_trace(again)).step_s
    assert what_if(graph, compute(2)).step_s == pytest.approx(expected, rel=0.01)


def test_where_ranks_call_each_other_or_groups_share_links_answers_are_rough(tmp_path):
    for strategy in ("gossip", "elastic", "server", "hybrid"):
        graph = compile_trace(trace_of(tmp_path, strategy))
        assert graph.rough, strategy
        assert all(one.is_rough for one in rank_edits(graph))
    fast = trace_of(tmp_path, "server", "cluster.links=fast")
    assert compile_trace(fast).rough.startswith("ranks call each other")


def test_edits_are_ranked_by_what_they_gain(tmp_path):
    graph = compile_trace(trace_of(tmp_path, "all_reduce", SLOW))
    answers = rank_edits(graph)
    gains = [one.gain for one in answers]
    assert gains == sorted(gains, reverse=True)
    by_name = {one.edit.name: one for one in answers}
    before_s = retime(graph).step_s
    assert by_name["wires twice as fast"].step_s == what_if(graph, wires(2)).step_s
    assert by_name["wires twice as fast"].gain == 1 - what_if(graph, wires(2)).step_s / before_s
    both = what_if(graph, wires(2), compute(2)).step_s
    assert both < min(what_if(graph, wires(2)).step_s, what_if(graph, compute(2)).step_s)


def test_simulations_at_a_few_rates_are_interpolated_in_the_time_of_a_byte():
    step_s = interpolated(lambda rate: 1 + 2 / rate, [1, 4])
    assert step_s(1) == 3
    assert step_s(2) == pytest.approx(2)
    with pytest.raises(ValueError, match="5 is not between 1 and 4"):
        step_s(5)
    with pytest.raises(ValueError, match="rates are positive and finite"):
        interpolated(lambda rate: 1.0, [0, 1])


def test_a_server_is_simulated_anew_and_interpolated(tmp_path):
    def simulate(rate):
        trace = trace_of(tmp_path, "server", f"cluster.rate_bytes_per_s={rate * 2e7}", steps=4)
        return retime(compile_trace(trace)).step_s

    step_s = interpolated(simulate, [0.25, 0.5, 1])
    assert step_s(0.4) == pytest.approx(simulate(0.4), rel=0.05)
