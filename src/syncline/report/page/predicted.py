"""Predicted beside measured: the step, and each kind of task."""

from __future__ import annotations

from html import escape
from typing import Any

from syncline.perf.beside import BAND
from syncline.report.page.draw import Axis, Plot, both
from syncline.report.page.markup import Shown, panel, table
from syncline.report.page.units import off, seconds, share

_SHAPES = {
    "forward": ("d-forward", "circle"),
    "backward": ("d-backward", "circle"),
    "reduce": ("d-reduce", "square"),
    "gather": ("d-gather", "diamond"),
    "input": ("d-input", "triangle"),
}
_OTHER = ("d-other", "cross")
_MOST_ROWS = 12


def predicted(numbers: dict[str, Any], at: int, names: list[str]) -> str:
    """Return the panel of one pair; `names` are those of all runs."""
    pair, shown, key = numbers["predicted"][at], Shown(numbers), f"predicted.{at}"
    step, band = pair["step"], shown(f"{key}.band", share)
    first, second = (escape(names[pair[end]]) for end in ("simulated", "measured"))
    interval = "No interval is in the simulated trace. "
    if step["interval_s"]:
        ends = [shown.seconds(f"{key}.step.interval_s.{end}") for end in (0, 1)]
        lies = "inside" if step["is_inside"] else "outside"
        interval = f"Nine times in ten it was to be {ends[0]} to {ends[1]}; it is {lies}. "
    ask = (
        f"<b>{first}</b> predicts <b>{second}</b>. The median step was "
        f"predicted at {shown.seconds(f'{key}.step.predicted_s')} and took "
        f"{shown.seconds(f'{key}.step.measured_s')}: {shown(f'{key}.step.error', off)}. {interval}"
        f"{shown.whole(f'{key}.num_near')} of {shown.whole(f'{key}.num_tasks')} kinds of tasks are "
        f"within {band}; weighted by time they are off by {shown(f'{key}.error', share)}."
    )
    if not pair["tasks"]:
        return panel("predicted", "Was the prediction right?", ask, "")
    body = (
        f'<div class="two"><div><figure>{_scatter(pair["tasks"])}<figcaption>A point is a kind of '
        "task and its bucket, without waiting, in a step of a rank; lines are nine in ten of them, "
        f"predicted and measured. The band is {band}. ● compute ■ reduce ◆ gather ▲ input "
        "✚ other. Exchanges of several buckets may run at once; each counts its whole time."
        f"</figcaption></figure></div><div><h3>Where the seconds differ most</h3>"
        f"{_table(shown, key, pair['tasks'])}</div></div>"
    )
    return panel("predicted", "Was the prediction right?", ask, body)


def _scatter(tasks: list[dict[str, Any]]) -> str:
    times = [
        one[name] for one in tasks for name in ("predicted_s", "measured_s", "measured_high_s")
    ]
    low, high = min(times) * 0.5e6, max(times) * 1.7e6

    def draw(width: int) -> str:
        across = Axis(low, high, "predicted, µs", is_log=True)
        up = Axis(low, high, "measured, µs", is_log=True)
        plot = Plot(width, 310, across, up)
        ends = (low, high)
        under, over = ([(x, x * factor) for x in ends] for factor in (1 - BAND, 1 + BAND))
        plot.band(under, over, "b-ten")
        plot.line([(x, x) for x in ends], "l-ideal")
        for one in tasks:
            x, y = one["predicted_s"] * 1e6, one["measured_s"] * 1e6
            around = [max(low, one[name] * 1e6) for name in ("measured_low_s", "measured_high_s")]
            plot.whisker((x, x), (around[0], around[1]), "l-raw")
            ends_x = [max(low, one[name] * 1e6) for name in ("predicted_low_s", "predicted_high_s")]
            plot.whisker((ends_x[0], ends_x[1]), (y, y), "l-raw")
        for one in tasks:
            css, shape = _SHAPES.get(one["task"].partition(" ")[0], _OTHER)
            title = (
                f"{one['task']}: predicted {seconds(one['predicted_s'])}, "
                f"measured {seconds(one['measured_s'])}"
            )
            plot.mark(one["predicted_s"] * 1e6, one["measured_s"] * 1e6, css, shape, title)
        return plot.svg()

    return both(draw, "predicted against measured")


def _table(shown: Shown, key: str, tasks: list[dict[str, Any]]) -> str:
    rows = []
    for at, one in enumerate(tasks[:_MOST_ROWS]):
        own = f"{key}.tasks.{at}"
        ends = [shown.seconds(f"{own}.measured_{end}_s") for end in ("low", "high")]
        css = ' class="bad"' if abs(one["error"]) > 0.25 else ""
        rows.append(
            [
                one["task"],
                shown.seconds(f"{own}.predicted_s"),
                shown.seconds(f"{own}.measured_s"),
                f"{ends[0]} to {ends[1]}",
                f"<span{css}>{shown(f'{own}.error', off)}</span>",
            ]
        )
    heads = [
        ("", "task"),
        ("n", "predicted"),
        ("n", "measured"),
        ("n hide-small", "nine in ten"),
        ("n", "error"),
    ]
    return table(heads, rows)
