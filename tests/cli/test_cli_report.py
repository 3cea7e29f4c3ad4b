"""`syncline report`, and `--report` of the commands that run something."""

from __future__ import annotations

import json
from pathlib import Path

from command import Started
from page_numbers import Page, check_digits
from syncline.report.page.markup import at
from syncline.run_curve import read_curve

DIGITS = Path(__file__).parents[2] / "examples" / "digits.toml"
SHORT = ("--set", "run.epochs=", "--set", "run.steps=6", "--set", "optimizer.warmup_steps=2")


def called(*arguments):
    started = Started(*arguments)
    out, err = started.communicate()
    assert started.returncode == 0, err
    return out, err


def test_a_real_run_writes_its_report_and_shows_what_explain_and_its_folder_say(tmp_path):
    run, page = tmp_path / "run", tmp_path / "run" / "report.html"
    _, err = called(
        *("train", str(DIGITS), "--out", str(run), "--report", str(page)),
        *(*SHORT, "--set", "run.evaluate_every=", "--set", "run.checkpoint_every="),
    )
    assert err.splitlines()[-1] == f"syncline: report: {page}"
    assert (run / "run.trace.gz").exists()
    out, _ = called("explain", str(run), "--json")
    said = json.loads(out)
    assert said["run"] == read_curve(run)
    assert [point["step"] for point in said["run"]["curve"]] == [1, 2, 3, 4, 5, 6]
    times = [point["time_s"] for point in said["run"]["curve"]]
    assert times == sorted(times)
    assert said["run"]["curve"][-1]["accuracy"] == said["run"]["summary"]["accuracy"]
    numbers = Page(page.read_text()).numbers
    assert {"run.summary.accuracy", "run.summary.loss"} <= {number.key for number in numbers}
    for number in numbers:
        assert number.value == at(said, number.key), number
        check_digits(number)
    out, _ = called(
        "report", str(run), str(run / "run.trace.gz"), "--out", str(tmp_path / "b.html")
    )
    assert out == f"report: {tmp_path / 'b.html'}\n"


def test_a_simulation_writes_its_report_with_its_interval_and_its_curve(tmp_path):
    page, trace = tmp_path / "s.html", tmp_path / "s.trace"
    out, _ = called(
        *("simulate", str(DIGITS), "--ranks", "4", "--interval", "--report", str(page)),
        *("--trace", str(trace)),
    )
    assert f"report: {page}" in out
    out, _ = called("explain", str(trace), "--json")
    said = json.loads(out)
    low, high = said["interval_s"]
    assert low < said["steps_s"]["median_s"] < high
    numbers = {number.key: number for number in Page(page.read_text()).numbers}
    assert numbers["interval_s.0"].value == low
    for number in numbers.values():
        if not number.key.startswith("run."):
            assert number.value == at(said, number.key), number
    assert numbers["run.summary.efficiency"].value > 0


def test_a_run_without_a_trace_has_a_report_about_its_learning(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    summary = {"steps": 2, "loss": 0.5, "accuracy": None, "step_s": 0.1, "samples_per_s": 640.0}
    (run / "summary.json").write_text(json.dumps(summary | {"ranks": 2, "strategy": {}}))
    lines = [{"step": step, "loss": 1 / step, "time_s": 0.1 * step} for step in (1, 2)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    called("report", str(run), "--out", str(tmp_path / "r.html"))
    text = (tmp_path / "r.html").read_text()
    assert "train with <code>--trace</code> to see it" in text
    assert 'data-panel="learning"' in text
    assert 'data-panel="when"' not in text
