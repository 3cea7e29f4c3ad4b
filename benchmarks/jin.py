"""Writes docs/jin.md and its plots from the folder of examples/study-jin.toml.

    syncline compare examples/study-jin.toml --out runs/jin
    python -m benchmarks.jin runs/jin

What was found stands between two marks in docs/jin.md and is written anew; the words around it are
kept. A comparison that is not complete is said to be one.
"""

from __future__ import annotations

import argparse
import csv
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.jin_plot import lines_plot, mean_curves, ratios
from syncline.compare.folder import POINTS, read_summary
from syncline.files import write_atomically

DOCS = Path(__file__).parents[1] / "docs"
BEGIN, END = "<!-- found: begin -->", "<!-- found: end -->"
REFERENCE = "synchronous"
_WIDTH = 118
_SHOWN = (8, 128)
"""Ranks of the plots of accuracy against time."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("folder", type=Path, help="the folder of the comparison")
    parser.add_argument("--docs", type=Path, default=DOCS)
    given = parser.parse_args()
    summary = read_summary(given.folder)
    with (given.folder / POINTS).open(newline="") as file:
        rows = list(csv.DictReader(file))
    for name, text in plots(summary, rows):
        write_atomically(given.docs / name, text.encode())
        print(given.docs / name)
    page = given.docs / "jin.md"
    before, _, rest = page.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    found = "\n".join(found_of(summary))
    write_atomically(page, f"{before}{BEGIN}\n\n{found}\n\n{END}{after}".encode())
    print(page)


def plots(summary: dict[str, Any], rows: list[dict[str, str]]) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each plot."""
    grid = summary["tables"][0]["grid"]
    for table in summary["tables"]:
        if table["grid"] != grid:
            continue
        scenario, target = table["scenario"], summary["target"]
        yield (
            f"jin-ratio-{scenario}.svg",
            lines_plot(
                ratios(table, REFERENCE),
                f"time to {target:g}, divided by that of {REFERENCE} ({scenario})",
                "ranks",
                "below 1: faster; lines: least and most of the seeds",
                is_log=True,
            ),
        )
        for ranks in _SHOWN:
            curves = {
                name: mean_curves(
                    [
                        row
                        for row in rows
                        if (row["grid"], row["scenario"]) == (grid, scenario)
                        and (row["variant"], row["ranks"]) == (name, str(ranks))
                    ],
                    "time_s",
                )
                for name in table["variants"]
            }
            if any(curves.values()):
                yield (
                    f"jin-accuracy-{scenario}-{ranks}.svg",
                    lines_plot(
                        curves,
                        f"{ranks} ranks, {scenario}: accuracy, mean over seeds",
                        "virtual seconds",
                        "test accuracy; lines: least and most of the seeds",
                        is_log=False,
                    ),
                )


def found_of(summary: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of what was found."""
    cells = summary["cells"]
    if not summary["is_complete"]:
        yield f"**Not complete: {cells['missing']} of {cells['wanted']} runs are missing.**\n"
    seeds = ", ".join(map(str, summary["seeds"]))
    yield (
        f"{cells['done']} runs of {summary['samples']} samples with seeds {seeds};"
        f" {cells['failed']} failed. {summary['tune']} settings were tried for each strategy,"
        f" number of ranks and grid. Syncline {summary['syncline']}."
    )
    grid = summary["tables"][0]["grid"]
    for table in summary["tables"]:
        if table["grid"] == grid:
            scenario = table["scenario"]
            yield f"\n![time to target by ranks, {scenario}](jin-ratio-{scenario}.svg)"
            for ranks in _SHOWN:
                if ranks in table["ranks"]:
                    yield f"![accuracy, {ranks} ranks](jin-accuracy-{scenario}-{ranks}.svg)"
    yield "\n### First by time to target\n"
    yield "| | | " + " | ".join(f"{n} ranks" for n in _all_ranks(summary)) + " |"
    yield "|---|---|" + "---|" * len(_all_ranks(summary))
    for table in summary["tables"]:
        words = {one["ranks"]: one["by_time"]["words"] for one in table["winners"]}
        row = [words.get(ranks, "") for ranks in _all_ranks(summary)]
        yield f"| {table['grid']} | {table['scenario']} | " + " | ".join(row) + " |"
    for text in summary["rules"].values():
        yield "\n" + textwrap.fill(text, _WIDTH)
    for table in summary["tables"]:
        yield from _table(summary, table)
    for one in summary["failed"]:
        where = f"{one['variant']} on {one['ranks']} ranks, seed {one['seed']}"
        yield f"\nFailed: {where}: {one['why']}"


def _all_ranks(summary: dict[str, Any]) -> list[int]:
    return sorted({ranks for table in summary["tables"] for ranks in table["ranks"]})


def _table(summary: dict[str, Any], table: dict[str, Any]) -> Iterator[str]:
    yield f"\n### {table['grid']}, {table['scenario']}\n"
    yield f"{table['batch_rule']}; {table['scenario_words']}.\n"
    yield (
        f"| ranks | strategy | lr, of those tried | seconds to {summary['target']:g} | reached |"
        " accuracy at the end | seconds | samples/s | samples of a rank |"
    )
    yield "|---|---|---|---|---|---|---|---|---|"
    for row in table["rows"]:
        ranks = f"{row['ranks']}" + (f" + {row['servers']}" if row["servers"] else "")
        target = row["to_target"] or {"time_s": {"mean": None}, "reached": 0, "of": 0}
        shared = row["samples_by_rank"]
        cells = [ranks, row["variant"], _tried(row), _spread(target["time_s"], ".3g")]
        cells += [f"{target['reached']} of {target['of']}"]
        cells += [_spread(row["final"]["accuracy"], ".4f"), _spread(row["final"]["time_s"], ".3g")]
        cells += [
            f"{row['samples_per_s']['mean'] or 0:.0f}",
            f"{shared['least']} to {shared['most']}",
        ]
        yield "| " + " | ".join(cells) + " |"


def _tried(row: dict[str, Any]) -> str:
    lr = f"{row['settings']['optimizer.lr']:g}"
    if row["tuning"] is None:
        return f"{lr} (not tuned)"
    tried = (f"{one['settings']['optimizer.lr']:g}" for one in row["tuning"]["tried"])
    return f"{lr} of {', '.join(tried)}"


def _spread(one: dict[str, Any], digits: str) -> str:
    if one["mean"] is None:
        return "-"
    if one["least"] == one["most"]:
        return f"{one['mean']:{digits}}"
    return f"{one['mean']:{digits}} ({one['least']:{digits}} to {one['most']:{digits}})"


if __name__ == "__main__":
    main()
