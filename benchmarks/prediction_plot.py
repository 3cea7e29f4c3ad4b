"""A scatter plot of predicted against measured steps, as SVG: both axes are logarithmic."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Any
from xml.sax.saxutils import escape

from benchmarks.prediction_cases import Case

SIZE, MARGIN = 560, 64
BAND = 0.12
MARKS = {"machine": "circle", "1gbit": "square", "100mbit": "cross"}
"""By place, so that it can be read without colours."""
COLOURS = {"machine": "#0072b2", "1gbit": "#d55e00", "100mbit": "#009e73"}
STYLE = (
    "text{font:13px sans-serif;fill:#222}line,path{stroke:#888;fill:none}"
    "@media(prefers-color-scheme:dark){text{fill:#ddd}}"
)


def plot(rows: Sequence[dict[str, Any]]) -> str:
    """Return the plot; each row is a case of `benchmarks.prediction`."""
    times_s = [row["predicted_s"] for row in rows] + [_middle(row) for row in rows]
    low, high = math.log10(min(times_s)) - 0.1, math.log10(max(times_s)) + 0.1
    lines = [*_axes(low, high), *(_mark(row, low, high) for row in rows), *_legend(rows)]
    body = "\n".join(lines)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {SIZE} {SIZE}" role="img" '
        f'aria-label="predicted against measured steps"><style>{STYLE}</style>\n{body}\n</svg>\n'
    )


def _middle(row: dict[str, Any]) -> float:
    return statistics.median(row["measured_s"])


def _place(seconds: float, low: float, high: float) -> float:
    return MARGIN + (math.log10(seconds) - low) / (high - low) * (SIZE - 2 * MARGIN)


def _axes(low: float, high: float) -> Iterator[str]:
    start, end = MARGIN, SIZE - MARGIN
    yield f'<path d="M{start} {start}V{end}H{end}"/>'
    for factor in (1 - BAND, 1.0, 1 + BAND):
        shift = math.log10(factor) / (high - low) * (end - start)
        dash = "" if factor == 1.0 else ' stroke-dasharray="4 4"'
        yield (
            f'<line x1="{start}" y1="{end - shift:.1f}" x2="{end}" y2="{start - shift:.1f}"{dash}/>'
        )
    for power in range(math.ceil(low), math.floor(high) + 1):
        for digit in (1, 2, 5):
            seconds = digit * 10.0**power
            if low <= math.log10(seconds) <= high:
                at, text = _place(seconds, low, high), f"{seconds * 1e3:g}</text>"
                yield f'<text x="{at:.1f}" y="{end + 18}" text-anchor="middle">{text}'
                yield f'<text x="{start - 6}" y="{SIZE - at + 4:.1f}" text-anchor="end">{text}'
    yield f'<text x="{SIZE / 2}" y="{SIZE - 16}" text-anchor="middle">measured step, ms</text>'
    yield f'<text x="{MARGIN}" y="{MARGIN - 28}">predicted step, ms; dashed: 12 % off</text>'


def _mark(row: dict[str, Any], low: float, high: float) -> str:
    case = Case(*row["case"])
    x, y = _place(_middle(row), low, high), SIZE - _place(row["predicted_s"], low, high)
    return _shape(case.rate or "machine", x, y, case.key)


def _shape(place: str, x: float, y: float, title: str) -> str:
    colour, about = COLOURS[place], f"<title>{escape(title)}</title>"
    style = f'style="stroke:{colour};fill:none;stroke-width:1.5"'
    match MARKS[place]:
        case "circle":
            return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" {style}>{about}</circle>'
        case "square":
            corner = f'x="{x - 3.5:.1f}" y="{y - 3.5:.1f}"'
            return f'<rect {corner} width="7" height="7" {style}>{about}</rect>'
    cross = f"M{x - 4:.1f} {y - 4:.1f}l8 8m-8 0l8 -8"
    return f'<path d="{cross}" {style}>{about}</path>'


def _legend(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    places = dict.fromkeys(Case(*row["case"]).rate or "machine" for row in rows)
    for at, place in enumerate(places):
        y = SIZE - MARGIN - 14 - 20 * at
        yield _shape(place, SIZE - 190, y, place)
        where = "this machine" if place == "machine" else f"lab, {place}"
        yield f'<text x="{SIZE - 176}" y="{y + 4}">{where}</text>'
