"""Turn what `benchmarks.step --json` wrote into the tables of docs/benchmarks.md.

python -m benchmarks.markdown FILE
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.arms import METHODS


def spread(figure: dict[str, float] | None, scale: float = 1.0, digits: int = 2) -> str:
    """Write a median with its quartiles."""
    if figure is None:
        return ""
    numbers = (figure[key] * scale for key in ("median", "lower_quartile", "upper_quartile"))
    median, low, high = (f"{number:.{digits}f}" for number in numbers)
    return f"{median} ({low} to {high})"


def rows_of(comparison: dict[str, Any]) -> list[str]:
    """Write one line for the best arm of each method."""
    best = {arm["method"]: arm for arm in comparison["arms"] if arm.get("is_best_of_method")}
    lines = []
    for method in METHODS:
        if method in best:
            arm = best[method]
            name = f"{comparison['ranks']} ranks: {arm['name']}"
            digits = 2 if arm["step_s"]["median"] < 0.02 else 0
            cells = [
                name,
                spread(arm["step_s"], 1e3, digits),
                spread(arm["speed_against_best_ddp"]),
                spread(arm["speed_against_local"]),
                f"{arm['pss_bytes'] / 1e6:.0f}",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def main() -> None:
    found = json.loads(Path(sys.argv[1]).read_text())
    workload = None
    for comparison in found["comparisons"]:
        if comparison["workload"] != workload:
            workload = comparison["workload"]
            print(f"\n| {workload} | step, ms | against best DDP | against local | memory, MB |")
            print("|---|---|---|---|---|")
        print("\n".join(rows_of(comparison)))


if __name__ == "__main__":
    main()
