"""The site's pages, made from the repository's files.

The repository's Markdown is written to be read where it lies: README.md links to docs/running.md,
docs/running.md to ../examples/own_loop.py. The site has one tree of pages. So every page is
copied to its place there, its links are turned to where their targets went, and three pages are
made: all examples, and lists of the decisions and of the strategies' files.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
MOVED = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "ARCHITECTURE.md": "architecture.md",
    "CHANGELOG.md": "changelog.md",
    "examples": "examples.md",
    "docs/decisions": "decisions/index.md",
}
"""Where files of the repository are in the site; those in docs/ keep their names."""

LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)\s#]+)(#[^)\s]*)?(?=\))")
TITLE = re.compile(r"^# (.+)$", re.MULTILINE)
LANGUAGES = {".py": "python", ".toml": "toml", ".txt": "text"}


def place_in_site(path: str) -> tuple[str, str]:
    """Return a repository file's page in the site, and the anchor on that page ("" if none)."""
    if path in MOVED:
        return MOVED[path], ""
    if path.startswith("examples/"):
        return MOVED["examples"], "#" + _anchor(Path(path).name)
    inside = path.removeprefix("docs/")
    assert inside != path, f"{path} is linked to, but is not part of the site"
    return inside, ""


def turn_links(text: str, source: str) -> str:
    """Turn the links of the repository's file `source` to the pages of the site."""
    here, _ = place_in_site(source)

    def turn(match: re.Match[str]) -> str:
        target = os.path.normpath(os.path.join(os.path.dirname(source), match[1]))
        page, anchor = place_in_site(target)
        return os.path.relpath(page, os.path.dirname(here) or ".") + (match[2] or anchor)

    return LINK.sub(turn, text)


def write_pages(folder: Path) -> None:
    """Write the pages of the site into a folder, which is emptied before."""
    shutil.rmtree(folder, ignore_errors=True)
    for source, text in _pages():
        page = folder / place_in_site(source)[0]
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(turn_links(text, source))
    for picture in sorted(ROOT.glob("docs/**/*.svg")) + sorted(ROOT.glob("docs/**/*.png")):
        shutil.copy(picture, folder / picture.relative_to(ROOT / "docs"))


def _pages() -> Iterator[tuple[str, str]]:
    for name in ("README.md", "CONTRIBUTING.md", "ARCHITECTURE.md", "CHANGELOG.md"):
        yield name, (ROOT / name).read_text()
    for path in sorted(ROOT.glob("docs/**/*.md")):
        yield path.relative_to(ROOT).as_posix(), path.read_text()
    yield "examples", _examples()
    yield "docs/decisions", _decisions()


def _examples() -> str:
    parts = ["# Examples\n\nThe files of the folder `examples/`, as they are there.\n"]
    for path in sorted((ROOT / "examples").glob("*.*")):
        language = LANGUAGES[path.suffix]
        parts.append(f"\n## {path.name}\n\n````{language}\n{path.read_text()}````\n")
    return "".join(parts)


def _decisions() -> str:
    parts = ["# Decisions\n\nWhy things are as they are: half a page each, with what it costs.\n\n"]
    for path in sorted((ROOT / "docs" / "decisions").glob("*.md")):
        (title, *_) = TITLE.findall(path.read_text())
        parts.append(f"- [{title}](decisions/{path.name})\n")
    return "".join(parts)


def _anchor(heading: str) -> str:
    """Return the anchor that Python-Markdown gives to a heading."""
    plain = re.sub(r"[^\w\s-]", "", heading).strip().lower()
    return re.sub(r"[-\s]+", "-", plain)
