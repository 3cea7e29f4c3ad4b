"""The report in a real browser: what it shows, what it asks for, and what it computes."""

from __future__ import annotations

import functools
import itertools
import time
from pathlib import Path

import msgspec
import pytest
from benchmarks.browser import Opened, started, why_not

from compared import write_comparison
from simulated import trace_of
from syncline import dataset
from syncline.perf.critical_path import critical_path
from syncline.perf.trace import Task, Trace
from syncline.perf.what_if import Edit, what_if
from syncline.report.page import write
from syncline.report.page.run import run_of
from syncline.report.page.shortened import packed
from syncline.report.page.write import write_page, write_report

pytestmark = [
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "a browser is there"),
    pytest.mark.slow,
]

CHECKS = (Path(__file__).parent / "page_checks.js").read_text().split("\n", 1)[1]
MEASURED = Path(__file__).parents[2] / "datasets" / "predictions-2026-11-19.tar.gz"
WINDOWS = list(itertools.product((1280, 400), ("light", "dark")))
EDITS = [
    {"factors": {}, "noStragglers": False},
    {"factors": {"wire": 0.5}, "noStragglers": False},
    {"factors": {"latency": 0.0}, "noStragglers": False},
    {"factors": {"forward": 0.5, "backward": 0.5}, "noStragglers": True},
    {"factors": {"wire": 4.0, "latency": 3.0, "input": 0.0}, "noStragglers": False},
    {"factors": {"update": 0.0, "inside": 0.0, "sum": 0.0, "copy": 0.0}, "noStragglers": True},
]


