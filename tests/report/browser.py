"""Debian's chromium, driven by Playwright: without a network, and all it says is kept."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

CHROMIUM = Path("/usr/bin/chromium")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def why_not() -> str:
    """Say why no browser can be driven; empty if one can."""
    if not CHROMIUM.exists():
        return f"{CHROMIUM} is not there: apt-get install chromium"
    try:
        import playwright.sync_api  # noqa: F401
    except ImportError:
        return "playwright is not there: pip install playwright"
    return ""


needs_browser = pytest.mark.skipif(bool(why_not()), reason=why_not() or "a browser is there")


@contextlib.contextmanager
def started():
    """Yield a browser; it is gone at the end."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=str(CHROMIUM), args=FLAGS)
        try:
            yield browser
        finally:
            browser.close()


class Opened:
    """A page in a window of its own."""

    def __init__(self, browser, file: Path, width: int = 1280, theme: str = "light") -> None:
        size = {"width": width, "height": 900}
        self._context = browser.new_context(viewport=size, color_scheme=theme, offline=True)
        self.page = self._context.new_page()
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self._hear(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(file.as_uri())
        self.page.wait_for_function("document.documentElement.dataset.ready", timeout=20_000)

    def _hear(self, text: str) -> None:
        if "getImageData" not in text:  # the tests' own look at a canvas
            self.said.append(text)

    @property
    def ready_ms(self) -> float:
        """From the beginning of the load until all is drawn."""
        return self.page.evaluate("performance.measure('all', {start: 0}).duration")

    def close(self) -> None:
        self._context.close()
