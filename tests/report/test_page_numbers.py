"""The report's numbers: each carries its key, and is what `syncline explain --json` says."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from compared import write_comparison
from page_numbers import Page, check_digits
from simulated import trace_of
from syncline import dataset
from syncline.cli.explain import explain
from syncline.errors import ConfigError
from syncline.perf.beside import beside
from syncline.perf.breakdown import GROUPS, PARTS
from syncline.perf.trace import Trace
from syncline.report.page.markup import at
from syncline.report.page.pack import varints
from syncline.report.page.run import read, run_of
from syncline.report.page.shortened import shortened
from syncline.report.page.verdict import verdict
from syncline.report.page.write import page, write_report

MEASURED = Path(__file__).parents[2] / "datasets" / "predictions-2026-11-19.tar.gz"


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """A measured trace, a simulated one of the same job, and one on more ranks."""
    folder = tmp_path_factory.mktemp("reported")
    found = dataset.load(MEASURED)
    case = next(one for one in found.cases if (one.strategy, one.ranks) == ("synchronous", 2))
    (folder / "measured.trace.gz").write_bytes(found.members[case.trace_name])
    for ranks in (2, 4):
        sets = ["cluster.slow_ranks.1=1.5", "strategy.overlap=true"]
        trace = trace_of(folder, "synchronous", *sets, ranks=ranks, steps=6)
        trace.write(folder / f"simulated-{ranks}.trace")
    return [
        folder / f"{name}"
        for name in ("measured.trace.gz", "simulated-2.trace", "simulated-4.trace")
    ]


@pytest.fixture(scope="module")
def written(paths):
    return page(*read(paths))


def said(paths, capsys):
    explain(paths, as_json=True, debug=False)
    return json.loads(capsys.readouterr().out)


def test_every_number_is_what_explain_says_to_the_digits_shown(paths, written, capsys):
    numbers = Page(written).numbers
    objects = {str(place): said([path], capsys) for place, path in enumerate(paths)}
    objects["all"] = said(paths, capsys)
    for number in numbers:
        assert number.value == at(objects[number.of], number.key), number
        check_digits(number)
    keys = {number.key.partition(".")[0] for number in numbers}
    assert keys >= {"parts_s", "groups_s", "what_if", "buckets", "ranks_s", "steps_s", "scaling"}


def test_the_first_sentences_say_what_their_numbers_are(paths):
    run = read(paths[2:])[0][0]
    said = re.sub(r'<data data-key="([^"]*)"[^>]*>[^<]*</data>', r"[\1]", verdict(run))
    assert re.search(r"<h1>(.*?)</h1>", said)[1] == (
        "A step takes [step_s]: [groups_s.computing] computing and [groups_s.exchange] standing "
        "still for the exchange."
    )
    assert "What binds: [path.binds]. What would help most: " in said
    assert "its parts add up to [step_s]." in said
    half = "middle half [steps_s.quarter_s] to [steps_s.three_quarters_s]"
    assert f"<dt>step, median</dt><dd>[steps_s.median_s]<small>{half}</small>" in said
    assert "<dt>exchange hidden</dt><dd>[hidden]<small>of [exchange_s] of exchange" in said


def test_no_number_stands_without_its_key(written):
    """Texts outside of marked numbers have no unit of time, of size or per cent after a digit."""
    body = written.split("<main>")[1].split("</main>")[0]
    body = re.sub(r"<(data|text|pre|title|svg)\b.*?</\1>", "", body, flags=re.S)
    body = re.sub(r"<script.*?</script>", "", body, flags=re.S)
    plain = re.sub(r"<[^>]*>", " ", body)
    assert re.findall(r"\d (?:ms|µs|s|MB|kB|GB)\b|\d%", plain) == []


def test_numbers_of_a_comparison_are_those_of_its_summary(tmp_path):
    folder = write_comparison(tmp_path / "compared")
    text = page(*read([folder]))
    summary = json.loads((folder / "summary.json").read_text())
    numbers = Page(text).numbers
    assert len(numbers) > 60
    for number in numbers:
        assert number.of == "compare 0"
        assert number.value == at(summary, number.key), number
        check_digits(number)
    assert "at 4 ranks synchronous is first; at 8 ranks synchronous and gossip cannot be" in text
    assert "</b>local" not in text


def test_a_comparison_of_another_version_is_refused(tmp_path):
    folder = write_comparison(tmp_path / "compared")
    text = (folder / "summary.json").read_text()
    (folder / "summary.json").write_text(text.replace('"version": 1', '"version": 9'))
    with pytest.raises(ConfigError, match="this is a comparison of format version 9"):
        write_report([folder], tmp_path / "out.html")


def test_sentence_parts_add_up():
    assert sorted(name for names in GROUPS.values() for name in names) == sorted(PARTS)


def test_a_name_cannot_leave_its_place(paths):
    trace = read(paths[1:2])[0][0].explanation.graph
    run = run_of('</script><b onclick="x">', Trace(tuple(trace.tasks), trace.header))
    text = page([run])
    assert "</script><b" not in text
    assert "<b onclick" not in text
    Page(text)


def test_columns_are_written_in_as_few_bytes_as_they_need():
    values = np.array([0, 1, 127, 128, 16383, 16384, 1 << 40])
    data, found = varints(values), []
    value, shift = 0, 0
    for byte in data:
        value, shift = value | (byte & 127) << shift, shift + 7
        if byte < 128:
            found.append(value)
            value, shift = 0, 0
    assert found == values.tolist()
    assert len(data) == 1 + 1 + 1 + 2 + 2 + 3 + 6


def test_of_a_very_long_run_the_page_has_the_first_steps(paths):
    graph = read(paths[1:2])[0][0].graph
    short = shortened(graph, graph.num_tasks // 2 + 1)
    assert short.header.steps == 3
    assert short.num_tasks < graph.num_tasks * 0.6
    assert max(task.step for task in short.tasks) == 2


def test_runs_of_one_job_are_paired_and_others_are_not(paths, capsys):
    runs = [said([path], capsys) for path in paths]
    found = beside([runs[1] | {"clock": "measured"}, runs[1], runs[2]])
    (pair,) = found["predicted"]
    assert (pair["measured"], pair["simulated"]) == (0, 1)
    assert pair["step"]["error"] == 0.0
    assert pair["num_near"] == pair["num_tasks"] > 3
    assert [point["ranks"] for point in found["scaling"]["series"][1]["points"]] == [2, 4]
    assert found["scaling"]["series"][0]["points"][0]["efficiency"] == 1.0


def test_a_report_about_what_is_not_there_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="no trace is there"):
        write_report([tmp_path / "empty"], tmp_path / "out.html")
    assert not (tmp_path / "out.html").exists()
