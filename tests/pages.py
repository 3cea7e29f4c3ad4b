"""The pages of the documentation as data: their links, anchors, code blocks and commands.

What counts as what: an indented block holds commands, nothing else. A fenced block says its
language; one with `title="NAME"` is a file that the page's reader saves under that name. Code in
backticks that begins like a command is one, to be parsed and not run.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
FENCE = re.compile(r'^```(\w*)(?: title="([^"]+)")?$')
LINK = re.compile(r"(?<=\]\()([^)\s]+)(?=\))")
HEADING = re.compile(r"^#{1,6} (.+)$")
INLINE = re.compile(r"`([^`]+)`")
PROGRAMS = ("syncline", "python", "torchrun", "make", "export", "source", "PYTHONPATH=tests")
NOT_RUN = "not run by the tests"
"""What a page says, in the same section, of commands that the tests only parse."""


@dataclass(frozen=True)
class Block:
    """A block of code; `language` is "shell" for an indented one. `line` counts from 1."""

    page: str
    line: int
    language: str
    title: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass(frozen=True)
class Command:
    """One command, on one line; inline ones stand in a sentence."""

    page: str
    line: int
    text: str
    inline: bool = False

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.text}"


class Page:
    """A page, by its path in the repository."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.relative_to(ROOT).as_posix()
        self.lines = path.read_text().splitlines()
        self.blocks: list[Block] = []
        self.prose = list(self.lines)
        """The lines without those of code blocks, which are empty here."""
        self._read_blocks()

    @property
    def links(self) -> Iterator[tuple[int, str]]:
        for number, line in enumerate(self.prose, 1):
            for target in LINK.findall(re.sub(r"`[^`]*`", "", line)):
                yield number, target

    @property
    def anchors(self) -> list[str]:
        found = (HEADING.match(line) for line in self.prose)
        return [anchor(match[1]) for match in found if match]

    @property
    def commands(self) -> Iterator[Command]:
        for block in self.blocks:
            if block.language == "shell":
                yield from _commands(block)

    @property
    def mentions(self) -> Iterator[Command]:
        """Yield the commands in sentences. Their code may go on in the next line."""
        text = "\n".join(self.prose)
        for match in INLINE.finditer(text):
            words = " ".join(match[1].split())
            program, _, rest = words.partition(" ")
            if program in PROGRAMS and re.match(r"[a-z-]", rest):
                yield Command(self.name, text[: match.start()].count("\n") + 1, words, inline=True)

    def section_of(self, line: int) -> str:
        """Return the text between the headings before and after a line."""
        headings = [at for at, text in enumerate(self.prose, 1) if HEADING.match(text)]
        first = max((at for at in headings if at <= line), default=1)
        last = min((at for at in headings if at > line), default=len(self.lines) + 1)
        return " ".join(" ".join(self.lines[first - 1 : last - 1]).split())

    def _read_blocks(self) -> None:
        at = 0
        while at < len(self.lines):
            end = self._end_of_block(at)
            if end is None:
                at += 1
                continue
            self.prose[at:end] = [""] * (end - at)
            at = end

    def _end_of_block(self, at: int) -> int | None:
        line = self.lines[at]
        if line.startswith("```"):
            fence = FENCE.match(line)
            assert fence, f"{self.name}:{at + 1}: {line}"
            end = self.lines.index("```", at + 1)
            text = "\n".join(self.lines[at + 1 : end]) + "\n"
            self.blocks.append(Block(self.name, at + 1, fence[1], fence[2] or "", text))
            return end + 1
        if not line.startswith("    ") or (at and self.lines[at - 1]):
            return None
        end = at
        while end < len(self.lines) and (self.lines[end].startswith("    ") or not self.lines[end]):
            end += 1
        text = "\n".join(one[4:] for one in self.lines[at:end]).rstrip() + "\n"
        self.blocks.append(Block(self.name, at + 1, "shell", "", text))
        return end


def pages() -> list[Page]:
    """Return every page: those of the repository's top, and all in docs/."""
    paths = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    return [Page(path) for path in sorted(paths)]


def anchor(heading: str) -> str:
    """Return a heading's anchor, the same on GitHub and in the site.

    The two differ in a few characters; a heading that is linked to has none of them.
    """
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").lower()
    return re.sub(r"[^\w\s-]", "", plain).strip().replace(" ", "-")


def _commands(block: Block) -> Iterator[Command]:
    joined, first = "", 0
    for number, line in enumerate(block.text.splitlines(), block.line):
        first = first if joined else number
        joined += line
        if joined.endswith("\\"):
            joined = joined[:-1] + " "
            continue
        for words in _split(joined):
            yield Command(block.page, first, words)
        joined = ""


def _split(line: str) -> Iterator[str]:
    """Yield the commands of a line: `&&` joins them, `#` begins a comment."""
    reader = shlex.shlex(line, posix=False, punctuation_chars="&")
    reader.whitespace_split, reader.commenters = True, "#"
    words: list[str] = []
    for word in [*reader, "&&"]:
        if word != "&&":
            words.append(word)
        elif words:
            yield " ".join(words)
            words = []
