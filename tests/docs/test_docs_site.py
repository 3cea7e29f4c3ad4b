"""The site builds without a warning, asks nothing of other sites, and has every page."""

from __future__ import annotations

import re

import pytest
from website.__main__ import build
from website.pages import place_in_site
from website.pictures import DRAWN

from pages import ROOT, pages

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    assert build(folder) == 0  # a warning is an error
    return folder / "site"


def test_every_page_is_in_the_site_and_in_its_navigation(site):
    navigation = (ROOT / "mkdocs.yml").read_text().partition("nav:")[2]
    for page in pages():
        place, _ = place_in_site(page.name)
        assert (site / place).with_suffix(".html").exists(), page.name
        if "decisions/" not in place:
            assert re.search(rf": {place}$", navigation, re.MULTILINE), page.name


def test_pages_fetch_nothing_from_elsewhere(site):
    fetched = re.compile(
        r"""(?:src=|<link[^>]*href=|@import |url\()["']?((?:https?:)?//[^"')> ]+)"""
    )
    for path in [*site.rglob("*.html"), *site.rglob("*.css")]:
        assert fetched.findall(path.read_text()) == [], path


def test_the_api_page_has_docstrings(site):
    text = (site / "api.html").read_text()
    for name in ("syncline.distribute", "syncline.perf.what_if.wires", "syncline.dataset.load"):
        assert f'id="{name}"' in text
    assert ":::" not in text


@pytest.mark.parametrize("name", DRAWN)
def test_a_picture_is_what_the_code_draws(name):
    assert (ROOT / "docs" / name).read_text() == DRAWN[name](), "run make pictures"
