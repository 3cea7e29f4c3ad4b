"""The simulator against closed formulas (`perf/formulas.py`), beyond tests/strategies.

There: one all-reduce, wait-free backpropagation, merging and synchronous servers. Here: input and
update of S-SGD, machines with several ranks, the asynchronous server, layered SGD. A step of ranks
that meet has one meeting more than the formulas: that of the flags.
"""

from __future__ import annotations

import dataclasses
import random

import pytest

from syncline.cluster import Link
from syncline.comm.cost import plan
from syncline.comm.cost import seconds as seconds_of
from syncline.faults import Conditions, Jitter
from syncline.perf.formulas import (
    LayeredParts,
    ServerCycle,
    StepParts,
    hierarchical_s,
    mean_staleness,
    ring_s,
    staleness_of,
    wait_free,
)
from syncline.sim.run import simulate
from syncline.strategies import Layered, LayeredSettings, Server, ServerSettings
from worlds import cluster, workload

RATE, LATENCY_S = 1e6, 1e-3
LINK = Link(latency_s=LATENCY_S, rate_bytes_per_s=RATE)
UPDATE_RATE = 4e6
WITHIN = 0.005
every_seed = pytest.mark.parametrize("seed", range(4))
input_is_ahead = pytest.mark.parametrize("is_ahead", [False, True])


def draw_layers(seed, ranks):
    draw = random.Random(seed)
    return [
        (ranks * 4096 * draw.randint(1, 40), draw.random(), draw.random())
        for _ in range(draw.randint(1, 8))
    ]


def flags_s(layers, machines, per_machine=1, inside=LINK):
    """Return the time of the meeting in which ranks tell each other some numbers."""
    num_bytes = 4 * (len(layers) + 4 + machines * per_machine)
    found = plan("all_reduce", num_bytes, machines=machines, ranks_per_machine=per_machine)
    return seconds_of(found, inside=inside, across=LINK)


def parts_of(layers, exchange_s, input_s=0.0):
    return StepParts(
        forward_s=sum(layer[1] for layer in layers),
        backward_s=sum(layer[2] for layer in layers),
        input_s=input_s,
        update_s=sum(layer[0] for layer in layers) / UPDATE_RATE,
        exchange_s=exchange_s,
    )


def step_s(
    layers, ranks, strategy, *, is_ahead=False, input_s=0.0, update_rate=UPDATE_RATE, **more
):
    links = cluster(ranks, rate=RATE, latency_s=LATENCY_S, update_bytes_per_s=update_rate)
    work = workload(*layers, input_s=input_s)
    options = {"steps": 12 if is_ahead else 3, "prefetch": 2 if is_ahead else 0} | more
    return simulate(work, links, strategy, **options).step_s


@every_seed
@input_is_ahead
def test_one_rank_alone(seed, is_ahead):
    layers = draw_layers(seed, 1)
    input_s = random.Random(seed).choice([0.3, 20.0])
    expected = parts_of(layers, 0.0, input_s)
    found = step_s(layers, 1, "all_reduce", is_ahead=is_ahead, input_s=input_s)
    wanted_s = expected.input_ahead_s if is_ahead else expected.alone_s
    assert found == pytest.approx(wanted_s, rel=1e-6)


@every_seed
@input_is_ahead
def test_s_sgd_with_one_all_reduce_and_input(seed, is_ahead):
    layers, ranks = draw_layers(seed, 4), 4
    size_bytes = sum(layer[0] for layer in layers)
    exchange_s = ring_s(size_bytes, ranks, LINK) + flags_s(layers, ranks)
    expected = parts_of(layers, exchange_s, 0.7 if seed % 2 else 15.0)
    found = step_s(
        layers, ranks, "all_reduce", is_ahead=is_ahead, input_s=expected.input_s, algorithm="ring"
    )
    wanted_s = expected.input_ahead_s if is_ahead else expected.in_line_s
    assert found == pytest.approx(wanted_s, rel=WITHIN)


