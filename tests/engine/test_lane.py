"""The comm lane: order, failure, and what it must not touch."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from syncline.engine.lane import Lane


@pytest.mark.parametrize("has_thread", [True, False])
def test_work_runs_in_the_order_in_which_it_was_submitted(has_thread):
    lane, log = Lane(), []
    if has_thread:
        lane.start_thread()
    for number in range(50):
        lane.submit(log.append, number)
    lane.drain()
    assert log == list(range(50))
    lane.close()


def test_without_a_thread_the_caller_does_the_work_at_once():
    lane, where = Lane(), []
    lane.submit(lambda: where.append((threading.current_thread(), lane.hub.channel)), channel=3)
    assert where == [(threading.current_thread(), 3)]
    assert lane.hub.channel == 0
    lane.drain()
    assert len(where) == 1


def test_with_a_thread_the_caller_goes_on():
    lane, gate, where = Lane(), threading.Event(), []
    lane.start_thread()
    lane.submit(gate.wait, 10)
    lane.submit(lambda: where.append(threading.current_thread()))
    assert where == []
    gate.set()
    lane.drain()
    assert where
    assert where != [threading.current_thread()]
    lane.close()


@pytest.mark.parametrize("has_thread", [True, False])
def test_a_failure_wakes_whoever_waits_and_stops_what_follows(has_thread):
    lane, log = Lane(), []
    if has_thread:
        lane.start_thread()
    lane.wake_on_failure(lambda: log.append("woken"))

    def fail():
        raise ValueError("broken")

    def use():
        lane.submit(fail)
        lane.submit(log.append, "after")
        lane.drain()

    for _ in range(2):
        with pytest.raises(ValueError, match="broken"):
            use()
    assert "after" not in log
    assert log[0] == "woken"
    with pytest.raises(ValueError, match="broken"):
        lane.check()


def test_a_peer_s_failure_wakes_a_caller_whose_lane_is_stuck():
    lane = Lane()
    lane.start_thread()
    gate = threading.Event()
    lane.submit(gate.wait, 20)
    threading.Timer(0.1, lane.fail, (RuntimeError("rank 3 died"),)).start()
    started = time.monotonic()
    with pytest.raises(RuntimeError, match="rank 3 died"):
        lane.drain()
    assert time.monotonic() - started < 5
    gate.set()


def test_the_lane_leaves_the_number_of_threads_of_the_caller_alone():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        lane, found = Lane(), []
        lane.start_thread()
        lane.submit(lambda: found.append(torch.get_num_threads()))
        lane.drain()
        assert found == [1]
        assert torch.get_num_threads() == 2
        lane.close()
    finally:
        torch.set_num_threads(before)


def test_work_that_waits_holds_up_its_own_channel_only():
    lane, log, gates = Lane(), [], {1: False, 2: False}
    lane.start_thread()

    def wait(channel):
        lane.until(lambda: gates[channel])
        log.append(channel)

    lane.submit(wait, 1, channel=1)
    lane.submit(log.append, "behind 1", channel=1)
    lane.submit(wait, 2, channel=2)
    lane.submit(log.append, "behind 2", channel=2)
    lane.submit(log.append, "free", channel=3)
    lane.submit(log.append, "last")  # alone: after everything before it
    lane.submit(log.append, "after all", channel=3)
    deadline = time.monotonic() + 5
    while log != ["free"] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert log == ["free"]
    gates[2] = True
    lane.hub.wake()
    while len(log) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert log == ["free", 2, "behind 2"]
    gates[1] = True
    lane.hub.wake()
    lane.drain()
    assert log == ["free", 2, "behind 2", 1, "behind 1", "last", "after all"]
    lane.close()


def test_the_most_urgent_goes_on_first_and_what_waits_for_another_hook_sees_it_at_once():
    lane, log, gate = Lane(), [], []
    lane.start_thread()

    def wait(name, condition):
        lane.until(condition)
        log.append((name, lane.hub.urgency))

    lane.submit(wait, "patient", lambda: gate, channel=1, urgency=9)
    lane.submit(wait, "urgent", lambda: gate, channel=2, urgency=1)
    lane.submit(wait, "first", lambda: ("urgent", 1) in log, channel=3, urgency=0)
    while len(lane._flying) < 3:
        time.sleep(0.01)
    gate.append(True)
    lane.hub.wake()
    lane.drain()
    assert log == [("urgent", 1), ("first", 0), ("patient", 9)]
    lane.close()
