"""Still pictures as SVG: axes, lines, bands and dots.

Text is never scaled: each picture is drawn twice, for wide and for narrow windows (`both`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape

from syncline.report.page.units import three

Point = tuple[float, float]
WIDE, NARROW = 540, 336


@dataclass(frozen=True)
class Axis:
    """One axis: its range, its name, and how numbers on it are written."""

    low: float
    high: float
    label: str = ""
    is_log: bool = False
    written: Callable[[float], str] = three
    ticks: Sequence[float] | None = None

    def share(self, value: float) -> float:
        """Return where a value lies, 0 at the low end, 1 at the high one."""
        low, high = self.low, self.high
        if self.is_log:
            low, high, value = math.log(low), math.log(high), math.log(max(value, low * 1e-9))
        return (value - low) / (high - low) if high > low else 0.5

    def places(self, count: int) -> Sequence[float]:
        if self.ticks is not None:
            return [one for one in self.ticks if self.low <= one <= self.high * (1 + 1e-9)]
        return _powers(self.low, self.high) if self.is_log else ticks(self.low, self.high, count)


def ticks(low: float, high: float, count: int) -> list[float]:
    """Return round numbers that cover a range.

    >>> ticks(0, 170, 4)
    [0.0, 50.0, 100.0, 150.0]
    """
    raw = (high - low) / max(1, count)
    if raw <= 0:
        return [low]
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(size * m for m in (1, 2, 2.5, 5, 10) if size * m >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [n * step for n in range(first, math.floor(high / step + 1e-9) + 1)]


def _powers(low: float, high: float) -> list[float]:
    """Return 1, 2 and 5 times powers of ten; fewer of them where the range is long."""
    digits = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1, 2, 5) if len(digits) <= 3 else (1, 3) if len(digits) <= 4 else (1,)
    found = [m * 10.0**n for n in digits for m in factors]
    return [one for one in found if low * 0.999 <= one <= high * 1.001]


@dataclass
class Plot:
    """One picture with an x and a y axis."""

    width: int
    height: int
    across: Axis
    up: Axis
    right: int = 14
    parts: list[str] = field(default_factory=list)

    left, top, bottom = 52, 26, 40

    def __post_init__(self) -> None:
        right, bottom = self.width - self.right, self.height - self.bottom
        for value in self.up.places(4):
            at = self.y(value)
            self._line("grid", self.left, right, at, at)
            self.text(self.left - 6, at + 4, self.up.written(value), "end")
        last = -math.inf
        for value in self.across.places(4 if self.width < 400 else 6):
            at, words = self.x(value), self.across.written(value)
            if at - last >= 7 * len(words) + 8:
                self._line("grid", at, at, bottom, bottom + 4)
                self.text(at, bottom + 17, words, "middle")
                last = at
        self._line("axis", self.left, right, bottom, bottom)
        self.text((self.left + right) / 2, self.height - 5, self.across.label, "label middle")
        self.text(4, 13, self.up.label, "label")

    def x(self, value: float) -> float:
        return self.left + self.across.share(value) * (self.width - self.left - self.right)

    def y(self, value: float) -> float:
        tall = self.height - self.top - self.bottom
        return self.height - self.bottom - self.up.share(value) * tall

    def _line(self, css: str, x0: float, x1: float, y0: float, y1: float) -> None:
        self.parts.append(
            f'<line class="{css}" x1="{x0:.1f}" x2="{x1:.1f}" y1="{y0:.1f}" y2="{y1:.1f}"/>'
        )

    def text(self, x: float, y: float, words: str, css: str = "", key: str = "") -> None:
        """Write words; `key` is a number's key and its value, as attributes."""
        if words:
            named = f' class="{css}"' if css else ""
            self.parts.append(f'<text{named}{key} x="{x:.1f}" y="{y:.1f}">{escape(words)}</text>')

    def line(self, points: Sequence[Point], css: str, dashes: str = "") -> None:
        dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
        self.parts.append(f'<path class="{css}"{dashed} d="M{self._path(points)}"/>')

    def band(self, low: Sequence[Point], high: Sequence[Point], css: str) -> None:
        self.parts.append(f'<path class="{css}" d="M{self._path([*low, *reversed(high)])}Z"/>')

    def _path(self, points: Sequence[Point]) -> str:
        return "L".join(f"{self.x(x):.1f} {self.y(y):.1f}" for x, y in points)

    def mark(self, x: float, y: float, css: str, shape: str = "circle", title: str = "") -> None:
        """Draw a point. Shapes are told apart without colour."""
        cx, cy, inside = self.x(x), self.y(y), f"<title>{escape(title)}</title>" if title else ""
        if shape == "circle":
            found = f'<circle class="{css}" cx="{cx:.1f}" cy="{cy:.1f}" r="4.2">{inside}</circle>'
        else:
            d = _SHAPES[shape].format(x=f"{cx:.1f}", y=f"{cy:.1f}")
            found = f'<path class="{css} shape" d="{d}">{inside}</path>'
        self.parts.append(found)

    def whisker(self, x: tuple[float, float], y: tuple[float, float], css: str) -> None:
        """Draw a line from one point to another: an interval."""
        self._line(css, self.x(x[0]), self.x(x[1]), self.y(y[0]), self.y(y[1]))

    def shade(self, x0: float, x1: float, css: str) -> None:
        low, high = self.x(x0), self.x(x1)
        tall = self.height - self.top - self.bottom
        self.parts.append(
            f'<rect class="{css}" x="{low:.1f}" y="{self.top}" '
            f'width="{high - low:.1f}" height="{tall}"/>'
        )

    def svg(self) -> str:
        size = f'width="{self.width}" height="{self.height}"'
        box = f'viewBox="0 0 {self.width} {self.height}"'
        return f'<svg {size} {box} aria-hidden="true">{"".join(self.parts)}</svg>'


