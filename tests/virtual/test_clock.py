"""The virtual clock: order, sleep, signals, killing, and who is to blame when all wait."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.errors import DeadlockError
from syncline.virtual.clock import Clock, Signal


def test_calls_run_in_the_order_of_time_and_ties_in_the_order_asked():
    clock, log = Clock(), []
    clock.after(2.0, log.append, "late")
    clock.after(1.0, log.append, "first")
    clock.at(1.0, log.append, "second")
    clock.at(0.0, log.append, "now")
    assert log == []
    clock.run()
    assert log == ["now", "first", "second", "late"]
    assert clock.now_s == 2.0


def test_what_is_asked_for_at_the_present_time_comes_after_what_was_asked_before():
    clock, log = Clock(), []

    def ask():
        log.append("asks")
        clock.after(0.0, log.append, "asked last")

    clock.at(1.0, ask)
    clock.at(1.0, log.append, "asked before")
    clock.run()
    assert log == ["asks", "asked before", "asked last"]


def test_the_past_is_refused():
    clock, caught = Clock(), []

    def too_late():
        with pytest.raises(ValueError, match=r"1\.0 s has passed: it is 3\.0 s") as error:
            clock.at(1.0, print)
        caught.append(error)

    clock.at(3.0, too_late)
    clock.run()
    assert caught
    with pytest.raises(ValueError, match="has passed"):
        clock.after(-1e-9, print)


@given(delays_s=st.lists(st.lists(st.floats(0, 10), max_size=5), max_size=5))
def test_time_never_runs_backwards_and_every_sleep_has_its_length(delays_s):
    clock, log = Clock(), []

    def body(number, sleeps_s):
        for sleep_s in sleeps_s:
            before_s = clock.now_s
            clock.sleep(sleep_s)
            assert clock.now_s == before_s + sleep_s
            log.append((clock.now_s, number))

    for number, sleeps_s in enumerate(delays_s):
        clock.spawn(f"process {number}", body, number, sleeps_s)
    clock.run()
    assert len(log) == sum(len(sleeps_s) for sleeps_s in delays_s)
    assert [time_s for time_s, _ in log] == sorted(time_s for time_s, _ in log)


def test_processes_take_turns():
    clock, log = Clock(), []

    def body(name, step_s):
        for step in range(3):
            log.append((clock.now_s, name, step))
            clock.sleep(step_s)

    clock.spawn("quick", body, "quick", 1.0)
    clock.spawn("slow", body, "slow", 2.0)
    clock.run()
    assert log == [
        (0.0, "quick", 0),
        (0.0, "slow", 0),
        (1.0, "quick", 1),
        (2.0, "slow", 1),  # asked for at 0 s; quick asked at 1 s
        (2.0, "quick", 2),
        (4.0, "slow", 2),
    ]
    assert clock.now_s == 6.0


def test_a_process_begins_when_the_clock_runs_not_when_it_is_made():
    clock, log = Clock(), []
    clock.at(0.0, log.append, "asked before")
    clock.spawn("process", log.append, "process")
    assert log == []
    clock.run()
    assert log == ["asked before", "process"]


def test_a_signal_wakes_all_who_wait_in_the_order_in_which_they_came():
    clock, log = Clock(), []
    ready = Signal(clock)

    def body(name):
        ready.wait(lambda: "the signal")
        log.append((clock.now_s, name))

    for name in ("a", "b", "c"):
        clock.spawn(name, body, name)
    clock.at(5.0, ready.set)
    clock.at(5.0, log.append, "asked before the signal was set")
    clock.run()
    assert log == ["asked before the signal was set", (5.0, "a"), (5.0, "b"), (5.0, "c")]
    assert ready.is_set


def test_what_has_happened_is_not_waited_for():
    clock, log = Clock(), []
    ready = Signal(clock)
    ready.set()

    def body():
        ready.wait(lambda: "the signal")
        log.append(clock.now_s)

    clock.at(2.0, clock.spawn, "late", body)
    clock.run()
    assert log == [2.0]


def test_who_is_killed_does_not_go_on():
    clock, log = Clock(), []
    never = Signal(clock)

    def sleep():
        clock.sleep(2.0)
        log.append("slept")

    def wait():
        never.wait(lambda: "what never comes")
        log.append("waited")

    victims = [clock.spawn("sleeps", sleep), clock.spawn("waits", wait)]

    def kill():
        for victim in victims:
            clock.kill(victim)
        log.append("killed")

    clock.at(1.0, kill)
    clock.at(3.0, never.set)
    clock.run()
    assert log == ["killed"]


def test_who_is_killed_before_it_began_never_begins():
    clock, log = Clock(), []
    clock.kill(clock.spawn("unborn", log.append, "lives"))
    clock.run()
    assert log == []


def test_the_dead_can_be_killed_again():
    clock = Clock()
    process = clock.spawn("short", lambda: None)
    clock.run()
    clock.kill(process)
    clock.run()


def test_who_kills_itself_ends_like_any_other():
    clock, log = Clock(), []

    def body():
        clock.kill(mine)
        log.append("last words")

    mine = clock.spawn("tired", body)
    clock.spawn("other", log.append, "lives on")
    clock.run()
    assert log == ["last words", "lives on"]


def test_a_deadlock_names_who_waits_for_what():
    clock = Clock()
    never = Signal(clock)

    def body(name):
        clock.sleep(1.5)
        never.wait(lambda: f"{name} waits for a friend")

    clock.spawn("rank 0", body, "zero")
    clock.spawn("rank 1", body, "one")
    clock.spawn("rank 2", clock.sleep, 4.0)
    with pytest.raises(DeadlockError) as caught:
        clock.run()
    assert caught.value.waiting == [
        "rank 0: zero waits for a friend",
        "rank 1: one waits for a friend",
    ]
    assert "nothing can happen after 4 s" in str(caught.value)
    assert "rank 1: one waits for a friend" in str(caught.value)


def test_the_reason_is_asked_for_at_the_end_not_when_the_wait_began():
    clock, missing = Clock(), {1, 2}
    never = Signal(clock)
    clock.spawn("rank 0", never.wait, lambda: f"ranks {sorted(missing)}")
    clock.at(1.0, missing.discard, 1)
    with pytest.raises(DeadlockError, match=r"rank 0: ranks \[2\]"):
        clock.run()


def test_a_failing_process_is_heard_by_whoever_runs_the_clock():
    clock = Clock()

    def fail():
        clock.sleep(1.0)
        raise ZeroDivisionError("rank 3 divided")

    clock.spawn("rank 3", fail)
    with pytest.raises(ZeroDivisionError, match="rank 3 divided"):
        clock.run()
    assert clock.now_s == 1.0


def test_a_process_made_by_another_ends_without_waking_its_maker():
    clock, log = Clock(), []

    def child():
        clock.sleep(1.0)
        log.append((clock.now_s, "child"))

    def parent():
        clock.spawn("child", child)
        clock.sleep(10.0)
        log.append((clock.now_s, "parent"))

    clock.spawn("parent", parent)
    clock.run()
    assert log == [(1.0, "child"), (10.0, "parent")]


def test_a_process_made_by_another_fails_to_whoever_runs_the_clock():
    clock, log = Clock(), []

    def child():
        raise ZeroDivisionError("child divided")

    def parent():
        clock.spawn("child", child)
        try:
            clock.sleep(10.0)
        except ZeroDivisionError:
            log.append("the parent heard it")

    clock.spawn("parent", parent)
    with pytest.raises(ZeroDivisionError, match="child divided"):
        clock.run()
    assert log == []
