"""Debian's chromium, driven by Playwright: without a network, and all it says is kept.

For tests of the report, for its pictures in the docs, and to measure how fast it opens.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import Browser

CHROMIUM = Path("/usr/bin/chromium")
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
_READY_S = 20.0
_OWN = "getImageData"
"""What chromium says when a test looks into a canvas."""


def why_not() -> str:
    """Say why no browser can be driven; empty if one can."""
    if not CHROMIUM.exists():
        return f"{CHROMIUM} is not there: apt-get install chromium"
    try:
        import playwright.sync_api  # noqa: F401
    except ImportError:
        return "playwright is not there: pip install playwright"
    return ""


@contextlib.contextmanager
def started() -> Iterator[Browser]:
    """Yield a browser; it is gone at the end."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=str(CHROMIUM), args=list(FLAGS))
        try:
            yield browser
        finally:
            browser.close()


class Opened:
    """A page in a window of its own, when it is ready."""

    def __init__(
        self, browser: Browser, file: Path, width: int = 1280, theme: Any = "light"
    ) -> None:
        self._context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=theme, offline=True
        )
        self.page = self._context.new_page()
        self.said: list[str] = []
        """What it wrote to the console, and errors."""
        self.asked: list[str] = []
        """The addresses that it asked for."""
        self.page.on("console", lambda message: self._hear(message.text))
        self.page.on("pageerror", lambda error: self._hear(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(file.absolute().as_uri())
        self._until("document.documentElement.dataset.ready")

    def _hear(self, text: str) -> None:
        if _OWN not in text:
            self.said.append(text)

    def pick(self, number: int) -> None:
        """Show a run by its card, and wait until it is drawn."""
        self.page.locator(f'[data-pick="{number}"]').click()
        self._until(f"document.documentElement.dataset.shown === '{number}'")

    def _until(self, condition: str) -> None:
        """Wait for a condition. Playwright's own wait evaluates text, which the page forbids."""
        end_s = time.monotonic() + _READY_S
        while not self.page.evaluate(condition):
            assert time.monotonic() < end_s, (condition, self.said)
            time.sleep(0.01)

    def close(self) -> None:
        self._context.close()
