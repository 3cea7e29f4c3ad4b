"""Pieces of HTML: numbers that carry their key, bars, and keys of colours.

A number in the page stands in a `data` element: `data-key` is its key in the JSON object that its
section names by `data-of`, `value` has all its digits, and the text has three.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

from syncline.report.page import units

Written = Callable[[float], str]


def at(numbers: Any, key: str) -> Any:
    """Return what is at a key: names and places with points between them.

    >>> at({"what_if": [{"gain": 0.5}]}, "what_if.0.gain")
    0.5
    """
    for name in key.split("."):
        numbers = numbers[int(name)] if isinstance(numbers, list) else numbers[name]
    return numbers


class Shown:
    """Numbers of one JSON object, shown with their keys."""

    def __init__(self, numbers: Mapping[str, Any]) -> None:
        self.numbers = numbers

    def __call__(self, key: str, written: Written) -> str:
        """Return the number at a key as HTML; "-" if it is not known."""
        value = at(self.numbers, key)
        if value is None:
            return "-"
        return f'<data data-key="{escape(key)}" value="{float(value)!r}">{written(value)}</data>'

    def words(self, key: str) -> str:
        """Return the words at a key."""
        said = escape(str(at(self.numbers, key)))
        return f'<data data-key="{escape(key)}" value="{said}">{said}</data>'

    def seconds(self, key: str) -> str:
        return self(key, units.seconds)

    def share(self, key: str) -> str:
        return self(key, units.share)

    def three(self, key: str) -> str:
        return self(key, units.three)

    def whole(self, key: str) -> str:
        return self(key, units.whole)

    def num_bytes(self, key: str) -> str:
        return self(key, units.num_bytes)


class Segment(NamedTuple):
    """A part of a bar."""

    css: str
    """The name of its colour or hatch."""
    value: float
    words: str
    """What it is and how long; HTML may be in it."""
    plain: str = ""
    """The same without HTML, for a pointer that rests on it."""


def bar(segments: Sequence[Segment], whole: float, *, labels: bool = False) -> str:
    """Return a stacked bar whose full width stands for `whole`."""
    inside = []
    for one in segments:
        width = 100 * one.value / whole if whole > 0 else 0.0
        if width > 0.03:
            label = f'<span class="fits-{room(one.plain)}">{one.words}</span>'
            text = label if labels and width > 5 else ""
            title = f' title="{escape(one.plain)}"' if one.plain else ""
            inside.append(f'<i class="k-{one.css}" style="width:{width:.2f}%"{title}>{text}</i>')
    return f'<div class="bar">{"".join(inside)}</div>'


ROOMS = range(40, 400, 20)
"""Widths for which the style sheet can hide a label that does not fit."""


def room(words: str) -> int:
    """Return how wide a bar has to be for words to fit into it, in pixels.

    >>> room("forward 36.1 ms")
    140
    """
    return next((wide for wide in ROOMS if wide >= 7.4 * len(words) + 18), ROOMS[-1])


def label_rules() -> str:
    """Return the rules that hide labels which do not fit into their bars."""
    rules = (
        f"@container (max-width: {wide}px) {{ .fits-{wide} {{ display: none !important; }} }}"
        for wide in ROOMS
    )
    return "".join(rules)


def swatch(css: str) -> str:
    return f'<i class="swatch k-{css}"></i>'


def panel(name: str, title: str, ask: str, body: str) -> str:
    """Return a section of the page."""
    said = f'<p class="ask">{ask}</p>' if ask else ""
    return f'<section class="panel" data-panel="{name}"><h2>{title}</h2>{said}{body}</section>'


def table(heads: Sequence[tuple[str, str]], rows: Sequence[Sequence[str]]) -> str:
    """Return a table. Heads are pairs of classes and words; cells have their head's classes."""
    head = "".join(f'<th class="{css}">{words}</th>' for css, words in heads)
    lines = "".join(f"<tr>{''.join(_cells([css for css, _ in heads], row))}</tr>" for row in rows)
    return (
        f'<div class="wraps" tabindex="0"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{lines}</tbody></table></div>"
    )


def _cells(classes: Sequence[str], row: Sequence[str]) -> Sequence[str]:
    return [f'<td class="{css}">{cell}</td>' for css, cell in zip(classes, row, strict=True)]
