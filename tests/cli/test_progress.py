"""What rank 0 shows: a bar on a terminal, few plain lines elsewhere, nothing on other ranks."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from syncline.config import parse_job
from syncline.report.progress import (
    BarProgress,
    LineProgress,
    SilentProgress,
    duration,
    progress_for,
)
from syncline.report.result import print_result

JOB = parse_job(
    '[model]\nname = "cnn"\n[data]\nname = "digits"\nbatch = 64\n'
    "[optimizer]\nlr = 0.1\n[run]\nsteps = 100\n"
).resolved(1)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Result:
    def to_json_dict(self) -> dict[str, object]:
        return {}


def test_only_rank_0_shows_anything():
    assert isinstance(progress_for(0, io.StringIO()), LineProgress)
    assert isinstance(progress_for(0, Terminal()), BarProgress)
    assert isinstance(progress_for(1, Terminal()), SilentProgress)


def test_plain_lines_are_the_first_step_the_last_and_one_every_few_seconds():
    stream, clock = io.StringIO(), Clock()
    progress = LineProgress(stream, clock)
    progress.start(JOB, ["3 buckets of 1 MB"])
    for step in range(1, 101):
        clock.now_s = step * 0.1
        progress.step(step, 100, loss=1 / step, samples_per_s=640.4, exposed_communication=0.031)
    progress.evaluated(100, 0.125, 0.5)
    progress.evaluated(100, 0.125, None)
    progress.note("checkpoint written")
    progress.finish(Result())
    progress.close()
    assert stream.getvalue().splitlines() == [
        "cnn on digits: synchronous, 1 rank, 1 shard, batch 64",
        "3 buckets of 1 MB",
        "step 1/100  loss 1.0000  640 samples/s  3% exposed communication",
        "step 51/100  loss 0.0196  640 samples/s  3% exposed communication  5s left",
        "step 100/100  loss 0.0100  640 samples/s  3% exposed communication",
        "evaluated at step 100:  loss 0.1250  accuracy 50.00%",
        "evaluated at step 100:  loss 0.1250",
        "checkpoint written",
    ]


def test_the_time_left_of_a_resumed_run_counts_its_own_steps_only():
    stream, clock = io.StringIO(), Clock()
    progress = LineProgress(stream, clock)
    progress.step(900, 1000, 1.0, 5.0, 0.0)
    clock.now_s = 10.0
    progress.step(910, 1000, 1.0, 5.0, 0.0)
    assert (
        stream.getvalue()
        .splitlines()[-1]
        .endswith("5.0 samples/s  0% exposed communication  1m 30s left")
    )


def bar(width: int = 160) -> tuple[BarProgress, Terminal, Clock]:
    stream, clock = Terminal(), Clock()
    progress = BarProgress(stream, clock)
    progress._console.width = width
    return progress, stream, clock


def test_a_bar_shows_step_loss_rate_exposed_communication_and_time_left():
    progress, stream, clock = bar()
    progress.start(JOB, ["3 buckets"])
    progress.step(1, 100, 2.5, 640.0, 0.25)
    clock.now_s = 10.0
    progress.step(51, 100, 0.5, 640.0, 0.25)
    progress.evaluated(51, 0.125, 0.5)
    progress.finish(Result())
    shown = stream.getvalue()
    pieces = ["3 buckets", "step 51/100", "loss 0.5000", "640 samples/s"]
    pieces += ["25% exposed", "10s left", "evaluated at step 51"]
    for piece in pieces:
        assert piece in shown


def test_a_bar_is_drawn_a_few_times_a_second_only():
    progress, stream, clock = bar()
    progress.step(1, 1000, 1.0, 1.0, 0.0)
    size = len(stream.getvalue())
    clock.now_s = 0.1
    progress.step(2, 1000, 1.0, 1.0, 0.0)
    assert len(stream.getvalue()) == size
    clock.now_s = 0.25
    progress.step(3, 1000, 1.0, 1.0, 0.0)
    assert len(stream.getvalue()) > size
    progress.close()


def test_the_cursor_is_never_left_hidden(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    progress, stream, _ = bar()
    progress.step(1, 10, 1.0, 1.0, 0.0)
    shown = stream.getvalue()
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")
    progress.close()
    progress.close()


def test_square_brackets_in_a_note_are_not_markup():
    progress, stream, _ = bar()
    progress.note("a [b] c [/d]")
    assert stream.getvalue() == "a [b] c [/d]\n"


@pytest.mark.parametrize(
    ("seconds", "written"),
    [(-1, "0s"), (41.4, "41s"), (59.6, "1m 00s"), (200, "3m 20s"), (7500, "2h 05m")],
)
def test_time_is_written_the_way_people_read_it(seconds, written):
    assert duration(seconds) == written


def test_hash_and_path_stay_whole_in_a_narrow_window():
    stream = io.StringIO()
    folder = Path("runs") / ("long-" * 20)
    print_result({"weights_sha256": "ab" * 32}, folder, Console(file=stream, width=40))
    assert [line.split()[-1] for line in stream.getvalue().splitlines()] == [
        "ab" * 32,
        str(folder),
    ]


def test_a_result_without_accuracy_has_no_such_line():
    stream = io.StringIO()
    summary = {"steps": 3000, "loss": None, "weights_sha256": "ab"}
    print_result(summary, Path("runs/[x]"), Console(file=stream))
    lines = [line.split() for line in stream.getvalue().splitlines()]
    assert lines == [
        ["steps", "3,000"],
        ["weights", "(SHA-256)", "ab"],
        ["run", "folder", "runs/[x]"],
    ]