_SHAPES = {
    "square": "M{x} {y}m-4 -4h8v8h-8z",
    "diamond": "M{x} {y}m0 -5.4l5.4 5.4l-5.4 5.4l-5.4 -5.4z",
    "triangle": "M{x} {y}m0 -5l5 9h-10z",
    "down": "M{x} {y}m0 5l5 -9h-10z",
    "cross": "M{x} {y}m-4.5 -1.6h2.9v-2.9h3.2v2.9h2.9v3.2h-2.9v2.9h-3.2v-2.9h-2.9z",
}
MARKS = ("circle", "square", "diamond", "triangle", "down", "cross")
"""Shapes by number of a line."""


DASHES = ("", "7 3", "2 3", "9 3 2 3", "5 5", "1 2")
"""Dashes by number of a line; those of plot.js."""


def dashes_of(number: int) -> str:
    """Return the dashes of a line; with the seventh they begin anew, shifted."""
    return DASHES[(number + 3 * (number // len(MARKS))) % len(DASHES)]


def hollow_of(number: int) -> str:
    """Return the class that makes marks hollow: those of lines from the seventh on."""
    return " hollow" if number >= len(MARKS) else ""


def sample(number: int, *, is_hollow: bool = False) -> str:
    """Return a piece of a line with its mark, for the key of a picture."""
    at, hollow = number % len(MARKS), " hollow" if is_hollow else hollow_of(number)
    css = f"mark{hollow}"
    shape = f'<circle class="{css}" cx="17" cy="6" r="4"/>'
    if at:
        shape = f'<path class="{css}" d="{_SHAPES[MARKS[at]].format(x=17, y=6)}"/>'
    dashes = DASHES[1] if is_hollow else dashes_of(number)
    line = f'<path class="curve" stroke-dasharray="{dashes}" d="M0 6H34"/>'
    return f'<svg class="c-{at}" width="34" height="12" aria-hidden="true">{line}{shape}</svg>'


def legend(names: Sequence[str]) -> str:
    """Return the key of lines, with each line's dashes and shape."""
    inside = "".join(f"<li>{sample(at)}{escape(name)}</li>" for at, name in enumerate(names))
    return f'<ul class="key lines">{inside}</ul>'


def both(draw: Callable[[int], str], words: str) -> str:
    """Return a picture for wide and for narrow windows; `words` say what it shows."""
    wide, narrow = draw(WIDE), draw(NARROW)
    return (
        f'<div role="img" aria-label="{escape(words)}">'
        f'<div class="wide">{wide}</div><div class="narrow">{narrow}</div></div>'
    )
