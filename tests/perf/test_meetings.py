"""Exchanges of several ranks, divided into waiting and the rest, by hand."""

from __future__ import annotations

from syncline.perf.meetings import divide, of_steps
from syncline.perf.recorder import Recorder
from syncline.perf.trace import Part, Task

APART = [(0,), (1,), (2,)]


def hook(rank, start_s, *parts, kind="reduce"):
    end_s = parts[-1].end_s
    return Task(rank, 0, "comm", kind, 0, 0, start_s, end_s, (), parts)


def kinds(task):
    return [(part.kind, part.end_s, part.num_bytes) for part in task.parts]


def test_over_a_network_the_last_to_come_does_not_wait():
    tasks = [
        hook(0, 0.0, Part("exchange", 5.0, 8, "g.0:0"), Part("sum", 6.0)),
        hook(1, 3.0, Part("exchange", 5.5, 8, "g.0:0")),
    ]
    first, second = divide(tasks, APART, latency_s=0.5)
    assert kinds(first) == [("wait", 3.0, 0), ("latency", 3.5, 0), ("wire", 5.0, 8), ("sum", 6, 0)]
    assert kinds(second) == [("latency", 3.5, 0), ("wire", 5.5, 8)]


def test_on_one_machine_nothing_is_on_a_wire():
    tasks = [
        hook(0, 0.0, Part("meet", 5.0, 8, "g.0:0")),
        hook(1, 3.0, Part("meet", 3.5, 8, "g.0:0")),
    ]
    first, second = divide(tasks, [(0, 1)], latency_s=0.0)
    assert kinds(first) == [("wait", 3.0, 0), ("latency", 5.0, 8)]
    assert kinds(second) == [("latency", 3.5, 8)]


def test_only_ranks_that_send_something_are_waited_for():
    tasks = [
        hook(0, 0.0, Part("exchange", 5.0, 0, "g.0:0", (1,))),
        hook(1, 1.0, Part("send", 2.0, 8, "g.0:0")),
        hook(2, 4.0, Part("send", 5.0, 0, "g.0:0")),
    ]
    first, second, _ = divide(tasks, APART, latency_s=0.0)
    assert kinds(first) == [("wait", 1.0, 0), ("wire", 5.0, 0)]
    assert kinds(second) == [("send", 2.0, 8)]


def test_a_call_is_divided_by_the_task_that_served_it():
    asks = hook(
        0, 0.0, Part("send", 1.0, 8, "w:0>1:1", (1,)), Part("call", 9.0, 0, "w:0>1:1", (1,))
    )
    served = hook(
        1, 4.0, Part("update", 6.0), Part("answer", 6.0, 0, "w:0>1:1", (0,)), kind="serve"
    )
    first, second = divide([asks, served], APART, latency_s=0.5)
    assert kinds(first) == [
        ("send", 1.0, 8),
        ("wire", 4.0, 0),
        ("serve", 6.0, 0),
        ("latency", 6.5, 0),
        ("wire", 9.0, 0),
    ]
    assert second == served
    near, _ = divide([asks, served], [(0, 1)], latency_s=0.0)
    assert [kind for kind, _, _ in kinds(near)] == ["send", "wait", "serve", "latency"]


def test_a_call_to_a_rank_that_is_gone_was_waiting():
    asks = hook(0, 0.0, Part("call", 9.0, 0, "w:0>1:1", (1,)))
    assert kinds(divide([asks], APART, latency_s=0.5)[0]) == [("wait", 9.0, 0)]


def test_calls_that_no_task_made_are_left_out():
    ticks = iter(range(100))
    recorder = Recorder(1, now=lambda: float(next(ticks)))
    recorder.open()
    recorder.close_served("w:0>1:1", 0)
    (served,) = recorder.tasks
    asks = hook(0, 0.0, Part("send", 1.0, 8, "w:0>1:1", (1,)))
    assert of_steps([asks, served]) == [asks, served]
    other = hook(0, 0.0, Part("work", 0.5), Part("send", 1.0, 8, "w:0>1:2", (1,)))
    assert of_steps([other, served]) == [other]
    assert of_steps([served]) == [served]  # the trace of one rank that has lost the others