@every_seed
def test_wait_free_backpropagation_with_input_ahead(seed):
    layers, ranks = draw_layers(seed, 4), 4
    times_s = [ring_s(layer[0], ranks, LINK) for layer in layers]
    exposed_s = wait_free([layer[2] for layer in layers], times_s).exposed_s
    expected = parts_of(layers, exposed_s + flags_s(layers, ranks), 0.7 if seed % 2 else 15.0)
    without = dataclasses.replace(expected, update_s=0.0)
    options = {"is_ahead": True, "input_s": expected.input_s, "algorithm": "ring"}
    found = step_s(layers, ranks, "wait_free", update_rate=float("inf"), **options)
    assert found == pytest.approx(without.input_ahead_s, rel=WITHIN)
    # Updates of all layers but the first hide behind forward, which the formula leaves out.
    found = step_s(layers, ranks, "wait_free", **options)
    assert without.input_ahead_s * (1 - WITHIN) < found < expected.input_ahead_s * (1 + WITHIN)


@pytest.mark.parametrize(("machines", "per_machine"), [(2, 2), (4, 2), (2, 4), (8, 2), (1, 4)])
def test_one_all_reduce_of_machines_with_several_ranks(machines, per_machine):
    inside = Link(latency_s=1e-4, rate_bytes_per_s=5e6)
    ranks = machines * per_machine  # powers of two: each machine then has one sum to send
    layers = [(ranks * 40960, 0.25, 0.5)]
    links = cluster(ranks, per_machine, network=LINK, inside=inside)
    found = simulate(workload(*layers), links, "all_reduce", steps=3).step_s
    size_bytes = layers[0][0]
    expected_s = hierarchical_s(size_bytes, machines, per_machine, inside, LINK, "direct")
    told_s = flags_s(layers, machines, per_machine, inside)
    assert found == pytest.approx(0.75 + expected_s + told_s, rel=WITHIN)


# -- the asynchronous server -----------------------------------------------------------------------

SIZE_BYTES = 65536


def serve(workers, compute_s, *, steps=40, update_rate=float("inf"), slow=None, sigma=0.0):
    """Run workers and one dedicated server; also return a worker's cycle."""
    links = cluster(workers + 1, rate=RATE, latency_s=LATENCY_S, update_bytes_per_s=update_rate)
    found = simulate(
        workload((SIZE_BYTES, compute_s / 2, compute_s / 2)),
        links,
        lambda: Server(ServerSettings(servers=1, early=False)),
        steps=steps,
        conditions=Conditions(
            slow_ranks=slow or {}, jitter=Jitter(kind="lognormal" if sigma else "none", sigma=sigma)
        ),
    )
    wire_s = SIZE_BYTES / RATE
    # The owner reads the push, updates, and writes the answer: three passes.
    serve_s = 3 * SIZE_BYTES / update_rate
    demands_s = (wire_s, serve_s, wire_s) if serve_s else (wire_s, wire_s)
    return found, ServerCycle(think_s=compute_s + 2 * LATENCY_S, demands_s=demands_s)


@pytest.mark.parametrize("update_rate", [float("inf"), 6e6, 1e6])
@pytest.mark.parametrize(("workers", "sigma"), [(1, 0.0), (4, 0.0), (8, 0.0), (4, 0.5), (12, 0.5)])
def test_an_asynchronous_server_s_throughput_lies_within_the_bounds(workers, sigma, update_rate):
    found, cycle = serve(workers, 0.5, update_rate=update_rate, sigma=sigma)
    bounds = cycle.cycles_per_s(workers)
    assert bounds.low * 0.99 <= found.samples_per_s <= bounds.high * 1.02
    if workers > 1.5 * cycle.knee:
        assert found.samples_per_s == pytest.approx(1 / max(cycle.demands_s), rel=0.02)


def test_both_bounds_are_reached():
    one, cycle = serve(1, 0.5)
    assert one.samples_per_s == pytest.approx(cycle.cycles_per_s(1).high, rel=1e-3)
    # Equal workers begin together, share the port, and so end together, for ever: the worst case.
    four, cycle = serve(4, 0.5)
    assert four.samples_per_s == pytest.approx(cycle.cycles_per_s(4).low, rel=1e-3)


