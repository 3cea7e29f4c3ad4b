"""Closed formulas, against cases worked out by hand and against each other."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from syncline.cluster import Link
from syncline.perf import formulas
from syncline.perf.formulas import (
    LayeredParts,
    ServerCycle,
    StepParts,
    merged_layers,
    staleness_of,
    wait_free,
)

ONE = Link(latency_s=1.0, rate_bytes_per_s=1.0)
FAST = Link(latency_s=0.5, rate_bytes_per_s=4.0)
times = some.lists(some.floats(0, 9), min_size=1, max_size=8)


def test_steps_of_one_rank_and_of_many():
    step = StepParts(forward_s=1, backward_s=2, input_s=5, update_s=0.5, exchange_s=4)
    assert step.alone_s == 8.5
    assert step.in_line_s == 12.5
    assert step.input_ahead_s == 7.5  # the input's 5 s are hidden
    slow_input = StepParts(forward_s=1, backward_s=2, input_s=9, update_s=0.5, exchange_s=4)
    assert slow_input.input_ahead_s == 9


def test_wait_free_backpropagation_by_hand():
    # Backward ends at 1 (layer 3), 4 (layer 2) and 6 s (layer 1); exchanges take 4, 1 and 2 s.
    found = wait_free([2, 3, 1], [2, 1, 4])
    assert found.begins_s == (6, 5, 1)  # layer 2 waits for the wire, layer 1 for backward
    assert found.ends_s == (8, 6, 5)
    assert (found.backward_s, found.exposed_s) == (6, 2)
    assert wait_free([2, 3, 1], [0, 1, 4]).exposed_s == 0


@given(times, some.data())
def test_what_is_exposed_lies_between_the_first_layer_s_exchange_and_all(backward_s, data):
    exchange_s = data.draw(some.lists(some.floats(0, 9), min_size=len(backward_s), max_size=9))
    exchange_s = exchange_s[: len(backward_s)]
    found = wait_free(backward_s, exchange_s)
    total = sum(exchange_s)
    assert exchange_s[0] - 1e-9 <= found.exposed_s <= total + 1e-9
    assert found.exposed_s >= total - found.backward_s + backward_s[-1] - 1e-9
    for layer, begin in enumerate(found.begins_s):
        assert begin >= sum(backward_s[layer:]) - 1e-9


@settings(max_examples=60)
@given(times, some.data())
def test_merging_is_never_slower_than_sending_layers_one_by_one(backward_s, data):
    sizes = data.draw(some.lists(some.floats(0.1, 9), min_size=8, max_size=8))[: len(backward_s)]
    startup_s = data.draw(some.floats(0, 4))
    starts = merged_layers(sizes, backward_s, startup_s, 1.0)
    assert starts[0] == 0
    ends = [*starts[1:], len(sizes)]
    joined = {a: sum(sizes[a:b]) for a, b in zip(starts, ends, strict=True)}
    merged = [startup_s + joined[at] if at in joined else 0.0 for at in range(len(sizes))]
    single = [startup_s + size for size in sizes]
    assert wait_free(backward_s, merged).exposed_s <= wait_free(backward_s, single).exposed_s + 1e-9


def test_a_merged_message_holds_the_wire_for_all_its_bytes():
    # Layer 3 waits 0.5 s for layer 2: 4.5 bytes, from 2.5 to 8 s. So layer 1, ready at 5.5 s, waits
    # for the wire until after layer 0 is ready, at 7.5 s, and goes with it.
    assert merged_layers([0.5, 0.5, 0.5, 4], [2, 3, 0.5, 2], 1.0, 1.0) == [0, 2]


def test_all_reduces_by_hand():
    # 8 bytes, 1 s a message, 1 s a byte, on 4 ranks; adding a byte takes 0.1 s.
    assert formulas.ring_s(8, 4, ONE, 0.1) == pytest.approx(6 * (1 + 2) + 6 * 0.1)
    assert formulas.recursive_doubling_s(8, 4, ONE, 0.1) == pytest.approx(2 * (1 + 8 + 0.8))
    # Halving: 4 and 2 bytes; doubling: 2 and 4.
    assert formulas.halving_doubling_s(8, 4, ONE, 0.1) == pytest.approx(4 + 12 + 0.6)
    # 6 ranks: two of them fold first and unfold last, 9 s each, and a sum of 8 bytes.
    assert formulas.halving_doubling_s(8, 6, ONE, 0.1) == pytest.approx(16 + 0.6 + 18 + 0.8)
    assert formulas.recursive_doubling_s(8, 5, ONE) == 27


def test_machines_by_hand():
    # Inside, 2 ranks: 4 of 8 bytes, twice, at 4 bytes/s; across, 4 machines: 6 of 8, twice.
    inside_s, across_s = 2 * (0.5 + 1), 2 * (3 + 6)
    assert formulas.hierarchical_s(8, 4, 2, FAST, ONE) == inside_s + across_s
    assert formulas.hierarchical_s(8, 4, 2, FAST, ONE, "direct") == inside_s + 2 * (1 + 6)
    # Leaders: two messages of 8 bytes inside, a ring of 4 across.
    assert formulas.leaders_s(8, 4, 2, FAST, ONE) == 2 * (0.5 + 2) + 6 * (1 + 2)
    assert formulas.leaders_s(8, 4, 4, FAST, ONE) == 4 * (0.5 + 2) + 6 * (1 + 2)


@given(
    some.floats(0, 1e9),
    some.integers(2, 200),
    some.floats(0, 1e-2),
    some.floats(1e6, 1e11),
    some.floats(0, 1e-9),
)
def test_all_reduces_of_one_rank_a_machine_agree_where_they_must(size, ranks, alpha, rate, gamma):
    link = Link(latency_s=alpha, rate_bytes_per_s=rate)
    near = lambda value: pytest.approx(value, rel=1e-9, abs=1e-15)  # noqa: E731
    assert formulas.hierarchical_s(size, ranks, 1, FAST, link) == near(
        formulas.ring_s(size, ranks, link)
    )
    assert formulas.leaders_s(size, ranks, 1, FAST, link) == near(
        formulas.ring_s(size, ranks, link)
    )
    if ranks & (ranks - 1) == 0:  # the same bytes, in fewer messages
        saved_s = 2 * (ranks - 1 - math.log2(ranks)) * alpha
        assert formulas.halving_doubling_s(size, ranks, link, gamma) + saved_s == near(
            formulas.ring_s(size, ranks, link, gamma)
        )
    least_s = 2 * (ranks - 1) / ranks * size / rate
    assert formulas.ring_s(size, ranks, link) >= least_s * (1 - 1e-9) - 1e-15


def test_a_server_by_hand():
    # A worker computes for 6 s; its push is received in 2 s, applied in 1 s, answered in 2 s.
    cycle = ServerCycle(think_s=6, demands_s=(2, 1, 2))
    assert cycle.alone_s == 11
    assert cycle.knee == 5.5
    assert cycle.cycles_per_s(1) == formulas.Bounds(1 / 11, 1 / 11)
    assert cycle.cycles_per_s(4) == formulas.Bounds(4 / 26, 4 / 11)
    assert cycle.cycles_per_s(11) == formulas.Bounds(11 / 61, 1 / 2)  # the port is full
    assert 0.2 in cycle.cycles_per_s(4)
    assert 0.4 not in cycle.cycles_per_s(4)


@given(
    some.floats(0.01, 9),
    some.lists(some.floats(0.01, 3), min_size=1, max_size=3),
    some.integers(1, 40),
)
def test_the_mean_of_cycles_lies_within_their_bounds(think_s, demands_s, workers):
    cycle = ServerCycle(think_s=think_s, demands_s=tuple(demands_s))
    bounds, mean = cycle.cycles_per_s(workers), cycle.mean_cycles_per_s(workers)
    assert bounds.low * (1 - 1e-9) <= mean <= bounds.high * (1 + 1e-9)
    if workers == 1:
        assert mean == pytest.approx(bounds.high)


def test_two_workers_by_mean_value_analysis():
    # With one worker 1 / (3 + 1) cycles/s, so a quarter is queued; the second waits as much longer.
    cycle = ServerCycle(think_s=3, demands_s=(1,))
    assert cycle.mean_cycles_per_s(1) == 1 / 4
    assert cycle.mean_cycles_per_s(2) == 2 / (3 + 1.25)


def test_staleness_by_hand():
    assert formulas.mean_staleness(8) == 7
    # Two workers at one push a second and one at a half: 4 pushes of others for each of the slow
    # one, 1.5 for each of the others; the mean over pushes is that of equal workers.
    rates = [1.0, 1.0, 0.5]
    assert [staleness_of(rate, rates) for rate in rates] == [1.5, 1.5, 4.0]
    mean = sum(rate * staleness_of(rate, rates) for rate in rates) / sum(rates)
    assert mean == formulas.mean_staleness(3)


def test_layered_sgd_by_hand():
    step = StepParts(forward_s=1, backward_s=2, input_s=4, update_s=0.5, exchange_s=5)
    parts = LayeredParts(step=step, reduce_s=0.2, leaders_s=3, broadcast_s=0.3)
    assert parts.layered_s == 1 + 2 + 0.2 + 4 + 0.3 + 0.5
    assert parts.gain_s == 12.5 - 8
    # Without input only the smaller exchange is left.
    no_input = StepParts(forward_s=1, backward_s=2, update_s=0.5, exchange_s=5)
    parts = LayeredParts(step=no_input, reduce_s=0.2, leaders_s=3, broadcast_s=0.3)
    assert parts.gain_s == pytest.approx(5 - 3.5)


def test_formulas_need_no_torch():
    code = "import sys, syncline.perf.formulas; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
