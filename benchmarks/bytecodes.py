"""Count the bytecodes and Python calls of a step, of this version and of another commit.

`python -m benchmarks.bytecodes [--against REV]` trains the mlp (inline) and the cnn (overlapped) on
2 ranks and counts on the ranks' own threads what one `optimizer.step()` executes, and what the
whole body of the loop does. `no_exchange` is the same loop without Syncline. The figure is the
least of many steps on both ranks, the step of a rank that waits for nobody: it is repeatable. How
often a rank looks for a peer or a lane that is late depends on time; the median has such steps.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.arms import ARMS, OTHER, Arm
from benchmarks.channels import ArmFailed
from benchmarks.command import add_against, end_cleanly
from benchmarks.ranks import Ranks
from benchmarks.versions import THIS, Version, VersionError, version_of

CASES = {"mlp": "mlp, inline", "cnn": "cnn, overlapped"}  # below and above a megabyte
PARTS = {"step": "optimizer.step()", "body": "loop body"}
NUM_RANKS = 2
WARM_UP_STEPS = 20  # buckets are laid out in the first; later ones may still choose how to wait
STEPS = 60  # enough that either rank comes last in some of them, and waits for nobody


def count(workload: str, arm: Arm, version: Version) -> dict[str, Any]:
    """Count one arm on one workload; return the figures for each part."""
    ranks = Ranks(workload, arm, NUM_RANKS, version)
    try:
        ranks.run(WARM_UP_STEPS, timeout_s=120)
        counted = ranks.counts(STEPS)
    finally:
        ranks.stop()
    found = {}
    for part in PARTS:
        counts = [pair for of_rank in counted for pair in of_rank[part]]
        bytecodes, calls = zip(*counts, strict=True)
        found[part] = {"bytecodes": _summary(bytecodes), "calls": _summary(calls)}
    return found


def _summary(values: Sequence[int]) -> dict[str, int]:
    return {
        "least": min(values),
        "median": int(statistics.median(values)),
        "most": max(values),
    }


def table(found: dict[str, dict[str, Any]], arms: Sequence[str], commit: str | None) -> Table:
    """Lay out the counts for people: a line for each part of each case, a column for each arm."""
    view = Table(title=f"Bytecodes and Python calls of one step, {NUM_RANKS} ranks")
    view.add_column("")
    for arm in arms:
        heading = f"{arm} ({commit[:12]})" if arm == OTHER.name and commit else arm
        view.add_column(f"{heading}:\nbytecodes", justify="right")
        view.add_column("calls", justify="right")
    for workload, by_arm in found.items():
        for part, words in PARTS.items():
            cells = [
                _in_words(by_arm[arm][part][figure])
                for arm in arms
                for figure in ("bytecodes", "calls")
            ]
            view.add_row(f"{CASES[workload]}: {words}", *cells)
    return view


def _in_words(figure: dict[str, int]) -> str:
    if figure["least"] == figure["most"]:
        return str(figure["median"])
    return f"{figure['least']} (median {figure['median']})"


def main() -> int:
    """Count, print, and return 1 if an arm failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bytecodes", description=__doc__)
    add_against(parser)
    parser.add_argument("--json", action="store_true", help="print one object on stdout")
    job = parser.parse_args()
    end_cleanly()
    by_method = {arm.method: arm for arm in ARMS}
    arms = [by_method["no_exchange"], by_method["syncline"]]
    commit = None
    try:
        with contextlib.ExitStack() as stack:
            other = THIS
            if job.against is not None:
                other = stack.enter_context(version_of(job.against))
                arms, commit = [*arms, OTHER], other.commit
            found = {
                workload: {
                    arm.name: count(workload, arm, other if arm.is_other else THIS) for arm in arms
                }
                for workload in CASES
            }
    except VersionError as error:
        print(f"benchmarks.bytecodes: {error}", file=sys.stderr)
        return 2
    except ArmFailed as failure:
        print(f"benchmarks.bytecodes: {failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    if job.json:
        print(json.dumps({"against": commit, "counts": found}, indent=2))
    else:
        names = [arm.name for arm in arms]
        Console(width=None if sys.stdout.isatty() else 130).print(table(found, names, commit))
    return 0


if __name__ == "__main__":
    sys.exit(main())
