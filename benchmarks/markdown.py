"""Turn what `benchmarks.step --json` or `benchmarks.wire --json` wrote into tables for the docs.

python -m benchmarks.markdown FILE ...
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.arms import CONTROL, METHODS, OTHER


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
    for method in (*METHODS, OTHER.method, CONTROL.method):
        if method in best:
            arm = best[method]
            name = f"{comparison['ranks']} ranks: {arm['name']}"
            digits = 2 if arm["step_s"]["median"] < 0.02 else 0
            cells = [
                name,
                spread(arm["step_s"], 1e3, digits),
                spread(arm.get("speed_against_best_ddp")),
                spread(arm.get("speed_against_no_exchange")),
                f"{arm['pss_bytes'] / 1e6:.0f}",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def wire_table(case: dict[str, Any]) -> list[str]:
    """Write one case of the wire benchmark, a line for each arm."""
    arms, ideal_s = case["arms"], case["ideal_s"]
    title = f"{case['case']}; ideal {ideal_s * 1e3:.0f} ms"
    lines = [
        f"| {title} | step, ms | of ideal | against best DDP | bytes | CPU, ms |",
        "|---|---|---|---|---|---|",
    ]
    for arm, row in arms.items():
        step, least, most = (row[key] * 1e3 for key in ("step_s", "least_s", "most_s"))
        cells = [
            arm,
            f"{step:.0f} ({least:.0f} to {most:.0f})",
            f"{row['step_s'] / ideal_s:.3f}",
            spread(row["speed_against_best_ddp"]),
            f"{row['sent_bytes'] / case['least_bytes']:.3f}",
            f"{row['cpu_s'] * 1e3:.0f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main() -> None:
    for path in sys.argv[1:]:
        found = json.loads(Path(path).read_text())
        for case in found.get("cases", ()):
            print("\n".join(["", *wire_table(case)]))
        if "comparisons" in found:
            print_steps(found)


def print_steps(found: dict[str, Any]) -> None:
    workload = None
    for comparison in found["comparisons"]:
        if comparison["workload"] != workload:
            workload = comparison["workload"]
            print(
                f"\n| {workload} | step, ms | against best DDP | against no_exchange | memory, MB |"
            )
            print("|---|---|---|---|---|")
        print("\n".join(rows_of(comparison)))


if __name__ == "__main__":
    main()
