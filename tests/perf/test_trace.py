"""A trace: tasks in, bytes out and back, and the line a damaged file ends in."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.errors import ConfigError
from syncline.perf.recorder import Recorder
from syncline.perf.trace import Header, Part, Task, Trace

HEAD = Trace(()).to_bytes()


class Ticks:
    """A clock that goes on by a second with every look at it."""

    def __init__(self):
        self.now_s = -1.0

    def __call__(self):
        self.now_s += 1.0
        return self.now_s


def spans(recorder):
    return [(t.kind, t.bucket, t.start_s, t.end_s, t.after) for t in recorder.tasks]


def test_tasks_are_numbered_and_the_last_of_each_kind_and_bucket_is_known():
    recorder = Recorder(rank=3, now=Ticks())
    first = recorder.add("comm", "reduce", 1, 0, -5.0)
    second = recorder.add("comm", "reduce", 1, 1, -4.0, after=((3, first),))
    assert recorder.tasks == [
        Task(3, 0, "comm", "reduce", 1, 0, -5.0, 0.0, ()),
        Task(3, 1, "comm", "reduce", 1, 1, -4.0, 1.0, ((3, 0),)),
    ]
    assert recorder.last == {("reduce", 1): second}
    assert recorder.after(("reduce", 1), ("gather", 1)) == ((3, 1),)


def test_two_lanes_may_write_at_once():
    recorder = Recorder(0)

    def write(lane):
        for step in range(2000):
            recorder.add(lane, "work", 0, step, 0.0)

    threads = [threading.Thread(target=write, args=(lane,)) for lane in ("compute", "comm")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(task.number for task in recorder.tasks) == list(range(4000))


def test_moments_of_the_compute_lane_become_tasks_that_follow_one_another():
    recorder = Recorder(0, now=Ticks())
    recorder.begin_forward(has_buckets=True)
    recorder.reach(0, 7)  # at 0
    recorder.reach(1, 7)  # ends bucket 0 at 1, begins at 2
    recorder.reach(0, 7)  # a second use of an early bucket changes nothing
    recorder.begin_backward()  # ends bucket 1 at 3, backward begins at 4
    recorder.leave(1, 7)
    recorder.leave(0, 7)
    assert spans(recorder) == [
        ("forward", 0, 0.0, 1.0, ()),
        ("forward", 1, 2.0, 3.0, ((0, 0),)),
        ("backward", 1, 4.0, 5.0, ((0, 1),)),
        ("backward", 0, 6.0, 7.0, ((0, 2),)),
    ]
    assert {task.step for task in recorder.tasks} == {7}


def test_time_spent_waiting_is_no_part_of_forward():
    recorder = Recorder(0, now=Ticks())
    recorder.begin_forward(has_buckets=True)
    recorder.reach(0, 0)  # at 0
    recorder.pause()  # at 1
    recorder.add("comm", "gather", 1, 0, 0.5)  # until 2
    recorder.waited(1, 0, 1.0)  # until 3
    recorder.reach(1, 0)  # at 4
    recorder.begin_backward()
    assert spans(recorder) == [
        ("forward", 0, 0.0, 1.0, ()),
        ("gather", 1, 0.5, 2.0, ()),
        ("wait", 1, 1.0, 3.0, ((0, 0),)),
        ("forward", 1, 4.0, 5.0, ((0, 2), (0, 1))),
    ]


def test_moments_outside_of_forward_and_backward_are_no_tasks():
    recorder = Recorder(0, now=Ticks())
    recorder.reach(0, 0)
    recorder.leave(0, 0)
    recorder.begin_forward(has_buckets=True)
    recorder.end_backward()
    recorder.leave(0, 0)
    recorder.pause()
    assert recorder.tasks == []


def test_without_buckets_forward_and_backward_are_one_task_each():
    recorder = Recorder(0, now=Ticks())
    recorder.step = 3
    recorder.begin_forward(has_buckets=False)  # at 0
    recorder.begin_backward()  # ends forward at 1, begins at 2
    recorder.begin_forward(has_buckets=False)  # of the next shard: ends backward at 3, begins at 4
    recorder.begin_backward()
    recorder.end_backward()
    assert [(task.kind, task.start_s, task.end_s) for task in recorder.tasks] == [
        ("forward", 0.0, 1.0),
        ("backward", 2.0, 3.0),
        ("forward", 4.0, 5.0),
        ("backward", 6.0, 7.0),
    ]
    assert {(task.bucket, task.step) for task in recorder.tasks} == {(-1, 3)}


def test_what_comes_after_the_last_step_belongs_to_it():
    recorder = Recorder(0, now=Ticks())
    recorder.last_step = 4
    recorder.waited(1, 5, 0.0)
    assert recorder.tasks[0].step == 4


def test_parts_divide_a_task_of_the_comm_lane_and_hold_its_bytes():
    recorder = Recorder(0, now=Ticks())
    recorder.add_bytes(5)  # no task is open: it is not part of one
    assert recorder.open() == 0.0
    recorder.add_bytes(8)
    recorder.end_part("work")  # until 1
    recorder.end_part("wire", "0-1.0:0", end_s=4.0)
    recorder.end_part("wait", end_s=3.0)  # that was before: nothing is left of it
    assert recorder.close("reduce", 2, 7, ((0, 9),)) == 0
    assert recorder.tasks == [
        Task(
            *(0, 0, "comm", "reduce", 2, 7, 0.0, 4.0, ((0, 9),)),
            (Part("work", 1.0), Part("wire", 4.0, 8, "0-1.0:0")),
        )
    ]


def test_a_call_that_is_served_inside_a_hook_is_a_task_of_its_own():
    recorder = Recorder(0, now=Ticks())
    recorder.open()  # 0
    recorder.open()  # 1
    recorder.end_part("update")  # 2
    recorder.close_served("calls 0-1:1>0:3", 1)
    recorder.end_part("wait")
    recorder.close("gather", 0, 0)
    served, hook = recorder.tasks
    assert (served.kind, served.start_s) == ("serve", 1.0)
    assert served.parts[0] == Part("update", 2.0)
    answers = [part for part in served.parts if part.exchange]
    assert [(part.kind, part.exchange, part.peers) for part in answers] == [
        ("answer", "calls 0-1:1>0:3", (1,))
    ]
    assert recorder.last_served == "calls 0-1:1>0:3"
    assert (hook.kind, hook.start_s, hook.parts[0].kind) == ("gather", 0.0, "wait")


# -- bytes -----------------------------------------------------------------------------------------


def test_the_bytes_of_a_trace_are_these():
    parts = (Part("wire", 0.30000000000000004, 7, "0-1.0:3", (1,)),)
    later = Task(0, 1, "comm", "reduce", 2, 0, 0.1, 0.30000000000000004, ((0, 0), (1, 0)), parts)
    early = Task(0, 0, "compute", "backward", 2, 0, 0.0, 1e-7, ())
    other = Task(1, 0, "compute", "backward", 2, 0, -1.5, 1e22, ())
    assert Trace((other, later, early)).to_bytes() == (
        HEAD
        + b'[0,0,"compute","backward",2,0,0.0,1e-07,[],[]]\n'
        + b'[0,1,"comm","reduce",2,0,0.1,0.30000000000000004,[[0,0],[1,0]],'
        + b'[["wire",0.30000000000000004,7,"0-1.0:3",[1]]]]\n'
        + b'[1,0,"compute","backward",2,0,-1.5,1e+22,[],[]]\n'
    )


@st.composite
def traces(draw):
    tasks: list[Task] = []
    texts = st.text(st.characters(exclude_categories=["Cs"]))
    for rank in range(draw(st.integers(0, 3))):
        for number in range(draw(st.integers(0, 4))):
            times = st.floats(-1e300, 1e300)
            start_s, end_s = sorted([draw(times), draw(times)])
            known = [(task.rank, task.number) for task in tasks]
            after = tuple(draw(st.lists(st.sampled_from(known)))) if known else ()
            bucket, step = draw(st.integers(-1, 9)), draw(st.integers(0, 2**53))
            lane, kind = draw(texts), draw(texts)
            parts = tuple(
                Part(draw(texts), draw(st.floats(start_s, end_s)), draw(st.integers(0, 2**53)))
                for _ in range(draw(st.integers(0, 2)))
            )
            parts = tuple(sorted(parts, key=lambda part: part.end_s))
            parts = (*parts, Part("work", end_s, 0, draw(texts), (1, 2))) if parts else ()
            tasks.append(Task(rank, number, lane, kind, bucket, step, start_s, end_s, after, parts))
    header = Header(strategy=draw(texts), steps=draw(st.integers(0, 9)), cluster={"machines": 2})
    return Trace(tuple(tasks), header)


@given(traces(), st.randoms())
def test_a_trace_comes_back_whatever_order_its_tasks_were_given_in(trace, random):
    tasks = list(trace.tasks)
    random.shuffle(tasks)
    data = Trace(tuple(tasks), trace.header).to_bytes()
    assert data == trace.to_bytes()
    assert Trace.from_bytes(data) == trace


def test_a_trace_is_written_whole_and_read_back(tmp_path):
    trace = Trace((Task(0, 0, "comm", "step", -1, 0, 0.0, 1.0, ()),))
    trace.write(tmp_path / "run.trace")
    assert Trace.read(tmp_path / "run.trace") == trace
    assert [path.name for path in tmp_path.iterdir()] == ["run.trace"]


def test_a_trace_may_be_compressed(tmp_path):
    trace = Trace((Task(0, 0, "comm", "step", -1, 0, 0.0, 1.0, ()),))
    paths = [tmp_path / name for name in ("one.trace.gz", "two.trace.gz")]
    for path in paths:
        trace.write(path)
        assert path.read_bytes()[:2] == b"\x1f\x8b"
        assert Trace.read(path) == trace
    assert paths[0].read_bytes() == paths[1].read_bytes()
    paths[0].write_bytes(paths[0].read_bytes()[:-9])
    with pytest.raises(ConfigError, match="it cannot be decompressed"):
        Trace.read(paths[0])


def test_a_trace_of_an_older_version_is_refused_in_one_line():
    data = b'{"format":"syncline-trace","version":1}\n[0,0,"comm","step",-1,0,0.0,1.0,[]]\n'
    with pytest.raises(ConfigError, match="this is a trace of format version 1, but") as caught:
        Trace.from_bytes(data)
    assert "\n" not in str(caught.value)


TASK = b'[0,0,"comm","step",-1,0,0.0,1.0,[]]\n'


@pytest.mark.parametrize(
    ("data", "line"),
    [
        (b"", "x: this is no trace of ours, but its first line says what it is."),
        (b"\xff\n", "x: this is no trace of ours, but"),
        (b'{"format":"other","version":2}\n', "x: this is no trace of ours, but"),
        (TASK, "x: this is no trace of ours, but"),
        (HEAD + TASK[:-1], "x, line 2: it is cut short, but"),
        (HEAD + b"[0,0\n", "x, line 2: Input data was truncated, but"),
        (HEAD + b"\xff\n", "x, line 2: "),
        (HEAD + b"\n", "x, line 2: "),
        (HEAD + b'[0,0,"comm","step",-1,0,0.0]\n', "x, line 2: "),
        (HEAD + TASK.replace(b"-1", b"true"), "x, line 2: "),
        (HEAD + TASK + TASK, "x, line 3: tasks are not in order, but"),
        (HEAD + TASK.replace(b"1.0", b"-1.0"), "x, line 2: a task from 0.0 to -1.0 s, but"),
        (
            HEAD + TASK.replace(b"[]", b"[[4,2]]"),
            "x, line 2: it comes after (4, 2), which is not there, but",
        ),
    ],
)
def test_a_damaged_trace_is_refused_with_its_line(tmp_path, data, line):
    with pytest.raises(ConfigError) as caught:
        Trace.from_bytes(data, "x")
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere: cannot be read \(no such file or directory\)"):
        Trace.read(tmp_path / "nowhere")
