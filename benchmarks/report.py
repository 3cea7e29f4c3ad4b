"""How large a report of a long run is, and how fast it opens and times its tasks again.

    python -m benchmarks.report            resnet-50 on 8 virtual ranks, 1000 steps
    python -m benchmarks.report --steps 50

It needs chromium and playwright (docs/report.md).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.browser import Opened, started, why_not
from benchmarks.report_jobs import resnet_trace
from syncline.report.page.run import run_of
from syncline.report.page.write import write_page

_RETIME = "() => runs[0].graph.whatIf({factors: {wire: 0.5, backward: 0.8}}).took"
_TURNS = 7


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=1000)
    steps = parser.parse_args().steps
    if why_not():
        print(why_not(), file=sys.stderr)
        return 2
    clock = time.perf_counter
    began_s = clock()
    trace = resnet_trace(8, steps)
    print(f"simulated {len(trace.tasks):,} tasks in {clock() - began_s:.1f} s", flush=True)
    with tempfile.TemporaryDirectory() as folder, started() as browser:
        out = Path(folder) / "report.html"
        began_s = clock()
        write_page([run_of("resnet-50", trace)], out)
        print(f"report written in {clock() - began_s:.1f} s: {out.stat().st_size / 1e6:.2f} MB")
        for turn in range(3):
            began_s = clock()
            opened = Opened(browser, out)
            print(f"opened in {clock() - began_s:.2f} s (turn {turn + 1})")
            if turn < 2:
                opened.close()
        took_ms = sorted(opened.page.evaluate(_RETIME) for _ in range(_TURNS))
        print(
            f"timed again in {took_ms[_TURNS // 2]:.1f} ms ({took_ms[0]:.1f} to {took_ms[-1]:.1f})"
        )
        draw = "() => { const t = performance.now(); moving.show(0, Infinity); moving.drawNow(); "
        drawn_ms = opened.page.evaluate(draw + "return performance.now() - t; }")
        print(f"the whole run drawn in {drawn_ms:.0f} ms; console: {opened.said or 'nothing'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
