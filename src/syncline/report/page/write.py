"""Writes a report: one HTML file that holds everything, and asks for nothing.

`write_report` reads what paths name; `write_page` takes runs and comparisons that are at hand.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path

from syncline.files import explained, write_atomically
from syncline.perf.beside import beside
from syncline.report.page import comparison
from syncline.report.page.compare_folder import Comparison
from syncline.report.page.exchange import exchange, together
from syncline.report.page.job import job
from syncline.report.page.learning import learning
from syncline.report.page.markup import label_rules, panel
from syncline.report.page.predicted import predicted
from syncline.report.page.run import Run, as_json, check, read
from syncline.report.page.scaling import scaling
from syncline.report.page.shortened import packed
from syncline.report.page.steps import where
from syncline.report.page.verdict import cards, side_by_side, verdict
from syncline.report.page.what_if import bars

SCRIPTS = ("data", "graph", "lanes", "timeline", "path", "moving", "whatif", "plot", "page")
_LINKS = {
    "winners": "Winners",
    "target": "Time to target",
    "compared": "Curves",
    "whatif": "What if",
    "where": "Where",
    "when": "When",
    "exchange": "Exchange",
    "predicted": "Predicted",
    "more": "More ranks",
    "learning": "Learning",
    "tuned": "Settings",
    "job": "Job",
}


def write_report(paths: Sequence[Path], out: Path) -> None:
    """Write the report about traces, run folders and folders of a comparison to one file."""
    runs, comparisons = read(paths)
    write_page(runs, out, comparisons)


def write_page(runs: Sequence[Run], out: Path, comparisons: Sequence[Comparison] = ()) -> None:
    """Write the report about these runs and comparisons, whole or not at all."""
    check(runs, comparisons)
    text = page(runs, comparisons)
    with explained(out):
        write_atomically(out, text.encode())


def page(runs: Sequence[Run], comparisons: Sequence[Comparison] = ()) -> str:
    """Return the file's text."""
    numbers = beside([run.numbers for run in runs if run.is_traced])
    compared = "".join(comparison.panels(at, one) for at, one in enumerate(comparisons))
    panels = compared + _panels(runs, numbers)
    names = [run.name for run in runs] + [one.name for one in comparisons]
    filled = {
        "TITLE": escape(f"{', '.join(names[:3])} - Syncline report"),
        "CSS": _dark_by_system(_asset("page.css")) + label_rules(),
        "JS": "".join(_asset(f"{name}.js") for name in SCRIPTS),
        "LINKS": _links(panels),
        "PANELS": panels,
        "DATA": "".join(_data(number, run) for number, run in enumerate(runs) if run.is_traced),
    }
    return _fill(_asset("page.html"), filled)


def _panels(runs: Sequence[Run], numbers: dict[str, object]) -> str:
    """Return the panels of runs: those of each run, and those of all."""
    if not runs:
        return ""
    traced = [run for run in runs if run.is_traced]
    names = [run.name for run in traced]
    pairs = numbers["predicted"]
    assert isinstance(pairs, list)
    found = [cards(runs), _each(runs, verdict), side_by_side(runs)]
    if traced:
        ask = "The recorded tasks, with what each waited for, are timed again with other costs."
        body = _fill(_asset("whatif.html"), {"BARS": _each(runs, bars, only_traced=True)})
        found.append(_traced(panel("whatif", "What if ...?", ask, body)))
        found.append(_each(runs, where, only_traced=True))
        ask = (
            "Each rank has two lanes: compute above, comm below. Outlined in red is the critical "
            "path: its tasks alone decide how long the run takes."
        )
        found.append(_traced(panel("when", "What happened when?", ask, _asset("timeline.html"))))
        found.append(_each(runs, exchange, only_traced=True))
    found.append(_each(runs, together))
    found += [
        f'<div data-of="all" data-pair="{_pair(pair, runs)}" hidden>'
        f"{predicted(numbers, at, names)}</div>"
        for at, pair in enumerate(pairs)
    ]
    found.append(f'<div data-of="all">{scaling(numbers)}</div>')
    found += [learning(runs), _each(runs, job)]
    return "".join(found)


def _each(runs: Sequence[Run], draw: object, *, only_traced: bool = False) -> str:
    """Return a panel of every run, of which one is shown at a time."""
    assert callable(draw)
    return "".join(
        f'<div data-run="{number}" data-of="{number}"{" hidden" * (number > 0)}>{draw(run)}</div>'
        for number, run in enumerate(runs)
        if run.is_traced or not only_traced
    )


def _pair(pair: dict[str, int], runs: Sequence[Run]) -> str:
    """Return the numbers of a pair's runs in the page: runs without a trace have one, too."""
    places = [number for number, run in enumerate(runs) if run.is_traced]
    return f"{places[pair['measured']]} {places[pair['simulated']]}"


def _traced(text: str) -> str:
    return f"<div data-traced>{text}</div>"


def _data(number: int, run: Run) -> str:
    """Return a run's graph for the page to unpack."""
    facts, columns = packed(run.graph)
    return (
        f'<script type="application/json" id="facts-{number}">{as_json(facts)}</script>'
        f'<script type="text/plain" id="data-{number}">{columns}</script>'
    )


def _links(panels: str) -> str:
    return "".join(
        f'<a href="#{name}">{words}</a>'
        for name, words in _LINKS.items()
        if f' data-panel="{name}"' in panels
    )


def _dark_by_system(css: str) -> str:
    """Give the dark colours also to readers without JavaScript whose system is dark."""
    block = re.search(r'\[data-theme="dark"\] \{(.*?)\n\}', css, re.S)
    assert block is not None
    rule = ":root:not([data-theme]) {" + block[1] + "}"
    return f"{css}@media (prefers-color-scheme: dark) {{ {rule} }}"


def _asset(name: str) -> str:
    return (files("syncline.report.page") / "assets" / name).read_text(encoding="utf-8")


def _fill(text: str, filled: dict[str, str]) -> str:
    """Put texts in place of their names; what is put in is not looked at again."""
    return re.sub(r"\{\{(\w+)\}\}", lambda match: filled.get(match[1], ""), text)
