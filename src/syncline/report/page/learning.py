"""Loss and accuracy against time, steps, samples and bytes: curves that the page draws."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from syncline.report.page.draw import legend
from syncline.report.page.markup import panel, table
from syncline.report.page.run import Run, as_json
from syncline.report.page.units import accuracy, seconds, three

ACROSS = {"time_s": "time", "step": "steps", "samples": "samples", "sent_bytes": "bytes sent"}
UPS = {"accuracy": "accuracy on test samples", "loss": "training loss", "test_loss": "test loss"}


def learning(runs: Sequence[Run]) -> str:
    """Return the curves of all runs that have some."""
    known = [(number, run) for number, run in enumerate(runs) if len(run.curve) > 1]
    if not known:
        return ""
    lines = [{"name": run.name, "points": run.curve} for _, run in known]
    charts = [{"title": "", "ups": ups_of(lines), "lines": lines}]
    rows = []
    for number, run in known:
        shown, summary = run.shown, run.summary
        cells = [
            escape(run.name),
            shown.whole("run.summary.steps"),
            shown("run.summary.loss", three),
        ]
        if summary.get("accuracy") is not None:
            cells.append(shown("run.summary.accuracy", accuracy))
        else:
            cells.append("-")
        cells.append(shown(f"run.curve.{len(run.curve) - 1}.time_s", seconds))
        rows.append([f'<span data-of="{number}">{cell}</span>' for cell in cells])
    heads = [("one", "run"), ("n", "steps"), ("n", "loss"), ("n", "accuracy"), ("n", "time")]
    body = curves("c-runs", [{"name": "", "charts": charts}]) + table(heads, rows)
    return panel("learning", "How well does it learn?", "", body)


def ups_of(lines: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
    """Return the figures that some line has at two points."""
    return [
        {"key": key, "words": words}
        for key, words in UPS.items()
        if any(sum(point.get(key) is not None for point in line["points"]) > 1 for line in lines)
    ]


def curves(name: str, choices: list[dict[str, Any]], words: str = "", key: str = "") -> str:
    """Return curves with a switch for what they are drawn against.

    `choices` are sets of charts of which one is shown; `words` name the choice, `key` the lines.
    """
    chosen = ""
    if len(choices) > 1:
        options = "".join(
            f'<option value="{at}">{escape(one["name"])}</option>' for at, one in enumerate(choices)
        )
        chosen = f"<label>{words} <select>{options}</select></label>"
    switch = "".join(
        f'<label><input type="radio" name="{name}" value="{across}"{" checked" if not at else ""}> '
        f"{said}</label>"
        for at, (across, said) in enumerate(ACROSS.items())
    )
    lines = key or legend([line["name"] for line in choices[0]["charts"][0]["lines"]])
    return (
        f'<div class="curves"><div class="tools">{chosen}<fieldset><legend>against</legend>{switch}'
        f'</fieldset></div>{lines}<div class="charts"></div>'
        f'<script type="application/json">{as_json(choices)}</script></div>'
    )