@pytest.mark.parametrize(("workers", "steps"), [(2, 80), (4, 60), (8, 40), (12, 40), (18, 60)])
def test_workers_whose_compute_varies_are_as_fast_as_mean_value_analysis_says(workers, steps):
    """On both sides of the knee, at 9.7 workers; a port shares its rate, so it is exact."""
    found, cycle = serve(workers, 0.5, steps=steps, sigma=0.5)
    assert 9 < cycle.knee < 10
    assert found.samples_per_s == pytest.approx(cycle.mean_cycles_per_s(workers), rel=0.03)


@pytest.mark.parametrize("workers", [2, 5, 10])
def test_the_mean_staleness_of_equal_workers_is_that_of_all_others(workers):
    found, _ = serve(workers, 0.5, steps=60)
    assert found.strategy["mean_staleness"] == pytest.approx(mean_staleness(workers), rel=0.05)


def test_a_slow_worker_s_pushes_are_as_stale_as_its_peers_are_faster():
    # The figures of a run are rank 0's.
    found, _ = serve(4, 0.5, steps=60, slow={0: 3.0})
    wire_s = 2 * SIZE_BYTES / RATE + 2 * LATENCY_S
    slow, fast = 1 / (1.5 + wire_s), 1 / (0.5 + wire_s)
    # When the fast ones have taken their 60 steps, the slow one goes on alone.
    together = round(60 * slow / fast)
    stale = staleness_of(slow, [slow, *[fast] * 3]) * together / 60
    assert found.strategy["mean_staleness"] == pytest.approx(stale, rel=0.08)


# -- layered SGD -----------------------------------------------------------------------------------

EXCHANGE_S = 2 * 3 / 4 * 2 * 409600 / RATE  # of four leaders


def layered_s(input_s, inside):
    """Return the step of layered SGD as published, on 4 machines with 2 ranks, and its exchange."""
    layers = [(2 * 409600, 0.5, 1.0)]
    links = cluster(8, 2, network=Link(latency_s=0.0, rate_bytes_per_s=RATE), inside=inside)
    make = lambda: Layered(LayeredSettings(as_published=True))  # noqa: E731
    return simulate(workload(*layers, input_s=input_s), links, make, steps=4).step_s


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0, 2.0])
def test_layered_sgd_hides_the_leaders_exchange_behind_loading(share):
    input_s = share * EXCHANGE_S
    step = StepParts(forward_s=0.5, backward_s=1.0, input_s=input_s, exchange_s=EXCHANGE_S)
    parts = LayeredParts(step=step, reduce_s=0.0, leaders_s=EXCHANGE_S, broadcast_s=0.0)
    found = layered_s(input_s, Link(latency_s=0.0, rate_bytes_per_s=1e12))
    assert found == pytest.approx(parts.layered_s, rel=WITHIN)
    assert step.in_line_s - found == pytest.approx(min(EXCHANGE_S, input_s), abs=WITHIN * found)


@pytest.mark.parametrize("share", [0.0, 0.5, 2.0])
def test_exchanges_inside_groups_are_hidden_too_unlike_in_the_published_formula(share):
    """The compute lane loads from the end of backward on, so C + max(I, reduce + W + broadcast)."""
    inside = Link(latency_s=0.0, rate_bytes_per_s=4e6)
    inside_s = layered_s(0.0, inside) - layered_s(0.0, Link(latency_s=0.0, rate_bytes_per_s=1e12))
    assert inside_s > 0.1
    input_s = share * EXCHANGE_S
    step = StepParts(forward_s=0.5, backward_s=1.0, input_s=input_s, exchange_s=EXCHANGE_S)
    parts = LayeredParts(step=step, reduce_s=inside_s, leaders_s=EXCHANGE_S, broadcast_s=0.0)
    found = layered_s(input_s, inside)
    assert found == pytest.approx(1.5 + max(input_s, EXCHANGE_S + inside_s), rel=WITHIN)
    assert found <= parts.layered_s * (1 + WITHIN)
