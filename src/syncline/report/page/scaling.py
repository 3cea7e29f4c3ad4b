"""More ranks: speed and efficiency against the number of ranks, measured and predicted."""

from __future__ import annotations

from typing import Any

from syncline.report.page.draw import MARKS, Axis, Plot, apart, both
from syncline.report.page.markup import Shown, panel, table
from syncline.report.page.units import share, three, whole


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
        "The dashed line is ideal: each further rank adds as much. Filled points are measured, "
        "hollow ones predicted; the band is where a prediction lies nine times in ten, or, if the "
        "trace has no interval, nine in ten of its steps."
    )
    if found["measured_to"]:
        most = shown.whole("scaling.measured_to")
        said += f" Shaded: more ranks than the {most} that were measured."
    body = (
        f'<div class="two"><div><h3>Speed</h3>{_picture(found, "speed_up")}</div>'
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
            min(1.0, least) * 0.8, max(highest, ranks[-1] / base) * 1.15, "speed-up", is_log=True
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
        for number, one in enumerate(found["series"]):
            _series(plot, one, number, figure)
        _names(plot, found["series"], figure)
        return plot.svg()

    words = "speed-up" if is_speed else "efficiency"
    return f"<figure>{both(draw, f'{words} against ranks')}</figure>"


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
    plot.line(points, f"curve {css}")
    is_hollow = " hollow" if one["clock"] == "virtual" else ""
    for x, y in points:
        plot.mark(x, y, f"mark {css}{is_hollow}", MARKS[number % len(MARKS)])


def _names(plot: Plot, series: list[dict[str, Any]], figure: str) -> None:
    """Write each line's name above its last point, none over another."""
    ends = [one["points"][-1] for one in series]
    wanted = [plot.y(point[figure]) - 10 for point in ends]
    places = apart(wanted, 15, plot.top + 6, plot.height - plot.bottom - 4)
    for one, point, y in zip(series, ends, places, strict=True):
        clock = "measured" if one["clock"] == "measured" else "predicted"
        is_left = plot.x(point["ranks"]) > plot.width / 2
        x = plot.x(point["ranks"]) + (4 if is_left else 8)
        plot.text(x, y, f"{one['strategy']}, {clock}", "mark end" if is_left else "mark")


def _table(shown: Shown, found: dict[str, Any]) -> str:
    rows = []
    for at, one in enumerate(found["series"]):
        for place, _ in enumerate(one["points"]):
            key = f"scaling.series.{at}.points.{place}"
            rows.append(
                [
                    one["strategy"],
                    "measured" if one["clock"] == "measured" else "predicted",
                    shown.whole(f"{key}.ranks"),
                    shown.three(f"{key}.samples_per_s"),
                    f"{shown.three(f'{key}.low')} to {shown.three(f'{key}.high')}",
                    shown(f"{key}.speed_up", lambda value: f"{three(value)}x"),
                    shown.share(f"{key}.efficiency"),
                ]
            )
    heads = [
        ("", "strategy"),
        ("hide-small", ""),
        ("n", "ranks"),
        ("n", "samples/s"),
        ("n hide-small", "nine in ten"),
        ("n", "speed-up"),
        ("n", "efficiency"),
    ]
    return table(heads, rows)
