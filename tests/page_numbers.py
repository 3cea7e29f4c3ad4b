"""The numbers of a report page: their keys, and what is written. Shared by tests."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import NamedTuple

UNITS = {
    **{"s": 1.0, "ms": 1e-3, "µs": 1e-6, "%": 0.01, "": 1.0, "/s": 1.0, "x": 1.0},
    **{"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12},
    **{"B/s": 1.0, "kB/s": 1e3, "MB/s": 1e6, "GB/s": 1e9},
}
_VOID = {"meta", "link", "input", "br", "line", "path", "circle", "rect"}
_NUMBER = re.compile(r"[-+]?\d[\d,]*(\.\d+)?(e[-+]\d+)?")


class Number(NamedTuple):
    """A number of the page."""

    of: str
    """What its section names as its JSON object."""
    key: str
    value: float | str
    text: str


class Page(HTMLParser):
    """Collects all numbers of a page, and all its ids."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.numbers: list[Number] = []
        self.ids: list[str] = []
        self._open: list[tuple[str, str]] = []
        self._reading: list[str] | None = None
        self.feed(text)
        self.close()
        assert self._open == [], "every element is closed"

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        if "id" in found:
            self.ids.append(found["id"])
        if tag in _VOID:
            return
        of = found.get("data-of", self._open[-1][1] if self._open else "")
        self._open.append((tag, of))
        if "data-key" in found:
            value = found.get("value", found.get("data-value"))
            self._reading = [of, found["data-key"], value, ""]

    def handle_startendtag(self, tag, attributes):
        pass

    def handle_data(self, data):
        if self._reading is not None:
            self._reading[3] += data

    def handle_endtag(self, tag):
        if tag in _VOID:
            return
        before, _ = self._open.pop()
        assert before == tag, f"{before} ends as {tag}"
        if self._reading is not None:
            of, key, value, text = self._reading
            is_number = re.fullmatch(r"[-+.\de]+|inf|nan", value)
            self.numbers.append(Number(of, key, float(value) if is_number else value, text))
            self._reading = None


def check_digits(number: Number) -> None:
    """Check that a text is its number, to the digits that it shows."""
    if isinstance(number.value, str):
        assert number.text == number.value
        return
    if "times too" in number.text or number.text in ("?", "no time"):
        return
    words = number.text.split(" % ")[-1]  # "95 % 12.3 ms" has its number last
    match = _NUMBER.match(words)
    assert match, number
    digits = match[0].replace(",", "")
    unit = UNITS[words[match.end() :].strip()]
    after = len(digits.partition(".")[2]) if "e" not in digits else 99
    step = 10.0**-after if "e" not in digits else abs(float(digits)) * 0.01
    assert abs(float(digits) - number.value / unit) <= step * 0.5000001, number
