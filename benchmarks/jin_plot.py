"""The plots of docs/jin.md, as SVG: readable without colours, in light and dark."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from xml.sax.saxutils import escape

WIDTH, HEIGHT, MARGIN = 640, 360, 56
LABELS = 150
"""Room for labels on the right."""
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b58900", "#7a7a7a")
DASHES = ("", "8 3", "2 3", "8 3 2 3", "12 4", "4 4")
STYLE = (
    "text{font:12px sans-serif;fill:#222}.axis{stroke:#888;fill:none}"
    "@media(prefers-color-scheme:dark){text{fill:#ddd}}"
)

Line = Sequence[tuple[float, float, float, float]]
"""Points: x, y, and the least and the most of y."""


def lines_plot(
    lines: Mapping[str, Line], title: str, x_words: str, y_words: str, *, is_log: bool
) -> str:
    """Return a plot of some lines, each with its name at its end. Both axes may be logarithmic."""
    points = [point for line in lines.values() for point in line]
    frame = _Frame(points, is_log=is_log)
    body = [*frame.axes(x_words, y_words)]
    ends = _spread([(name, frame.y(line[-1][1])) for name, line in lines.items() if line])
    for number, (name, line) in enumerate(lines.items()):
        if line:
            body += frame.draw(name, line, number, ends[name])
    inside = "\n".join(body)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(title)}"><style>{STYLE}</style>\n'
        f'<text x="{MARGIN}" y="18">{escape(title)}</text>\n{inside}\n</svg>\n'
    )


class _Frame:
    def __init__(self, points: Sequence[tuple[float, ...]], *, is_log: bool) -> None:
        self._is_log = is_log
        xs, ys = [p[0] for p in points] or [1.0], [y for p in points for y in p[1:]] or [1.0]
        self._x, self._y = self._range(xs), self._range(ys)
        self._xs = sorted({p[0] for p in points})

    def _range(self, values: Sequence[float]) -> tuple[float, float]:
        low, high = (self._scale(edge(values)) for edge in (min, max))
        room = (high - low or 1.0) * 0.05
        return low - room, high + room

    def _scale(self, value: float) -> float:
        return math.log2(value) if self._is_log else value

    def x(self, value: float) -> float:
        low, high = self._x
        part = (self._scale(value) - low) / (high - low)
        return MARGIN + part * (WIDTH - MARGIN - LABELS)

    def y(self, value: float) -> float:
        low, high = self._y
        part = (self._scale(value) - low) / (high - low)
        return HEIGHT - MARGIN - part * (HEIGHT - 2 * MARGIN)

    def axes(self, x_words: str, y_words: str) -> Iterator[str]:
        left, right, bottom = MARGIN, WIDTH - LABELS, HEIGHT - MARGIN
        yield f'<path class="axis" d="M{left} {MARGIN}V{bottom}H{right}"/>'
        for value in self._xs if self._is_log else _ticks(self._x):
            at = self.x(value)
            yield f'<text x="{at:.1f}" y="{bottom + 18}" text-anchor="middle">{value:g}</text>'
        for value in self._y_ticks():
            at = self.y(value)
            yield f'<path class="axis" stroke-dasharray="1 4" d="M{left} {at:.1f}H{right}"/>'
            yield f'<text x="{left - 6}" y="{at + 4:.1f}" text-anchor="end">{value:g}</text>'
        middle = (left + right) / 2
        yield f'<text x="{middle}" y="{HEIGHT - 14}" text-anchor="middle">{escape(x_words)}</text>'
        yield f'<text x="{left}" y="{MARGIN - 14}">{escape(y_words)}</text>'

    def _y_ticks(self) -> list[float]:
        if not self._is_log:
            return _ticks(self._y)
        low, high = self._y
        return [2.0**power for power in range(math.ceil(low), math.floor(high) + 1)]

    def draw(self, name: str, line: Line, number: int, label_y: float) -> Iterator[str]:
        colour, dash = COLOURS[number % len(COLOURS)], DASHES[number % len(DASHES)]
        style = f'stroke="{colour}" fill="none" stroke-width="1.8" stroke-dasharray="{dash}"'
        path = "L".join(f"{self.x(p[0]):.1f} {self.y(p[1]):.1f}" for p in line)
        yield f'<path d="M{path}" {style}><title>{escape(name)}</title></path>'
        for x, _, least, most in line:
            if most > least:
                at = self.x(x) + (number - 2.5) * 1.5  # beside each other, not on top
                ends = f"M{at:.1f} {self.y(least):.1f}V{self.y(most):.1f}"
                yield f'<path d="{ends}" stroke="{colour}" stroke-width="1.2"/>'
        x, y = self.x(line[-1][0]), self.y(line[-1][1])
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colour}"/>'
        left = WIDTH - LABELS + 8
        thin = f'stroke="{colour}" fill="none" stroke-width="0.7"'
        yield f'<path d="M{x + 3:.1f} {y:.1f}L{left} {label_y:.1f}" {thin}/>'
        yield f'<path d="M{left} {label_y:.1f}h22" {style}/>'
        yield f'<text x="{left + 27}" y="{label_y + 4:.1f}">{escape(name)}</text>'


def _ticks(edges: tuple[float, float]) -> list[float]:
    low, high = edges
    step = 10.0 ** math.floor(math.log10(high - low))
    step *= next((part for part in (0.1, 0.2, 0.5, 1.0) if (high - low) / (part * step) <= 7), 1.0)
    first = math.ceil(low / step)
    return [round(step * k, 10) for k in range(first, math.floor(high / step) + 1)]


def _spread(ends: Sequence[tuple[str, float]]) -> dict[str, float]:
    """Return a height for each label, at least a line apart."""
    found: dict[str, float] = {}
    last = -math.inf
    for name, y in sorted(ends, key=lambda one: one[1]):
        found[name] = last = max(y, last + 15)
    return found


def mean_curves(rows: Sequence[dict[str, str]], what: str) -> Line:
    """Return the mean accuracy over seeds against the mean of a column, point by point."""
    by_point: dict[int, list[dict[str, str]]] = {}
    for row in rows:
        by_point.setdefault(int(row["point"]), []).append(row)
    found = []
    for _, same in sorted(by_point.items()):
        ys = [float(row["accuracy"]) for row in same if row["accuracy"]]
        if ys:
            x = statistics.fmean(float(row[what]) for row in same)
            found.append((x, statistics.fmean(ys), min(ys), max(ys)))
    return found


def ratios(table: dict[str, Any], to: str) -> dict[str, Line]:
    """Return each variant's time to target over that of variant `to`, by ranks, seed by seed."""
    times = {
        (row["variant"], row["ranks"]): row["to_target"]["time_s"]["seeds"] for row in table["rows"]
    }
    found: dict[str, list[tuple[float, float, float, float]]] = {}
    for (name, ranks), by_seed in times.items():
        of_first = times.get((to, ranks), {})
        both = [s for s, one in by_seed.items() if one is not None and of_first.get(s) is not None]
        if both and len(both) == len(by_seed):
            parts = [by_seed[s] / of_first[s] for s in both]
            middle = math.exp(statistics.fmean(map(math.log, parts)))
            found.setdefault(name, []).append((ranks, middle, min(parts), max(parts)))
    return {name: tuple(line) for name, line in found.items()}
