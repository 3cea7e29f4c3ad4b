"""Predicted against measured steps: `python -m benchmarks.prediction --out FOLDER` (as root).

Every strategy runs on this machine with 2 and 4 ranks, and in the lab on 2, 4 and 8 machines, with
links of 1 Gbit/s and of 100 Mbit/s; networks sleep, or compute for real. Each case is predicted
from what 2 ranks measured beforehand: layers, links inside this machine, costs of messages, and the
processor time of a run in the lab beyond that of a run in shared memory; the lab's latency is half
a round trip between two machines, and its rate is what it is set to. Nothing is fitted to the runs
that are predicted. Beside each prediction stand two that know no strategy: communication is
free, and compute and wire take turns.

The folder keeps calibration, runs and traces: started again, the benchmark goes on where it was;
with `--predict` it measures nothing, and works on any machine. Exit status 1 if a goal is missed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from lab.network import LabError, why_not
from rich.console import Console
from rich.table import Table

from benchmarks.channels import ArmFailed
from benchmarks.clock_machines import Machines
from benchmarks.command import end_cleanly, machine_facts
from benchmarks.prediction_calibration import calibrate, machines_at, measure_busy
from benchmarks.prediction_cases import STRATEGIES, Case, all_cases, calibration_of, network
from benchmarks.prediction_figures import error_of, figures, half_width, is_inside, missed
from benchmarks.prediction_folder import Folder
from benchmarks.prediction_plot import plot
from syncline.cluster_facts import ClusterFacts
from syncline.dataset import Run
from syncline.measure.validation import predict
from syncline.workload import Workload

STEPS = 30
"""Of a run, and of a simulation: gossip's partners are drawn anew in each step."""


def measure(folder: Folder, cases: Sequence[Case], rounds: int, steps: int) -> None:
    """Run what the folder lacks, in shuffled order, place by place."""
    done = [run.case for run in folder.runs()]
    order = random.Random(0)
    for turn in range(rounds):
        for rate in dict.fromkeys(case.rate for case in cases):
            here = [case for case in cases if case.rate == rate and done.count(case) <= turn]
            if here:
                with machines_at(rate, max(case.ranks for case in here)) as machines:
                    for case in order.sample(here, len(here)):
                        _run(folder, machines, case, steps, turn)


def _run(folder: Folder, machines: Machines, case: Case, steps: int, turn: int) -> None:
    trace = folder.trace(case) if turn == 0 else None
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as out:
        # A trace is a run of its own: recording is not free.
        if trace is not None and not trace.exists():
            machines.train(folder.job_file(case), case.ranks, case.sets(5), Path(out, "t"), trace)
        sets = case.sets(steps)
        found = machines.train(folder.job_file(case), case.ranks, sets, Path(out, "r"), None)
    keys = ("step_s", "samples_per_s", "sent_bytes", "exposed_communication")
    folder.add(Run(case, *(found[key] for key in keys)))
    took_s = time.monotonic() - began_s
    print(f"{turn + 1} {case.key}: {found['step_s'] * 1e3:.1f} ms, {took_s:.1f} s", file=sys.stderr)


def rows_of(folder: Folder, cases: Sequence[Case]) -> list[dict[str, Any]]:
    """Predict every case that was measured, on all cores."""
    runs = folder.runs()
    measured = {case: [case.step_of(run) for run in runs if run.case == case] for case in cases}
    known = [case for case in cases if measured[case] and not _calibrates(case)]
    for case in known:
        folder.job_file(case)
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        rows = pool.map(_predict, [folder.path] * len(known), known)
        return [{"measured_s": measured[Case(*row["case"])], **row} for row in rows]


def _calibrates(case: Case) -> bool:
    is_real = network(case.network, case.rate).is_real
    return is_real and case == calibration_of(case.network, case.rate)


def _predict(path: Path, case: Case) -> dict[str, Any]:
    torch.set_num_threads(1)
    folder = Folder(path)
    job, facts, own = folder.job(case), folder.facts(case), folder.workload(case)
    machines = case.ranks if case.rate else 1
    found = predict(job, case.ranks, machines, facts, own, STEPS, case.step_of)
    print(f"predicted {case.key}", file=sys.stderr)
    return {
        "case": list(case),
        "predicted_s": case.step_of(found.outcome),
        "low_s": found.interval.low_s,
        "high_s": found.interval.high_s,
        **_null(case, facts, own),
    }


