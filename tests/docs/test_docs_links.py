"""Every link of the pages leads somewhere: to a file, and to a heading that is there."""

from __future__ import annotations

import re

import pytest
from website.pages import turn_links

from pages import LINK, ROOT, Page, pages

PAGES = {page.name: page for page in pages()}
OUTSIDE = re.compile(r"https://[\w.-]+(/\S*)?")
"""Links to other sites are not followed: tests need no network."""


def find_wrong(page: Page, known: dict[str, Page]) -> list[str]:
    wrong = []
    for line, target in page.links:
        if OUTSIDE.fullmatch(target):
            continue
        name, _, place = target.partition("#")
        path = (page.path.parent / name).resolve() if name else page.path
        if not path.exists():
            wrong.append(f"{page.name}:{line}: {target}: there is no such file")
        elif place:
            other = known.get(path.relative_to(ROOT).as_posix())
            if other is None or place not in other.anchors:
                wrong.append(f"{page.name}:{line}: {target}: there is no such heading")
    return wrong


@pytest.mark.parametrize("name", PAGES)
def test_every_link_leads_somewhere(name):
    assert find_wrong(PAGES[name], PAGES) == []


def test_a_link_to_nowhere_is_found(tmp_path, monkeypatch):
    path = ROOT / "docs" / "glossary.md"
    page = Page(path)
    page.prose = ["[a](nowhere.md) [b](tutorial.md#nowhere) [c](#nowhere) [d](tutorial.md)"]
    said = " ".join(find_wrong(page, PAGES))
    assert said.count("no such file") == 1
    assert said.count("no such heading") == 2


def test_every_page_can_be_reached_from_the_readme():
    reached, ahead = {"README.md"}, ["README.md"]
    while ahead:
        page = PAGES[ahead.pop()]
        for _, target in page.links:
            path = (page.path.parent / target.partition("#")[0]).resolve()
            name = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else ""
            if name in PAGES and name not in reached:
                reached.add(name)
                ahead.append(name)
    decisions = {name for name in PAGES if name.startswith("docs/decisions/")}
    assert set(PAGES) - reached - decisions == {"CHANGELOG.md"} - reached


def test_links_are_turned_to_places_in_the_site():
    text = "[a](docs/running.md#input) [b](examples) [c](https://a.b/c) [d](ARCHITECTURE.md)"
    turned = "[a](running.md#input) [b](examples.md) [c](https://a.b/c) [d](architecture.md)"
    assert turn_links(text, "README.md") == turned
    text = "[a](../README.md) [b](../examples/own_loop.py) [c](decisions/0009-x.md)"
    turned = "[a](index.md) [b](examples.md#own_looppy) [c](decisions/0009-x.md)"
    assert turn_links(text, "docs/running.md") == turned
    assert turn_links("[a](../prediction.md)", "docs/decisions/x.md") == "[a](../prediction.md)"


NUMBER = re.compile(r"\d+(?:\.\d+)?(?= %)|\d+\.\d+|\d+(?= ms)")


@pytest.mark.parametrize("name", ["docs/papers.md", "docs/choose.md"])
def test_figures_of_an_overview_stand_on_the_page_that_their_section_or_row_links_to(name):
    lines = PAGES[name].prose
    rows = [line for line in lines if line.startswith("| ")]
    sections = "\n".join(line for line in lines if not line.startswith("| ")).split("\n## ")
    found, wrong = 0, []
    for text in (*rows, *sections):
        targets = {target.partition("#")[0] for target in LINK.findall(text)}
        pages_linked = [ROOT / "docs" / one for one in targets if one.endswith(".md")]
        known = " ".join(path.read_text() for path in pages_linked if path.exists())
        for number in NUMBER.findall(re.sub(r"arxiv\S+|arXiv \S+", "", text)):
            found += 1
            if not re.search(rf"(?<![\d.]){re.escape(number)}(?![\d.]*\d)", known):
                wrong.append((number, text[:60]))
    assert found > 10
    assert wrong == []
