"""Synchronous strategies on the virtual clock take the time that their formulas say.

Sources: Shi et al. 2018 (arXiv 1805.03812) for one all-reduce and for wait-free backpropagation,
Shi et al. 2019 (arXiv 1811.11141) for merging, and the usual model of a parameter server: n workers
send S bytes through the servers' ports, twice. Every step has one meeting more than the formulas:
that of the flags.
"""

from __future__ import annotations

import random

import pytest

from syncline.comm.cost import plan
from syncline.perf.formulas import wait_free
from syncline.sim.run import simulate
from syncline.strategies import Merged, MergedSettings, SyncServer, SyncServerSettings
from syncline.strategies.merged import MergedLayers
from worlds import cluster, workload

RATE = 1e6
BLOCK_BYTES = 4096
WITHIN = 0.005
every_seed = pytest.mark.parametrize("seed", range(8))


def draw_case(seed, ranks=(2, 3, 8)):
    draw = random.Random(seed)
    num_ranks = draw.choice(ranks)
    layers = [
        (num_ranks * BLOCK_BYTES * draw.randint(1, 50), draw.random(), draw.random())
        for _ in range(draw.randint(1, 12))
    ]
    return layers, num_ranks, draw.random() * 0.01


def seconds(what, size_bytes, machines, latency_s):
    found = plan(what, size_bytes, machines=machines, ranks_per_machine=1)
    return sum(phase.rounds * latency_s + phase.num_bytes / RATE for phase in found)


def flags_s(layers, ranks, latency_s, more=0):
    """Return the time of the meeting in which ranks tell each other four numbers and more."""
    element_bytes = 8 if more else 4
    num_bytes = element_bytes * (len(layers) + 4 + ranks + more)
    return seconds("all_reduce", num_bytes, ranks, latency_s)


def step_s(layers, ranks, latency_s, strategy, **more):
    links = cluster(ranks, rate=RATE, latency_s=latency_s, **more)
    return simulate(workload(*layers), links, strategy, steps=4).step_s


def wait_free_s(layers, exchange_s):
    """Return when the first layer's exchange ends, after forward and backward."""
    times_s = [exchange_s(size) if size else 0.0 for size, _, _ in layers]
    found = wait_free([backward_s for _, _, backward_s in layers], times_s)
    return sum(forward_s for _, forward_s, _ in layers) + found.ends_s[0]


@every_seed
def test_one_all_reduce_after_backward(seed):
    layers, ranks, latency_s = draw_case(seed)
    size_bytes = sum(layer[0] for layer in layers)
    compute_s = sum(layer[1] + layer[2] for layer in layers)
    update_s = size_bytes / 3e6
    expected = compute_s + seconds("all_reduce", size_bytes, ranks, latency_s) + update_s
    found = step_s(layers, ranks, latency_s, "all_reduce", update_bytes_per_s=3e6)
    assert found - flags_s(layers, ranks, latency_s) == pytest.approx(expected, rel=WITHIN)


@every_seed
def test_wait_free_backpropagation(seed):
    layers, ranks, latency_s = draw_case(seed)
    expected = wait_free_s(layers, lambda size: seconds("all_reduce", size, ranks, latency_s))
    found = step_s(layers, ranks, latency_s, "wait_free")
    assert found - flags_s(layers, ranks, latency_s) == pytest.approx(expected, rel=WITHIN)


@every_seed
def test_merged_layers(seed):
    layers, ranks, latency_s = draw_case(seed)
    rule = MergedLayers(2 * latency_s, 2 * (ranks - 1) / ranks / RATE)
    starts = rule.merge([layer[0] for layer in layers], [layer[2] for layer in layers])
    merged = []
    for start, end in zip(starts, [*starts[1:], len(layers)], strict=True):
        merged += [(sum(layer[0] for layer in layers[start:end]), *layers[start][1:])]
        merged += [(0, *layer[1:]) for layer in layers[start + 1 : end]]
    expected = wait_free_s(merged, lambda size: seconds("all_reduce", size, ranks, latency_s))
    settings = MergedSettings(latency_s=latency_s, rate_bytes_per_s=RATE)
    found = step_s(layers, ranks, latency_s, lambda: Merged(settings))
    assert found - flags_s(layers, ranks, latency_s) == pytest.approx(expected, rel=WITHIN)
    assert found <= step_s(layers, ranks, latency_s, "wait_free") * (1 + 1e-9)


def test_merging_worked_out_by_hand():
    # A message takes 1 s and a second for each byte; backward takes 2 s for each of three layers.
    rule = MergedLayers(startup_s=1.0, byte_s=1.0)
    # The last layer's exchange is over (3 s) before the next is ready (4 s): nothing waits.
    assert rule.merge([0.5, 0.5, 0.5], [2.0, 2.0, 2.0]) == [0, 1, 2]
    # It lasts from 2 to 7 s. Layer 1 is ready at 4 s, more than a start-up later: sent alone. Its
    # own exchange could begin at 7 s, when layer 0 has been ready since 6 s: both go together.
    assert rule.merge([0.5, 0.5, 4.0], [2.0, 2.0, 2.0]) == [0, 2]
    # Backward of layer 1 takes less than a start-up: layer 2 waits for it.
    assert rule.merge([0.5, 0.5, 4.0], [9.0, 0.5, 2.0]) == [0, 1]
    assert rule.merge([1.0], [1.0]) == [0]


@every_seed
def test_a_synchronous_server_on_all_ranks(seed):
    """With nothing to hide behind: every layer is pushed, then every layer is pulled."""
    layers, ranks, latency_s = draw_case(seed)
    idle = [(size, 0.0, 0.0) for size, _, _ in layers]
    size_bytes = sum(layer[0] for layer in layers)
    expected = 2 * (ranks - 1) / ranks * size_bytes / RATE + 2 * len(layers) * latency_s
    found = step_s(idle, ranks, latency_s, "sync_server")
    assert found - flags_s(idle, ranks, latency_s) == pytest.approx(expected, rel=WITHIN)


@every_seed
def test_one_dedicated_synchronous_server(seed):
    """n workers push and pull S bytes each through one port, 2 n S / rate."""
    layers, workers, latency_s = draw_case(seed)
    idle = [(size, 0.0, 0.0) for size, _, _ in layers]
    size_bytes = sum(layer[0] for layer in layers)
    expected = 2 * workers * size_bytes / RATE + 2 * len(layers) * latency_s
    make = lambda: SyncServer(SyncServerSettings(servers=1))  # noqa: E731
    found = step_s(idle, workers + 1, latency_s, make)
    meeting_s = seconds("all_reduce", 4 * (len(idle) + 4 + workers), workers + 1, latency_s)
    assert found - meeting_s == pytest.approx(expected, rel=WITHIN)