def _null(case: Case, facts: ClusterFacts, own: Workload) -> dict[str, float]:
    """Return the steps that predictors without a strategy say."""
    cores = facts.cores or case.ranks
    crowding = max(1.0, case.ranks / cores) / own.crowding
    compute_s = (own.forward_s + own.backward_s) * crowding + (own.update_s or 0.0)
    link = facts.network if case.rate else facts.inside
    assert link.rate_bytes_per_s is not None
    wire_s = 2 * (case.ranks - 1) / case.ranks * own.size_bytes / link.rate_bytes_per_s.value
    return {"free_s": compute_s, "in_turn_s": compute_s + wire_s}


def table_of(rows: Sequence[dict[str, Any]]) -> Table:
    """Return a row for each network, place and number of ranks: errors by strategy."""
    table = Table("place", "network", "ranks", *STRATEGIES, title="predicted over measured steps")
    groups: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        case = Case(*row["case"])
        groups.setdefault(case.group, {})[case.strategy] = row
    for group, by_strategy in groups.items():
        cells = []
        for strategy in STRATEGIES:
            row = by_strategy.get(strategy)
            mark = "" if row is None or is_inside(row) else "!"
            cells.append("" if row is None else f"{error_of(row):+.1%}{mark}")
        table.add_row(*group.split("/"), *cells)
    return table


def lines_of(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield a line of Markdown for each case, for the docs."""
    yield "| case | measured, ms | predicted, ms | error | nine in ten |"
    yield "|---|---|---|---|---|"
    for row in rows:
        measured = statistics.median(row["measured_s"]) * 1e3
        interval = f"{row['low_s'] * 1e3:.4g} to {row['high_s'] * 1e3:.4g}"
        key = Case(*row["case"]).key
        predicted = f"{row['predicted_s'] * 1e3:.4g}"
        yield f"| {key} | {measured:.4g} | {predicted} | {error_of(row):+.1%} | {interval} |"


def read_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prediction", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/prediction"), metavar="FOLDER")
    parser.add_argument("--only", default="", metavar="PATTERN", help="cases whose key it matches")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--predict", action="store_true", help="measure nothing")
    parser.add_argument("--markdown", action="store_true", help="print all cases as a table")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a scatter plot, as SVG")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(arguments)


def main() -> int:
    job = read_arguments()
    cases = [case for case in all_cases() if re.search(job.only, case.key)]
    if not job.predict and any(case.rate for case in cases) and (reason := why_not()):
        print(f"benchmarks.prediction: {reason}", file=sys.stderr)
        return 2
    end_cleanly()
    folder = Folder(job.out)
    if not job.predict:
        try:
            calibrate(folder, cases)
            measure_busy(folder, cases)
            measure(folder, cases, job.rounds, job.steps)
        except (LabError, ArmFailed) as error:
            print(f"benchmarks.prediction: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            return 130
    rows = rows_of(folder, cases)
    if not rows:
        print(f"benchmarks.prediction: {job.out} holds no runs of these cases", file=sys.stderr)
        return 2
    short = [row for row in rows if Case(*row["case"]).is_short]
    counted = [row for row in rows if row not in short]
    found = figures(counted or rows)
    if counted and short:
        found["short_steps"] = {"cases": len(short), "mean_error": figures(short)["mean_error"]}
    if job.plot is not None:
        job.plot.write_text(plot(rows))
    if job.json:
        print(json.dumps({"machine": machine_facts(), **found, "rows": rows}, indent=1))
    elif job.markdown:
        print("\n".join(lines_of(rows)))
    else:
        console = Console(width=None if sys.stdout.isatty() else 180)
        console.print(table_of(rows))
        for key, value in found.items():
            console.print(f"{key}: {value}")
        console.print(f"widest: {max(map(half_width, rows)):.1%}; goals missed: {missed(found)}")
    return 1 if missed(found) else 0


if __name__ == "__main__":
    sys.exit(main())
