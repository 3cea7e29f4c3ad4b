"""The time to the target accuracy by number of ranks, with the spread over seeds."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from syncline.report.page.compare_folder import Comparison
from syncline.report.page.draw import MARKS, Axis, Plot, both, dashes_of, hollow_of, legend
from syncline.report.page.markup import Shown, panel, table
from syncline.report.page.units import accuracy, whole


def target(one: Comparison) -> str:
    """Return the time to the target by number of ranks, with the spread over seeds."""
    if one.summary["target"] is None:
        return ""
    shown, body = Shown(one.summary), ""
    names = one.variants
    for at, found in enumerate(one.summary["tables"]):
        body += f"{title(found)}{_times_picture(found, names)}{_times_table(shown, at, found)}"
    ask = f"Accuracy {shown('target', accuracy)}; lines are from the least to the most over seeds."
    return panel("target", "How long to the target?", ask, legend(names) + body)


def title(found: dict[str, Any]) -> str:
    """Return the heading of a table: its scenario and its grid."""
    said = "; ".join(
        escape(found[key]) for key in ("batch_rule", "scenario_words") if found.get(key)
    )
    name = ", ".join(escape(found[key]) for key in ("scenario", "grid") if found.get(key))
    return f'<h3>{name}</h3><p class="soft small">{said}</p>'


def _times_picture(found: dict[str, Any], names: Sequence[str]) -> str:
    """Draw the time to the target against the number of ranks."""
    rows = [row for row in found["rows"] if row["to_target"] and row["to_target"]["time_s"]["mean"]]
    if not rows:
        return "<p class='soft'>Nobody reached the target.</p>"
    ranks = sorted({row["ranks"] for row in found["rows"]})
    least = min(row["to_target"]["time_s"]["least"] for row in rows)
    most = max(row["to_target"]["time_s"]["most"] for row in rows)
    width_of = len(ranks) > 1

    def draw(width: int) -> str:
        wide = width if width < 400 else 1000
        across = Axis(ranks[0] * 0.85, ranks[-1] * 1.18, "ranks", width_of, whole, ranks)
        up = Axis(least * 0.85, most * 1.18, "time to the target, seconds", is_log=True)
        plot = Plot(wide, 280, across, up)
        for name in names:
            number, hollow = names.index(name) % len(MARKS), hollow_of(names.index(name))
            mine = [row for row in rows if row["variant"] == name]
            shift = 1 + 0.012 * (names.index(name) - len(names) / 2)
            points = [(row["ranks"] * shift, row["to_target"]["time_s"]["mean"]) for row in mine]
            if len(points) > 1:
                plot.line(points, f"curve c-{number}", dashes_of(names.index(name)))
            for row, (x, y) in zip(mine, points, strict=True):
                times = row["to_target"]["time_s"]
                plot.whisker((x, x), (times["least"], times["most"]), f"whisker c-{number}")
                plot.mark(
                    x, y, f"mark c-{number}{hollow}", MARKS[number], f"{name}, {row['ranks']} ranks"
                )
        return plot.svg()

    return f"<figure>{both(draw, 'time to the target against ranks')}</figure>"


def _times_table(shown: Shown, at: int, found: dict[str, Any]) -> str:
    """Return each strategy's time to the target at each number of ranks."""
    ranks = found["ranks"]
    rows = []
    for name in found["variants"]:
        cells = [escape(name)]
        for number in ranks:
            place = _place(found, number, name)
            cells.append("-" if place is None else _reached(shown, at, place, found["rows"][place]))
        rows.append(cells)
    return table([("", "strategy"), *(("n", f"{number} ranks") for number in ranks)], rows)


def _place(found: dict[str, Any], ranks: int, variant: str) -> int | None:
    for place, row in enumerate(found["rows"]):
        if row["ranks"] == ranks and row["variant"] == variant:
            return place
    return None


def _reached(shown: Shown, at: int, place: int, row: dict[str, Any]) -> str:
    """Return the time to the target and its range, or how many seeds did not reach it."""
    key, to_target = f"tables.{at}.rows.{place}.to_target", row["to_target"]
    if not to_target or to_target["time_s"]["mean"] is None:
        return "not reached"
    some = ""
    if to_target["reached"] < to_target["of"]:
        some = f"<br>{shown.whole(f'{key}.reached')} of {shown.whole(f'{key}.of')}"
    ends = [shown.seconds(f"{key}.time_s.{end}") for end in ("least", "most")]
    mean = shown.seconds(f"{key}.time_s.mean")
    return f'{mean}<br><span class="soft small">{ends[0]} to {ends[1]}</span>{some}'
