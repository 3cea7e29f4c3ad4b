"""Fast links: the exact ones are their oracle, without slack to rounding, with slack on average."""

from __future__ import annotations

import random
import statistics
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.virtual.clock import Clock
from syncline.virtual.fast_link import FastLinks
from syncline.virtual.link import Links

A, B, C, D = ("out", 0), ("out", 1), ("out", 2), ("in", 3)


class World:
    """A clock and links; `ends` has (when, who) in the order in which flows ended."""

    def __init__(self, rates, kind=FastLinks, **options):
        self.clock = Clock()
        self.links = kind(self.clock, rates, **options)
        self.ends = []

    def send(self, who, ports, num_bytes, at_s=0.0):
        self.clock.at(at_s, self.links.start, ports, num_bytes, lambda: self.end(who))

    def end(self, who):
        self.ends.append((self.clock.now_s, who))

    def run(self):
        self.clock.run()
        return self.ends


def approx(ends):
    return [(pytest.approx(time_s, rel=1e-8), who) for time_s, who in ends]


def test_a_lone_flow_takes_its_bytes_over_the_least_rate():
    world = World({A: 7.0, B: 3.0, C: 1e10})
    world.send("lone", [A, B, C], 12345678.9)
    assert world.run() == approx([(12345678.9 / 3.0, "lone")])
    assert world.links.carried == {A: 12345678.9, B: 12345678.9, C: 12345678.9}


def test_one_comes_late_and_a_rate_changes():
    # Alone for 1 s: 10 of 30 B. Then 5 B/s each; from 2 s on 10 B/s each: b's last 5 B take 0.5 s.
    # Then a has 10 of 30 B left, at 20 B/s.
    world = World({A: 10.0})
    world.send("a", [A], 30.0)
    world.send("b", [A], 10.0, at_s=1.0)
    world.clock.at(2.0, world.links.set_rate, A, 20.0)
    assert world.run() == approx([(2.5, "b"), (3.0, "a")])


def test_a_flow_that_is_held_up_elsewhere_leaves_the_rest_to_others():
    # Both of A's flows have 2 B/s, so B has 8 left for the last one: 20 B in 2.5 s.
    world = World({A: 4.0, B: 10.0})
    world.send("a", [A], 20.0)
    world.send("ab", [A, B], 20.0)
    world.send("b", [B], 20.0)
    assert {who: time_s for time_s, who in world.run()} == pytest.approx(
        {"a": 10.0, "ab": 10.0, "b": 2.5}
    )


def test_no_bytes_take_no_time_but_go_by_the_clock():
    world = World({A: 1.0})
    log = []
    world.links.start([A], 0.0, lambda: log.append(world.clock.now_s))
    assert log == []
    world.run()
    assert log == [0.0]


def test_flows_of_a_block_begin_at_their_own_times_and_are_told_together():
    # A gives the first 10 B/s alone for 1 s, then 5 B/s each: both end 2 s later. B's has no bytes.
    world = World({A: 10.0, B: 1.0})
    told = []
    world.links.on_ends = lambda places, ends: told.extend(zip(places, ends, strict=True))
    world.links.first_wanted = lambda places, ends: float(ends[0])
    first, ample = world.links.take(3), world.links.ample
    ports = np.array([[0, 0, ample], [ample] * 3])
    starts_s = np.array([0.0, 1.0, 0.5])
    sizes = np.array([20.0, 10.0, 0.0])
    world.links.send(np.arange(3), ports, sizes, starts_s, world.links.no_stream)
    world.run()
    assert first == 0
    assert told == [(2, pytest.approx(0.5)), (0, pytest.approx(3.0)), (1, pytest.approx(3.0))]


def test_flows_of_a_stream_begin_one_after_the_other():
    # a and c share A for 2 s, 5 B/s each. Then b and c do, and c has 2 of 22 B left. d, without
    # bytes, comes after b; e, in no stream, at once.
    world = World({A: 10.0}, num_streams=2)
    start = world.links.start
    for who, num_bytes, stream in (("a", 10.0, 0), ("b", 10.0, 0), ("c", 22.0, 1), ("d", 0.0, 0)):
        world.clock.at(0.0, start, [A], num_bytes, partial(world.end, who), stream)
    world.send("e", [A], 0.0)
    assert world.run() == approx([(0.0, "e"), (2.0, "a"), (4.0, "b"), (4.0, "d"), (4.2, "c")])


PORTS = [("in", number) for number in range(5)]
times = st.one_of(st.integers(0, 5).map(float), st.floats(0, 5))
rates = st.one_of(st.integers(1, 4).map(float), st.floats(0.1, 100))
sizes = st.one_of(st.integers(0, 10).map(float), st.floats(1e-3, 1e3))
ports = st.lists(st.sampled_from(PORTS), min_size=1, max_size=5, unique=True)


@given(
    first=st.tuples(*[rates] * len(PORTS)),
    flows=st.lists(st.tuples(times, ports, sizes), max_size=12),
    changes=st.lists(st.tuples(times, st.sampled_from(PORTS), rates), max_size=2),
)
def test_without_slack_flows_end_as_on_exact_links(first, flows, changes):
    found = []
    for kind in (FastLinks, Links):
        world = World(dict(zip(PORTS, first, strict=True)), kind)
        for number, (at_s, ports, num_bytes) in enumerate(flows):
            world.send(number, ports, num_bytes, at_s)
        for at_s, port, rate in changes:
            world.clock.at(at_s, world.links.set_rate, port, rate)
        found.append(({who: time_s for time_s, who in world.run()}, world.links.carried))
    (fast, carried), (exact, exactly_carried) = found
    assert fast == pytest.approx(exact, rel=1e-6, abs=1e-6)
    assert carried == pytest.approx(exactly_carried, rel=1e-6)


@pytest.mark.parametrize("slack", [0.02, 0.05])
def test_with_slack_flows_end_as_on_exact_links_on_average(slack):
    draw, rates = random.Random(1), {("in", number): 1.0 + number % 3 for number in range(20)}
    flows = [
        (draw.sample(list(rates), 2), draw.uniform(1.0, 20.0), draw.uniform(0.0, 20.0))
        for _ in range(400)
    ]
    ends = []
    for kind, options in ((Links, {}), (FastLinks, {"slack": slack})):
        world = World(rates, kind, **options)
        for number, flow in enumerate(flows):
            world.send(number, *flow)
        ends.append([time_s for time_s, _ in world.run()])
    assert world.links.used_slack == slack
    exact, fast = ends
    assert fast[-1] == pytest.approx(exact[-1], rel=1e-3)
    assert statistics.mean(fast) == pytest.approx(statistics.mean(exact), rel=1e-3)
