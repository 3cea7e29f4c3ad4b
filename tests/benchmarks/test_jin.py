"""docs/jin.md is written from a comparison's files: its tables and plots have their numbers."""

from __future__ import annotations

import csv
import math
import re
from xml.etree import ElementTree

import pytest
from benchmarks.jin_plot import mean_curves, ratios

from benchmarks import jin
from comparing import compare, write_study
from syncline.compare.cell import Found, Point

RATES = {"synchronous": 1.0, "gossip": 2.0}
"""How fast each strategy comes to the target."""


def run(cell):
    """A run that was made up: accuracy grows by 0.2 in each evaluation."""
    points = tuple(
        Point(
            step=5 * number,
            samples=120 * number,
            time_s=number * (1 + cell.seed) / RATES[cell.variant],
            sent_bytes=100 * number,
            loss=1.0,
            test_loss=1.0,
            accuracy=0.2 * number,
        )
        for number in range(1, 5)
    )
    return Found(points=points, figures={"samples_per_s": 100.0}, rank_samples=(120,) * 4)


@pytest.fixture
def written(tmp_path, monkeypatch):
    summary, _ = compare(write_study(tmp_path, ranks=(2, 4)), tmp_path / "out", run)
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "jin.md").write_text(f"# Before\n{jin.BEGIN}\nto be replaced\n{jin.END}\nAfter\n")
    monkeypatch.setattr("sys.argv", ["jin", str(tmp_path / "out"), "--docs", str(docs)])
    monkeypatch.setattr(jin, "_SHOWN", (4,))
    jin.main()
    jin.main()  # what was found is written anew, not a second time
    return summary, docs, tmp_path / "out" / "points.csv"


def test_the_page_keeps_its_words_and_has_the_numbers(written):
    _, docs, _ = written
    text = (docs / "jin.md").read_text()
    assert text.startswith("# Before\n")
    assert text.endswith("After\n")
    assert "to be replaced" not in text
    assert text.count("### First by time to target") == 1
    assert "| first | calm | gossip | gossip |" in text
    (row,) = re.findall(r"\| 4 \| gossip \| .*", text.partition("### first, calm")[2])[:1]
    assert "0.02 (not tuned) | 2.25 (1.5 to 3) | 2 of 2 | 0.8000" in row
    for name in re.findall(r"\(([\w-]+\.svg)\)", text):
        assert (docs / name).exists()


def test_plots_are_svg_with_a_line_for_each_strategy(written):
    _, docs, _ = written
    plots = sorted(docs.glob("*.svg"))
    assert len(plots) == 4  # two scenarios, by ranks and by time
    for path in plots:
        texts = [one.text for one in ElementTree.parse(path).iter() if one.tag.endswith("text")]
        assert {"synchronous", "gossip"} <= {*texts}


def test_what_is_drawn_is_in_the_files(written):
    summary, _, points = written
    found = ratios(summary["tables"][0], "synchronous")
    assert found["gossip"] == ((2, 0.5, 0.5, 0.5), (4, 0.5, 0.5, 0.5))
    with points.open() as file:
        rows = [
            row
            for row in csv.DictReader(file)
            if (row["variant"], row["scenario"], row["ranks"]) == ("synchronous", "calm", "4")
        ]
    curve = mean_curves(rows, "time_s")
    assert [point[0] for point in curve] == [1.5, 3.0, 4.5, 6.0]
    assert math.isclose(curve[2][1], 0.6)
