"""Fast links: cases by hand, and what they have in common with the exact ones."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.virtual.clock import Clock
from syncline.virtual.fast_link import TOLERANCE, FastLinks
from syncline.virtual.link import Links

A, B, C, D = ("out", 0), ("out", 1), ("out", 2), ("in", 3)


class World:
    """A clock and links; `ends` has (when, who) in the order in which messages ended."""

    def __init__(self, rates, kind=FastLinks):
        self.clock = Clock()
        self.links = kind(self.clock, rates)
        self.ends = []

    def send(self, who, ports, num_bytes, at_s=0.0):
        self.clock.at(at_s, self.links.start, ports, num_bytes, lambda: self.end(who))

    def end(self, who):
        self.ends.append((self.clock.now_s, who))

    def run(self):
        self.clock.run()
        return self.ends


def approx(ends):
    return [(pytest.approx(time_s, rel=1e-9), who) for time_s, who in ends]


def test_a_lone_message_takes_its_bytes_over_the_least_rate():
    world = World({A: 7.0, B: 3.0, C: 1e10})
    world.send("lone", [A, B, C], 12345678.9)
    assert world.run() == [(12345678.9 / 3.0, "lone")]
    assert world.links.carried == {A: 12345678.9, B: 12345678.9, C: 12345678.9}


def test_three_unequal_senders_to_one_receiver():
    # As with exact links: 4 B/s each until a has 8 B, then 6 B/s each, then 12.
    world = World({A: 100.0, B: 100.0, C: 100.0, D: 12.0})
    for who, port, num_bytes in [("c", C, 32.0), ("b", B, 24.0), ("a", A, 8.0)]:
        world.send(who, [port, D], num_bytes)
    assert world.run() == approx([(2.0, "a"), (2 + 16 / 6, "b"), (2 + 16 / 6 + 8 / 12, "c")])


def test_one_comes_late_and_a_rate_changes():
    # Alone for 1 s: 10 of 30 B. Then 5 B/s each; from 2 s on 10 B/s each: b's last 5 B take 0.5 s.
    # Then a has 10 of 30 B left, at 20 B/s.
    world = World({A: 10.0})
    world.send("a", [A], 30.0)
    world.send("b", [A], 10.0, at_s=1.0)
    world.clock.at(2.0, world.links.set_rate, A, 20.0)
    assert world.run() == approx([(2.5, "b"), (3.0, "a")])


def test_each_port_serves_by_itself():
    # Where the models differ. Exact: both of A's messages have 2 B/s, so B has 8 left for the last
    # one: 20 B in 2.5 s. Here B gives each of its two 5 B/s until A's first message has 20 B, at
    # 4 s: the last one has its 20 B then, too.
    ends = {}
    for kind in (FastLinks, Links):
        world = World({A: 4.0, B: 10.0}, kind)
        world.send("a", [A], 20.0)
        world.send("ab", [A, B], 20.0)
        world.send("b", [B], 20.0)
        ends[kind] = {who: time_s for time_s, who in world.run()}
    assert ends[Links] == pytest.approx({"a": 10.0, "ab": 10.0, "b": 2.5})
    assert ends[FastLinks] == pytest.approx({"a": 10.0, "ab": 10.0, "b": 4.0})


def test_a_message_brings_each_port_its_own_bytes():
    # A serves 3 + 3 x 4 B as four equal messages of 3 B: all end when A has served 12 + 3 B.
    world = World({A: 5.0, B: 1.0, C: 100.0})
    route = world.links.route({A: (12.0, 4), B: (2.5, 1), C: (9.5, 3)})
    world.links.send(route, lambda: world.end("wide"))
    world.send("one", [A], 3.0)
    assert world.run() == approx([(3.0, "wide"), (3.0, "one")])
    assert world.links.carried == {A: 15.0, B: 2.5, C: 9.5}


def test_a_message_ends_with_its_last_port_whichever_that_is():
    # B seems to be the last at first. Then others come to A, and it is A.
    world = World({A: 10.0, B: 9.0})
    world.send("ab", [A, B], 90.0)
    world.send("a", [A], 300.0, at_s=1.0)
    # A has served 10 B in 1 s, then gives 5 B/s: 80 B take 16 s.
    assert world.run()[0] == (pytest.approx(17.0), "ab")


def test_messages_that_end_nearly_together_end_together():
    world = World({A: 1.0, B: 1.0})
    world.send("a", [A], 1.0)
    world.send("b", [B], 1.0 + TOLERANCE / 2)
    world.send("late", [B], 1.0, at_s=5.0)
    (a_s, _), (b_s, _), (late_s, _) = world.run()
    assert a_s == b_s == 1.0
    assert late_s == 6.0


def test_no_bytes_take_no_time_but_go_by_the_clock():
    world = World({A: 1.0})
    log = []
    world.links.start([A], 0.0, lambda: log.append(world.clock.now_s))
    assert log == []
    world.run()
    assert log == [0.0]


PORTS = [("in", number) for number in range(5)]
times = st.one_of(st.integers(0, 5).map(float), st.floats(0, 5))
rates = st.one_of(st.integers(1, 4).map(float), st.floats(0.1, 100))
sizes = st.one_of(st.integers(0, 10).map(float), st.floats(1e-3, 1e3))


def messages(max_ports):
    ports = st.lists(st.sampled_from(PORTS), min_size=1, max_size=max_ports, unique=True)
    return st.lists(st.tuples(times, ports, sizes), max_size=12)


def run_both(first, messages):
    found = []
    for kind in (FastLinks, Links, FastLinks):
        world = World(dict(zip(PORTS, first, strict=True)), kind)
        for number, (at_s, ports, num_bytes) in enumerate(messages):
            world.send(number, ports, num_bytes, at_s)
        found.append((world.run(), world.links.carried))
    fast, exact, again = found
    assert again == fast, "not the same twice"
    return fast, exact


@given(first=st.tuples(*[rates] * len(PORTS)), messages=messages(1))
def test_with_one_port_for_each_message_both_models_are_one(first, messages):
    (fast, carried), (exact, exactly_carried) = run_both(first, messages)
    ends = {number: time_s for time_s, number in exact}
    assert carried == pytest.approx(exactly_carried, rel=1e-9)
    for time_s, number in fast:
        took_s = ends[number] - messages[number][0]
        # One message may be early by the tolerance, and by that of each one before it.
        assert time_s == pytest.approx(ends[number], abs=13 * TOLERANCE * took_s + 1e-9, rel=1e-9)


@given(first=st.tuples(*[rates] * len(PORTS)), messages=messages(5))
def test_all_bytes_arrive_and_no_port_is_outrun(first, messages):
    (fast, carried), (_, exactly_carried) = run_both(first, messages)
    assert sorted(number for _, number in fast) == list(range(len(messages)))
    assert [time_s for time_s, _ in fast] == sorted(time_s for time_s, _ in fast)
    assert carried == pytest.approx(exactly_carried, rel=1e-9)
    of = dict(zip(PORTS, first, strict=True))
    for time_s, number in fast:
        at_s, ports, num_bytes = messages[number]
        least_s = max(num_bytes / of[port] for port in ports)
        assert time_s - at_s >= least_s * (1 - TOLERANCE) - 1e-9