@pytest.fixture(scope="module")
def browser():
    with started() as found:
        yield found


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Measured and simulated: on several ranks, with ranks that do not meet, with a dead rank."""
    folder = tmp_path_factory.mktemp("in_browser")
    found = dataset.load(MEASURED)
    case = next(one for one in found.cases if (one.strategy, one.ranks) == ("synchronous", 2))
    slow = "cluster.slow_ranks.1=1.5"
    made = {
        "measured": found.trace(case),
        "four": trace_of(folder, "synchronous", slow, "strategy.overlap=true", steps=6),
        "two": trace_of(folder, "synchronous", slow, ranks=2, steps=6),
        "gossip": trace_of(folder, "gossip", slow, ranks=4, steps=6),
    }
    curve = [
        {"step": n, "time_s": n / 9, "samples": 48 * n, "sent_bytes": 1e5 * n, "loss": 2 / (n + 1),
         "test_loss": None, "accuracy": 1 - 0.9 ** n}
        for n in range(1, 9)
    ]  # fmt: skip
    figures = {"staleness": {"0": 5, "1": 9, "3": 2}, "mean_staleness": 0.94}
    summary = {
        "steps": 8,
        "loss": 0.2,
        "accuracy": 0.57,
        "strategy": figures,
        "gone": {"3": "died"},
    }
    known = {"summary": summary, "curve": curve}
    return [
        run_of(name, trace, known if name == "gossip" else None) for name, trace in made.items()
    ]


@pytest.fixture(scope="module")
def file(runs, tmp_path_factory):
    out = tmp_path_factory.mktemp("report") / "report.html"
    write_page(runs, out)
    return out


@pytest.mark.parametrize(("width", "theme"), WINDOWS)
def test_the_page_is_whole_readable_and_asks_for_nothing(browser, file, width, theme):
    opened = Opened(browser, file, width, theme)
    for number in range(4):
        opened.pick(number)
        assert opened.page.evaluate(CHECKS) == [], number
    assert opened.said == []
    assert [url for url in opened.asked if not url.startswith(("file:", "data:"))] == []
    ground = opened.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert ground == {"light": "rgb(246, 247, 249)", "dark": "rgb(16, 20, 24)"}[theme]
    ids = opened.page.evaluate("[...document.querySelectorAll('section')].map((e) => e.id)")
    wanted = {"verdict", "beside", "whatif", "where", "when", "exchange", "together", "more"}
    assert {*ids} >= {*wanted, "learning", "job"}
    opened.close()


def test_other_costs_give_the_same_numbers_in_the_page_and_in_python(browser, file, runs):
    opened = Opened(browser, file)
    for number, run in enumerate(runs):
        opened.pick(number)
        found = opened.page.evaluate(
            """(edits) => edits.map((edit) => {
              const { graph } = runs[NUMBER], timed = graph.whatIf(edit);
              return [timed.step, timed.total, graph.path(timed).shares];
            })""".replace("NUMBER", str(number)),
            EDITS,
        )
        for edit, (step_s, run_s, shares) in zip(EDITS, found, strict=True):
            timing = what_if(run.graph, Edit("", edit["factors"], edit["noStragglers"]))
            assert step_s == pytest.approx(timing.step_s, rel=1e-5, abs=2e-9), edit
            assert run_s == pytest.approx(timing.run_s, rel=1e-5, abs=2e-9), edit
            expected = critical_path(timing).shares
            for name in shares.keys() | expected.keys():
                # Rounding decides which of several ranks that come at once is on the path.
                off = abs(shares.get(name, 0.0) - expected.get(name, 0.0))
                assert off < 2e-3, (edit, name)
    opened.close()


def test_bars_and_sliders_say_what_explain_says(browser, file, runs):
    opened = Opened(browser, file)
    page, numbers = opened.page, runs[1].numbers
    opened.pick(1)
    for button in page.locator("button[data-edit]:visible").all():
        name = button.inner_text()
        (answer,) = [one for one in numbers["what_if"] if one["edit"] == name]
        button.click()
        found = page.evaluate("whatIf.answer")
        assert found["step_s"] == pytest.approx(answer["step_s"], rel=1e-5)
        assert found["gain"] == pytest.approx(answer["gain"], abs=1e-5)
        beside = button.locator("xpath=following-sibling::b[1]").inner_text()
        assert page.locator("#answer b").inner_text() == beside.partition(", ")[2]
    page.locator("#w-reset").click()
    assert page.evaluate("whatIf.answer.isChanged") is False
    wires = page.locator('[data-classes="wire"]')
    wires.focus()
    for _ in range(4):
        page.keyboard.press("ArrowRight")
    twice = what_if(runs[1].graph, Edit("", {"wire": 0.5}))
    assert page.evaluate("whatIf.answer.step_s") == pytest.approx(twice.step_s, rel=1e-5)
    opened.close()


def test_the_timeline_moves_by_keyboard_and_says_what_a_task_was(browser, file, runs):
    opened = Opened(browser, file)
    page, graph = opened.page, runs[1].graph
    opened.pick(1)
    page.locator("#timeline").focus()
    before = page.evaluate("[timeline.from, timeline.to]")
    page.keyboard.press("0")
    whole = page.evaluate("[timeline.from, timeline.to, timeline.timed.total]")
    assert whole[0] <= 0
    assert whole[1] >= whole[2]
    page.keyboard.press("w")
    zoomed = page.evaluate("[timeline.from, timeline.to]")
    assert zoomed[1] - zoomed[0] == pytest.approx(0.7 * (whole[1] - whole[0]))
    page.keyboard.press("]")
    page.keyboard.press("n")
    said = page.locator("#chosen").inner_text()
    assert "on the critical path" in said
    place = page.evaluate("timeline.chosen")
    task: Task = graph.tasks[place]
    assert said.startswith(f"rank {task.rank}, {task.kind}")
    times = page.evaluate(
        """(t) => {
          const { times } = timeline.timed, { start, end } = timeline.graph;
          return [times[start[t]], times[end[t]]];
        }""",
        place,
    )
    begin_s = float(graph.recorded_s[0])
    assert times == pytest.approx([task.start_s - begin_s, task.end_s - begin_s], abs=2e-9)
    page.keyboard.press("Escape")
    assert "Click a task" in page.locator("#chosen").inner_text()
    assert before != page.evaluate("[timeline.from, timeline.to]")
    opened.close()


@pytest.mark.parametrize(("width", "theme"), [(1280, "light"), (400, "dark")])
def test_a_comparison_is_readable_and_its_curves_have_a_switch(browser, tmp_path, width, theme):
    out = tmp_path / "compared.html"
    write_report([write_comparison(tmp_path / "compared")], out)
    opened = Opened(browser, out, width, theme)
    page = opened.page
    assert page.evaluate(CHECKS) == []
    before = page.locator(".charts").inner_html()
    assert before.count("<svg") == 3
    page.locator('input[value="samples"]').check()
    after = page.locator(".charts").inner_html()
    assert after != before
    assert ">samples<" in after
    page.locator(".curves select").select_option("3")
    assert page.locator(".charts").inner_html() != after
    assert page.evaluate(CHECKS) == []
    assert opened.said == []
    opened.close()


def test_print_is_light_and_without_controls(browser, file):
    opened = Opened(browser, file, theme="dark")
    opened.page.emulate_media(media="print")
    assert opened.page.locator("#w-reset").is_hidden()
    assert opened.page.locator("#timeline").is_visible()
    assert len(opened.page.pdf()) > 20_000
    opened.close()


def test_everything_is_reached_by_tab(browser, file):
    opened = Opened(browser, file)
    page, seen = opened.page, set()
    for _ in range(90):
        page.keyboard.press("Tab")
        seen.add(page.evaluate("document.activeElement.id || document.activeElement.dataset.pick"))
    assert {"theme", "0", "3", "w-reset", "t-path", "t-slow", "t-all", "timeline"} <= seen
    opened.close()


def test_a_run_of_8_ranks_and_1000_steps_opens_and_is_timed_again_at_once(browser, tmp_path):
    jitter = ("cluster.jitter=lognormal", "cluster.jitter_sigma=0.1")
    shape = ("strategy.overlap=true", "strategy.bucket_bytes=200000")
    long = repeated(trace_of(tmp_path, "synchronous", *jitter, *shape, ranks=8, steps=50), 20)
    out = tmp_path / "long.html"
    write_page([run_of("long", long)], out)
    assert out.stat().st_size < 8e6
    began = time.perf_counter()
    opened = Opened(browser, out)
    assert time.perf_counter() - began < 3.0
    took = opened.page.evaluate(
        "[1, 2, 3].map(() => runs[0].graph.whatIf({factors: {wire: 0.5}}).took)"
    )
    assert opened.page.evaluate("runs[0].graph.rank.length") == len(long.tasks)
    assert min(took) < 200
    assert opened.said == []
    opened.close()


def repeated(trace: Trace, times: int) -> Trace:
    """Return a trace whose run goes on as it began: simulating it would take long."""
    span_s = max(task.end_s for task in trace.tasks)
    count = 1 + max(task.number for task in trace.tasks)

    def moved(task: Task, turn: int) -> Task:
        by_s = turn * span_s
        parts = [
            msgspec.structs.replace(
                part,
                end_s=part.end_s + by_s,
                exchange=f"{part.exchange}/{turn}" if part.exchange else "",
            )
            for part in task.parts
        ]
        return msgspec.structs.replace(
            task,
            number=task.number + turn * count,
            step=task.step + turn * trace.header.steps,
            start_s=task.start_s + by_s,
            end_s=task.end_s + by_s,
            after=tuple((rank, number + turn * count) for rank, number in task.after),
            parts=tuple(parts),
        )

    tasks = [moved(task, turn) for turn in range(times) for task in trace.tasks]
    tasks.sort(key=lambda task: (task.rank, task.number))
    header = msgspec.structs.replace(trace.header, steps=trace.header.steps * times)
    return Trace(tuple(tasks), header)


def test_a_run_that_is_too_long_for_the_page_says_what_is_left_out(
    browser, tmp_path, runs, monkeypatch
):
    four = runs[1]
    short = functools.partial(packed, most=four.graph.num_tasks // 2 + 1)
    monkeypatch.setattr(write, "packed", short)
    out = tmp_path / "short.html"
    write_page([four, runs[2]], out)
    monkeypatch.undo()
    opened = Opened(browser, out)
    assert "leave out its last 3 steps" in opened.page.locator("#shortened").inner_text()
    assert opened.page.evaluate("Math.max(...runs[0].graph.step)") == 2
    assert opened.page.evaluate(CHECKS) == []
    opened.close()


@pytest.mark.parametrize("ranks", [1, 2])
def test_one_rank_and_one_step_have_a_report(browser, tmp_path, ranks):
    trace = trace_of(tmp_path, "synchronous", ranks=ranks, steps=2)
    first = tuple(task for task in trace.tasks if task.step == 0)
    out = tmp_path / "one.html"
    write_page([run_of("one step", Trace(first, trace.header)), run_of("two", trace)], out)
    opened = Opened(browser, out, 400)
    assert opened.page.evaluate(CHECKS) == []
    opened.pick(1)
    assert opened.page.evaluate(CHECKS) == []
    assert opened.said == []
    opened.close()
