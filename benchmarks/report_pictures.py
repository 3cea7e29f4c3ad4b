"""The pictures of the report in README and docs/report.md, made anew.

    python -m benchmarks.report_pictures           writes docs/report*.png

It needs chromium and playwright (docs/report.md).
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from benchmarks.browser import Opened, started, why_not
from benchmarks.prediction_cases import Case
from benchmarks.report_jobs import MEASURED, predicted_trace, resnet_trace
from syncline import dataset
from syncline.report.page.run import Run, run_of
from syncline.report.page.write import write_page

DOCS = Path(__file__).parents[1] / "docs"
_EVEN = [Case("100mbit", "even", ranks, "synchronous") for ranks in (2, 4, 8)]
_BEYOND = Case("100mbit", "even", 16, "synchronous")
"""More ranks than were measured."""


def main() -> int:
    if why_not():
        print(why_not(), file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as name, started() as browser:
        folder = Path(name)
        one, several = folder / "one.html", folder / "several.html"
        write_page([run_of("resnet-50 on 8 ranks", resnet_trace(8, 40))], one)
        write_page(_measured_and_predicted(folder / "measured"), several)
        opened = Opened(browser, one)
        page = opened.page
        page.screenshot(
            path=DOCS / "report.png", clip={"x": 0, "y": 0, "width": 1280, "height": 790}
        )
        for panel in ("where", "when", "exchange"):
            page.locator(f"#{panel}").screenshot(path=DOCS / f"report-{panel}.png")
        page.locator("button[data-edit]:visible").first.click()
        page.locator("#whatif").screenshot(path=DOCS / "report-whatif.png")
        opened.close()
        opened = Opened(browser, several)
        for panel in ("predicted", "more"):
            opened.page.locator(f"#{panel}").screenshot(path=DOCS / f"report-{panel}.png")
        opened.close()
        opened = Opened(browser, one, 400, "dark")
        opened.page.screenshot(path=DOCS / "report-narrow.png")
        opened.close()
    for path in sorted(DOCS.glob("report*.png")):
        print(f"{path.name}: {path.stat().st_size / 1e3:.0f} kB")
    return 0


def _measured_and_predicted(folder: Path) -> list[Run]:
    """Return runs that were measured, and what was predicted of them and of more ranks."""
    found = dataset.load(MEASURED)
    found.unpack(folder)
    runs = [run_of(f"measured, {case.ranks} ranks", found.trace(case)) for case in _EVEN]
    for case in (*_EVEN, _BEYOND):
        trace = predicted_trace(folder, case, 12)
        runs.append(run_of(f"predicted, {case.ranks} ranks", trace))
    return runs


if __name__ == "__main__":
    sys.exit(main())
