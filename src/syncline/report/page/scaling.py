"""More ranks: speed and efficiency against the number of ranks, measured and predicted."""

from __future__ import annotations

from html import escape
from typing import Any

from syncline.report.page.draw import DASHES, MARKS, Axis, Plot, both, sample
from syncline.report.page.markup import Shown, panel, table
from syncline.report.page.units import plain, share, three, whole

_CLOCKS = {"measured": "measured", "virtual": "predicted"}


def scaling(numbers: dict[str, Any]) -> str:
    """Return the panel; nothing if all runs have the same number of ranks."""
    found = numbers["scaling"]
    if found is None:
        return ""
    shown = Shown(numbers)
    base = (
        f"Base: {shown.whole('scaling.base_ranks')} ranks, "
        f"{shown.three('scaling.base_samples_per_s')} samples a second."
    )
    said = (
        "The grey line is ideal: each further rank adds as much. "
        "The band is where a prediction lies nine times in ten, or, if the "
        "trace has no interval, nine in ten of its steps."
    )
    if found["measured_to"]:
        most = shown.whole("scaling.measured_to")
        said += f" Shaded: more ranks than the {most} that were measured."
    body = (
        f'{_key(found)}<div class="two"><div><h3>Speed</h3>{_picture(found, "speed_up")}</div>'
        f"<div><h3>Efficiency</h3>{_picture(found, 'efficiency')}</div></div>"
        f'<p class="soft small">{said}</p>{_table(shown, found)}'
    )
    return panel("more", "What do more ranks bring?", base, body)


def _picture(found: dict[str, Any], figure: str) -> str:
    points = [point for one in found["series"] for point in one["points"]]
    ranks = sorted({point["ranks"] for point in points})
    is_speed = figure == "speed_up"
    base = found["base_ranks"]
    highest = max(
        point[figure] * max(1.0, point["high"] / point["samples_per_s"]) for point in points
    )
    if is_speed:
        least = min(point[figure] for point in points)
        up = Axis(
            min(1.0, least) * 0.8,
            max(highest, ranks[-1] / base) * 1.15,
            "speed-up",
            is_log=True,
            written=plain,
        )
    else:
        up = Axis(0.0, max(1.05, highest * 1.05), "efficiency", written=share)

    def draw(width: int) -> str:
        across = Axis(ranks[0] * 0.93, ranks[-1] * 1.07, "ranks", True, whole, ranks)
        plot = Plot(width, 270, across, up)
        if 0 < found["measured_to"] < ranks[-1]:
            plot.shade(found["measured_to"], across.high, "beyond")
        ideal = [(n, n / base if is_speed else 1.0) for n in (ranks[0], ranks[-1])]
        plot.line(ideal, "l-ideal")
        for one in found["series"]:
            _series(plot, one, _number(found, one), figure)
        return plot.svg()

    words = "speed-up" if is_speed else "efficiency"
    return f"<figure>{both(draw, f'{words} against ranks')}</figure>"


def _number(found: dict[str, Any], one: dict[str, Any]) -> int:
    """Return the number of a strategy: measured and predicted have the same colour and shape."""
    return list(dict.fromkeys(other["strategy"] for other in found["series"])).index(
        one["strategy"]
    )


def _key(found: dict[str, Any]) -> str:
    inside = "".join(
        f"<li>{sample(_number(found, one), is_hollow=one['clock'] != 'measured')}"
        f"{escape(one['strategy'])}, {_CLOCKS[one['clock']]}</li>"
        for one in found["series"]
    )
    return f'<ul class="key lines">{inside}</ul>'


def _series(plot: Plot, one: dict[str, Any], number: int, figure: str) -> None:
    """Draw a line: measured points with whiskers, or a predicted band."""
    css = f"c-{number % len(MARKS)}"
    points = [(float(point["ranks"]), point[figure]) for point in one["points"]]
    ends = [
        [
            (float(point["ranks"]), point[figure] * point[end] / point["samples_per_s"])
            for point in one["points"]
        ]
        for end in ("low", "high")
    ]
    if one["clock"] == "measured":
        for low, high in zip(*ends, strict=True):
            plot.whisker((low[0], low[0]), (low[1], high[1]), f"whisker {css}")
    elif len(points) > 1:
        plot.band(ends[0], ends[1], f"band {css}")
    else:
        plot.whisker((points[0][0],) * 2, (ends[0][0][1], ends[1][0][1]), f"whisker {css}")
    is_measured = one["clock"] == "measured"
    plot.line(points, f"curve {css}", "" if is_measured else DASHES[1])
    for x, y in points:
        hollow = "" if is_measured else " hollow"
        plot.mark(x, y, f"mark {css}{hollow}", MARKS[number % len(MARKS)])


def _table(shown: Shown, found: dict[str, Any]) -> str:
    rows = []
    for at, one in enumerate(found["series"]):
        for place, _ in enumerate(one["points"]):
            key = f"scaling.series.{at}.points.{place}"
            rows.append(
                [
                    one["strategy"],
                    _CLOCKS[one["clock"]],
                    shown.whole(f"{key}.ranks"),
                    shown.three(f"{key}.samples_per_s"),
                    f"{shown.three(f'{key}.low')} to {shown.three(f'{key}.high')}",
                    shown(f"{key}.speed_up", lambda value: f"{three(value)}x"),
                    shown.share(f"{key}.efficiency"),
                ]
            )
    heads = [
        ("", "strategy"),
        ("hide-small", "clock"),
        ("n", "ranks"),
        ("n", "samples/s"),
        ("n hide-small", "nine in ten"),
        ("n", "speed-up"),
        ("n", "efficiency"),
    ]
    return table(heads, rows)
