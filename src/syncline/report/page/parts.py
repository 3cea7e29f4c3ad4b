"""The parts of a step in the page: their words, and their colours and hatches."""

from __future__ import annotations

from collections.abc import Mapping

from syncline.perf.breakdown import PARTS
from syncline.perf.explain import NAMES
from syncline.report.page.markup import Segment, Shown
from syncline.report.page.units import seconds

CSS = {
    "forward": "forward",
    "backward": "backward",
    "input": "input",
    "update": "update",
    "waiting": "peers",
    "wire": "wire",
    "inside": "inside",
    "latency": "latency",
    "unknown": "wait",
    "pause": "pause",
    "evaluate": "pause",
    "checkpoint": "pause",
    "whole": "pause",
    "report": "pause",
    "between": "other",
}
"""Colours by part. Solid is work, hatched is waiting; parts that are not here are handling."""
ORDER = tuple(sorted(PARTS, key=lambda name: [*CSS, name].index(name)))
"""Work first, then waiting: bars of all ranks begin with compute."""
LEAST = 5e-4
"""Parts that are a smaller share of a step are not listed."""


def css_of(part: str) -> str:
    return CSS.get(part, "work")


def words_of(part: str) -> str:
    return NAMES.get(part, part)


def segments(shown: Shown, key: str, parts: Mapping[str, float]) -> list[Segment]:
    """Return the parts of a bar; `key` is where they are in the numbers."""
    found = []
    for name in ORDER:
        value = parts.get(name, 0.0)
        if value > 0:
            words = f"{words_of(name)} {shown.seconds(f'{key}.{name}')}"
            plain = f"{words_of(name)} {seconds(value)}"
            found.append(Segment(css_of(name), value, words, plain))
    return found
