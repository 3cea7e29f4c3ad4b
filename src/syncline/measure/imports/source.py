"""A file that is imported: its text, and errors that name line and column.

No torch here, as in all of `measure/imports`.
"""

from __future__ import annotations

import gzip
import math
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from syncline.config.words import printable, shown
from syncline.errors import ConfigError

MOST_S = 86_400.0
"""A layer that takes longer than a day is a damaged number or a wrong unit."""
MOST_BYTES = 2**50
REPAIR = "Repair it, or write the file once more."

_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?", re.ASCII)


@dataclass(frozen=True)
class Source:
    """A file's name and text."""

    path: str
    text: str

    def error(self, at: int, found: str, rule: str, fix: str = REPAIR) -> ConfigError:
        """Return the error for what stands at an offset of the text."""
        line = self.text.count("\n", 0, at) + 1
        column = at - self.text.rfind("\n", 0, at)
        return ConfigError(
            f"{printable(self.path)}, line {line}, column {column}", found, rule, fix
        )

    def lines(self) -> Iterator[Cursor]:
        """Yield the lines, without their ends."""
        start = 0
        while start < len(self.text):
            stop = self.text.find("\n", start)
            stop = len(self.text) if stop < 0 else stop
            yield Cursor(self, start, stop)
            start = stop + 1


@dataclass
class Cursor:
    """A place in a line, from which pieces are read one after the other."""

    source: Source
    at: int
    stop: int

    @property
    def rest(self) -> str:
        return self.source.text[self.at : self.stop]

    def copy(self) -> Cursor:
        return replace(self)

    def skip_blanks(self) -> None:
        self.at += len(self.rest) - len(self.rest.lstrip())

    @property
    def is_empty(self) -> bool:
        return not self.rest.strip()

    def error(self, rule: str, at: int | None = None) -> ConfigError:
        """Return the error for the word at an offset, or at the cursor."""
        at = self.at if at is None else at
        words = self.source.text[at : self.stop].split(maxsplit=1)
        found = f"got {shown(words[0])}" if words else "the line ends"
        return self.source.error(at, found, rule)

    def take(self, pattern: str, what: str) -> str:
        """Return the text that matches a pattern here, and go on behind it."""
        match = re.compile(pattern).match(self.source.text, self.at, self.stop)
        if match is None:
            raise self.error(f"{what} belongs here")
        self.at = match.end()
        return match[0]

    def number(self, what: str, *, most: float, is_whole: bool = False) -> float:
        """Read a number from 0 to `most`."""
        match = _NUMBER.match(self.source.text, self.at, self.stop)
        value = float(match[0]) if match is not None else math.nan
        if not 0 <= value <= most or (is_whole and value != math.floor(value)):
            kind = "a whole number" if is_whole else "a number"
            raise self.error(f"{what} is {kind} from 0 to {most:g}")
        assert match is not None
        self.at = match.end()
        return value

    def seconds(self, what: str, per_s: float) -> float:
        """Read a time; `per_s` is how many of its units a second has."""
        return self.number(what, most=MOST_S * per_s) / per_s

    def whole(self, what: str, most: int = MOST_BYTES) -> int:
        return int(self.number(what, most=most, is_whole=True))


def read_source(path: Path) -> Source:
    """Read a text file, compressed by gzip or not; raise ConfigError if it is none."""
    name = printable(path)
    rule, fix = "an import reads a text file", "Look at the path."
    try:
        data = path.read_bytes()
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        found = f"its compressed data is damaged ({printable(error)})"
        raise ConfigError(name, found, rule, REPAIR) from None
    except OSError as error:
        why = (error.strerror or type(error).__name__).lower()
        raise ConfigError(name, f"cannot be read ({why})", rule, fix) from None
    try:
        return Source(str(path), data.decode().removeprefix("\ufeff").replace("\r\n", "\n"))
    except UnicodeDecodeError as error:
        at = error.start
        line, column = data.count(b"\n", 0, at) + 1, at - data.rfind(b"\n", 0, at)
        key = f"{name}, line {line}, column {column}"
        found = f"byte 0x{data[at]:02x} is not UTF-8"
        raise ConfigError(key, found, "these files are text", REPAIR) from None
