"""Flows that share ports: cases by hand, and what must hold for any flows at all."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.virtual.clock import Clock
from syncline.virtual.link import Links, rounded


class World:
    """A clock and links; `ends` has (when, who) in the order in which flows ended."""

    def __init__(self, rates):
        self.clock = Clock()
        self.links = Links(self.clock, rates)
        self.ends = []

    def send(self, who, ports, num_bytes, at_s=0.0):
        self.clock.at(at_s, self.links.start, ports, num_bytes, lambda: self.end(who))

    def end(self, who):
        self.ends.append((self.clock.now_s, who))

    def run(self):
        self.clock.run()
        return self.ends


def approx(ends):
    return [(pytest.approx(time_s, rel=1e-12), who) for time_s, who in ends]


A, B, C, D = ("out", 0), ("out", 1), ("out", 2), ("in", 3)


@pytest.mark.parametrize("num_bytes", [1.0, 1e-3, 12345678.9, 1e15])
def test_a_lone_flow_takes_its_bytes_over_the_least_rate(num_bytes):
    world = World({A: 7.0, B: 3.0, C: 1e10})
    world.send("lone", [A, B, C], num_bytes)
    assert world.run() == [(rounded(num_bytes / 3.0), "lone")]


def test_one_after_the_other_lone_flows_add_up_exactly():
    world = World({A: 4.0, B: 8.0})
    ends = []

    def again():
        ends.append(world.clock.now_s)
        if len(ends) < 1000:
            world.links.start((A, B), 2.0, again)

    again()
    world.run()
    assert ends == [0.5 * number for number in range(1000)]
    assert world.links.carried == {A: 1998.0, B: 1998.0}


def test_three_equal_senders_to_one_receiver():
    # 10 B/s into the receiver, a third each; 3 times 20 B take 6 s.
    world = World({A: 10.0, B: 10.0, C: 10.0, D: 10.0})
    for who, port in [("a", A), ("b", B), ("c", C)]:
        world.send(who, [port, D], 20.0)
    assert world.run() == approx([(6.0, "a"), (6.0, "b"), (6.0, "c")])
    assert world.links.carried == {A: 20.0, B: 20.0, C: 20.0, D: 60.0}


def test_three_unequal_senders_to_one_receiver():
    # 12 B/s. A third each, 4 B/s, until a has its 8 B: 2 s; b has 16 left, c 24.
    # Half each, 6 B/s: b ends 16/6 s later; c has 8 left, and all 12 B/s: 8/12 s more.
    world = World({A: 100.0, B: 100.0, C: 100.0, D: 12.0})
    for who, port, num_bytes in [("c", C, 32.0), ("b", B, 24.0), ("a", A, 8.0)]:
        world.send(who, [port, D], num_bytes)
    assert world.run() == approx([(2.0, "a"), (2 + 16 / 6, "b"), (2 + 16 / 6 + 8 / 12, "c")])
    assert world.clock.now_s == world.ends[-1][0]


def test_one_comes_late():
    # Alone for 1 s: 10 of 30 B. Then 5 B/s each: b's 10 B take 2 s; a has 10 left: 1 s.
    world = World({A: 10.0})
    world.send("a", [A], 30.0)
    world.send("b", [A], 10.0, at_s=1.0)
    assert world.run() == approx([(3.0, "b"), (4.0, "a")])


def test_a_link_halves_its_rate_in_the_middle_of_a_message():
    # 30 of 100 B at 10 B/s in 3 s; 70 B at 5 B/s in 14 s.
    world = World({A: 10.0, B: 50.0})
    world.send("slowed", [A, B], 100.0)
    world.clock.at(3.0, world.links.set_rate, A, 5.0)
    assert world.run() == approx([(17.0, "slowed")])


def test_a_link_doubles_its_rate_until_another_port_is_the_least():
    # 30 of 100 B at 10 B/s in 3 s; then B is the least: 70 B at 14 B/s in 5 s.
    world = World({A: 10.0, B: 14.0})
    world.send("sped up", [A, B], 100.0)
    world.clock.at(3.0, world.links.set_rate, A, 20.0)
    assert world.run() == approx([(8.0, "sped up")])


def test_a_rate_changed_between_flows_holds_for_the_next():
    world = World({A: 10.0})
    world.send("before", [A], 10.0)
    world.clock.at(1.5, world.links.set_rate, A, 1.0)
    world.send("after", [A], 10.0, at_s=2.0)
    assert world.run() == approx([(1.0, "before"), (12.0, "after")])


def test_the_textbook_line_of_three_links():
    # A long flow through links of 6, 10 and 20 B/s, and a short one on each. Link A fills first:
    # 3 and 3. That leaves 7 on B and 17 on C. 21 B take 21/17, 3, 7 and 7 s.
    world = World({A: 6.0, B: 10.0, C: 20.0} | {("own", number): 1e9 for number in range(4)})
    for number, ports in enumerate([[A, B, C], [A], [B], [C]]):
        world.send(number, [*ports, ("own", number)], 21.0)
    rates = []
    world.clock.at(
        1.0, lambda: rates.extend(world.links.load(("own", number)) for number in range(4))
    )
    assert world.run() == approx([(21 / 17, 3), (3.0, 2), (7.0, 0), (7.0, 1)])
    assert rates == pytest.approx([3.0, 3.0, 7.0, 17.0])


def test_who_comes_may_speed_up_a_stranger():
    # "ab" and "b" have 5 B/s each of B's 10. Then three come to A, which falls to 4: "ab" has 1
    # and "b" rises to 9. After 1 s "b" has 45 of 50 B to go, which take 5 s.
    world = World({A: 5.0, B: 10.0})
    world.send("ab", [A, B], 1000.0)
    world.send("b", [B], 50.0)
    world.clock.at(1.0, world.links.set_rate, A, 4.0)
    for number in range(3):
        world.send(number, [A], 1000.0, at_s=1.0)
    assert approx(world.run()[:1]) == [(6.0, "b")]


def test_many_flows_on_the_same_ports_share_alike():
    world = World({A: 10.0, B: 20.0})
    for number in range(5):
        world.send(number, (A, B), 10.0 * (number + 1))
    # 5 x 10 B at 10 B/s: 5 s; then 4 x 10 B: 4 s; and so on.
    assert world.run() == approx([(5.0, 0), (9.0, 1), (12.0, 2), (14.0, 3), (15.0, 4)])


def test_many_flows_on_the_same_ports_leave_the_rest_to_others():
    # Two through A and B have 2 each of A's 4; the one on B alone has the other 6 of B's 10.
    world = World({A: 4.0, B: 10.0})
    for number in range(2):
        world.send(number, (A, B), 10.0)
    world.send("rest", (B,), 24.0)
    assert world.run() == approx([(4.0, "rest"), (5.0, 0), (5.0, 1)])


def test_ends_that_no_longer_hold_do_not_pile_up():
    world = World({D: 1.0} | {("out", number): 1.0 for number in range(100)})
    for number in range(100):
        world.send(number, [("out", number), D], 1.0 + number, at_s=number)
    most = []
    world.links.on_change = lambda: most.append(len(world.links._ends))
    assert len(world.run()) == 100
    assert max(most) < 64 + 3 * 100


def test_a_flow_is_not_touched_by_others_on_other_ports():
    world = World({A: 3.0, B: 7.0})
    world.send("long", [A], 1e6)
    for number in range(200):
        world.send(number, [B], 0.1, at_s=number * 0.013)
    assert world.run()[-1] == (1e6 / 3.0, "long")


def test_no_bytes_take_no_time_but_go_by_the_clock():
    world = World({A: 1.0})
    log = []
    world.links.start([A], 0.0, lambda: log.append(world.clock.now_s))
    assert log == []
    world.run()
    assert log == [0.0]


def test_what_is_under_way_counts_as_carried():
    world = World({A: 10.0, B: 40.0})
    world.send("one", [A, B], 100.0)
    seen = []
    world.clock.at(4.0, lambda: seen.append(world.links.carried))
    world.run()
    assert seen == [{A: 40.0, B: 40.0}]
    assert world.links.carried == {A: 100.0, B: 100.0}


def test_a_port_named_twice_is_one_port():
    world = World({A: 10.0})
    world.send("one", [A, A], 100.0)
    assert world.run() == [(10.0, "one")]
    assert world.links.carried == {A: 100.0}


PORTS = [("in", number) for number in range(5)]
times = st.one_of(st.integers(0, 5).map(float), st.floats(0, 5))
rates = st.one_of(st.integers(1, 4).map(float), st.floats(1e-3, 1e3))
flows = st.lists(
    st.tuples(
        times,
        st.lists(st.sampled_from(PORTS), min_size=1, max_size=5, unique=True),
        st.one_of(st.integers(0, 10).map(float), st.floats(1e-6, 1e4)),
    ),
    max_size=12,
)
changes = st.lists(st.tuples(times, st.sampled_from(PORTS), rates), max_size=6)


class Watched(World):
    """Every flow has a port of its own besides, which tells its rate and limits nothing."""

    def __init__(self, first, flows, changes):
        self.rates = dict(first)
        own = {("own", number): 1e9 for number in range(len(flows))}
        super().__init__(self.rates | own)
        self.links.on_change = self.look
        self.alive = {}
        self.sent_bytes = [0.0] * len(flows)
        self.since_s = 0.0
        self.now = {}
        for number, (at_s, ports, num_bytes) in enumerate(flows):
            self.clock.at(at_s, self.begin, number, ports, num_bytes)
        for at_s, port, rate in changes:
            self.clock.at(at_s, self.change, port, rate)

    def begin(self, number, ports, num_bytes):
        if num_bytes:
            self.alive[number] = ports
        self.links.start([*ports, ("own", number)], num_bytes, lambda: self.end(number))

    def end(self, number):
        self.alive.pop(number, None)
        super().end(number)

    def change(self, port, rate):
        self.rates[port] = rate
        self.links.set_rate(port, rate)

    def look(self):
        """Add up what was sent since the last look, and check the new rates."""
        now_s = self.clock.now_s
        for number, rate in self.now.items():
            self.sent_bytes[number] += rate * (now_s - self.since_s)
        self.since_s = now_s
        self.now = {number: self.links.load(("own", number)) for number in self.alive}
        users = {
            port: [number for number, ports in self.alive.items() if port in ports]
            for port in PORTS
        }
        for port in PORTS:
            load = sum(self.now[number] for number in users[port])
            assert load == pytest.approx(self.links.load(port))
            assert load <= self.rates[port] * (1 + 1e-9)
        for number, ports in self.alive.items():
            mine = self.now[number]
            fair = min(self.rates[port] / len(users[port]) for port in ports)
            assert mine >= fair * (1 - 1e-9), "starved"
            # Max-min fair: it meets a full port on which nobody has more.
            assert any(
                self.links.load(port) >= self.rates[port] * (1 - 1e-9)
                and mine >= max(self.now[other] for other in users[port]) * (1 - 1e-9)
                for port in ports
            )


@given(first=st.tuples(*[rates] * len(PORTS)), flows=flows, changes=changes)
def test_any_flows_share_fairly_and_all_bytes_arrive(first, flows, changes):
    first = dict(zip(PORTS, first, strict=True))
    world = Watched(first, flows, changes)
    ends = world.run()
    assert sorted(number for _, number in ends) == list(range(len(flows)))
    assert [time_s for time_s, _ in ends] == sorted(time_s for time_s, _ in ends)
    wanted_bytes = [num_bytes for _, _, num_bytes in flows]
    assert world.sent_bytes == pytest.approx(wanted_bytes, rel=1e-9, abs=1e-9)
    for port in PORTS:
        through = sum(num_bytes for _, ports, num_bytes in flows if port in ports)
        assert world.links.carried[port] == pytest.approx(through, rel=1e-12)
        assert world.links.load(port) == 0
    assert Watched(first, flows, changes).run() == ends, "not the same twice"


@given(first=st.tuples(*[rates] * len(PORTS)), flows=flows, changes=changes)
def test_ports_that_limit_nothing_change_nothing(first, flows, changes):
    first = dict(zip(PORTS, first, strict=True))
    world = World(first)
    for number, (at_s, ports, num_bytes) in enumerate(flows):
        world.send(number, ports, num_bytes, at_s)
    for at_s, port, rate in changes:
        world.clock.at(at_s, world.links.set_rate, port, rate)
    ends = {number: time_s for time_s, number in world.run()}
    watched = {number: time_s for time_s, number in Watched(first, flows, changes).run()}
    assert ends == pytest.approx(watched, rel=1e-9)


@given(flows=flows, looks_s=st.lists(times, min_size=2))
def test_carried_never_falls_and_never_outruns_a_port(flows, looks_s):
    world = Watched(dict.fromkeys(PORTS, 4.0), flows, [])
    seen = []
    for at_s in sorted(looks_s):
        world.clock.at(at_s, lambda: seen.append((world.clock.now_s, world.links.carried)))
    world.run()
    for (before_s, before), (after_s, after) in pairwise(seen):
        for port in PORTS:
            most = 4.0 * (after_s - before_s)
            assert -1e-9 <= after[port] - before[port] <= most + 1e-9
