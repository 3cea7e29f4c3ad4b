"""Predicted against measured steps: `python -m benchmarks.prediction --out FOLDER` (as root).

Every strategy runs on this machine with 2 and 4 ranks, and in the lab on 2, 4 and 8 machines, with
links of 1 Gbit/s and of 100 Mbit/s; networks sleep, or compute for real. Each case is predicted
from what 2 ranks measured beforehand: layers, links inside this machine, costs of messages; the
lab's latency is half a round trip between two machines, and its rate is what it is set to. Nothing
is fitted to the runs. Beside each prediction stand two that know no strategy: communication is
free, and compute and wire take turns.

The folder keeps calibration, runs and traces: started again, the benchmark goes on where it was;
with `--predict` it measures nothing, and works on any machine. Exit status 1 if a goal is missed.
"""

from __future__ import annotations

import argparse
import contextlib
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

import msgspec
import torch
from lab.network import Lab, LabError, rate_bytes_per_s, why_not
from rich.console import Console
from rich.table import Table

from benchmarks.channels import ArmFailed
from benchmarks.clock_machines import Machines, ask
from benchmarks.clocks import PAYLOAD_SHARE
from benchmarks.command import end_cleanly, machine_facts
from benchmarks.prediction_cases import STRATEGIES, Case, all_cases, calibration_of, network
from benchmarks.prediction_figures import error_of, figures, half_width, is_inside, missed
from benchmarks.prediction_plot import plot
from syncline import workload as workloads
from syncline.cluster_facts import ClusterFacts, Fact, LinkFacts
from syncline.cluster_file import read_cluster
from syncline.config import Job, read_job
from syncline.dataset import LATENCY, LINKS, RUNS, Run, read_latency, read_runs
from syncline.files import write_atomically
from syncline.measure.as_run import as_run
from syncline.measure.validation import predict
from syncline.perf.trace import Trace
from syncline.sizes import Size
from syncline.workload import Workload

CALIBRATED_ON = 2
"""Ranks."""
LATENCY_RANGE = 0.2
RATE_RANGE = 0.02
"""Of the lab's links: judgements, from before the first run."""
LAYERS_S = 15
"""How long layers are measured."""


class Folder:
    """What was measured: jobs, calibration, runs and traces."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        self._runs = path / RUNS

    def job_file(self, case: Case) -> Path:
        path = self.path / case.job_name
        if not path.exists():
            path.write_text(network(case.network, case.rate).job)
        return path

    def job(self, case: Case) -> Job:
        return read_job(self.job_file(case), case.sets(10))

    def workload(self, case: Case) -> Workload:
        """Return the layers' times; of a real network as a traced run of two ranks has them."""
        found = workloads.read(self.layers(case))
        if not network(case.network, case.rate).is_real:
            return found
        known = calibration_of(case.network)
        steps_s = [run.step_s for run in self.runs() if run.case == known]
        step_s = statistics.median(steps_s) if steps_s else None
        return as_run(found, Trace.read(self.trace(known)), step_s)

    def layers(self, case: Case) -> Path:
        real, sleeping = case.layers_names
        return self.path / (real if network(case.network, case.rate).is_real else sleeping)

    @property
    def links(self) -> Path:
        return self.path / LINKS

    @property
    def latency(self) -> Path:
        return self.path / LATENCY

    def facts(self, case: Case) -> ClusterFacts:
        """Return what is known of the place of a case."""
        known = read_cluster(self.links)
        if not case.rate:
            return known
        rate = rate_bytes_per_s(case.rate) * PAYLOAD_SHARE
        latency = read_latency(self.latency.read_bytes(), str(self.latency))
        network_facts = LinkFacts(
            latency_s=Fact(
                latency, latency * (1 - LATENCY_RANGE), latency * (1 + LATENCY_RANGE), "measured"
            ),
            rate_bytes_per_s=Fact(rate, rate * (1 - RATE_RANGE), rate, "set"),
        )
        computes = network(case.network, case.rate).is_real
        return msgspec.structs.replace(
            known,
            network=network_facts,
            one_computer=True,
            cores=known.cores if computes else None,
            measured=(),
        )

    def runs(self) -> list[Run]:
        """Return what was measured so far. A line that was cut off in the middle is dropped."""
        if not self._runs.exists():
            return []
        data = self._runs.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        if whole != data:
            write_atomically(self._runs, whole)
        return list(read_runs(whole, str(self._runs)))

    def add(self, run: Run) -> None:
        with self._runs.open("a") as file:
            file.write(json.dumps(run) + "\n")

    def trace(self, case: Case) -> Path:
        path = self.path / case.trace_name
        path.parent.mkdir(exist_ok=True)
        return path


def calibrate(folder: Folder, cases: Sequence[Case]) -> None:
    """Measure what is not in the folder yet."""
    if not folder.links.exists():
        ask("syncline", "measure", "links", "--json", "--out", str(folder.links))
    if not folder.latency.exists() and any(case.rate for case in cases):
        folder.latency.write_text(json.dumps(ask("benchmarks.latency", "--json")))
    for case in cases:
        path = folder.layers(case)
        if path.exists():
            continue
        if network(case.network, case.rate).is_real:
            batch = network(case.network, case.rate).samples * CALIBRATED_ON
            words = ("--set", f"data.batch={batch}", "--set", f"run.ranks={CALIBRATED_ON}")
            given = ("--ranks", str(CALIBRATED_ON), "--seconds", str(LAYERS_S), "--samples")
            samples = str(batch // CALIBRATED_ON)
            job = str(folder.job_file(case))
            more = (*given, samples, "--out", str(path), "--json")
            ask("syncline", "measure", "layers", job, *words, *more)
        else:
            workloads.write(_sleeping(folder.job(case)), path)
        print(f"calibrated: {path.name}", file=sys.stderr)


def _sleeping(job: Job) -> Workload:
    """Return a sleeping network's workload: a plain loop's forward and backward, by layer."""
    options = job.model.options
    sizes = [int(size) for size in options["sizes"]]
    times = ask("benchmarks.clock_job", json.dumps(sizes), str(options["compute_s"]))
    count = len(sizes)
    forward_s, backward_s = times["forward_s"] / count, times["backward_s"] / count
    layers = [
        workloads.Layer(str(at), size, forward_s, backward_s) for at, size in enumerate(sizes)
    ]
    parameters = [
        Size(f"{at}.weight", at, size // 4, 4, "float32", True) for at, size in enumerate(sizes)
    ]
    return Workload(
        "sleeping",
        tuple(layers),
        0.0,
        tuple(parameters),
        samples=4,
        made_by="measured",
        spread=times["spread"],
    )


def measure(folder: Folder, cases: Sequence[Case], rounds: int, steps: int) -> None:
    """Run what the folder lacks, in shuffled order, place by place."""
    done = [run.case for run in folder.runs()]
    order = random.Random(0)
    for turn in range(rounds):
        for rate in dict.fromkeys(case.rate for case in cases):
            here = [case for case in cases if case.rate == rate and done.count(case) <= turn]
            if here:
                with _machines(rate, max(case.ranks for case in here)) as machines:
                    for case in order.sample(here, len(here)):
                        _run(folder, machines, case, steps, turn)


@contextlib.contextmanager
def _machines(rate: str, count: int) -> Iterator[Machines]:
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        lab = stack.enter_context(Lab(count, rate)) if rate else None
        machines = Machines(count, Path(name) / "log", lab)
        yield stack.enter_context(contextlib.closing(machines))


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
    measured = {case: [run.step_s for run in runs if run.case == case] for case in cases}
    known = [case for case in cases if measured[case] and case != calibration_of(case.network)]
    for case in known:
        folder.job_file(case)
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        rows = pool.map(_predict, [folder.path] * len(known), known)
        return [{"measured_s": measured[Case(*row["case"])], **row} for row in rows]


def _predict(path: Path, case: Case) -> dict[str, Any]:
    torch.set_num_threads(1)
    folder = Folder(path)
    job, facts, own = folder.job(case), folder.facts(case), folder.workload(case)
    found = predict(job, case.ranks, case.ranks if case.rate else 1, facts, own)
    print(f"predicted {case.key}", file=sys.stderr)
    return {
        "case": list(case),
        "predicted_s": found.outcome.step_s,
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
    parser.add_argument("--steps", type=int, default=14)
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
    found = figures(rows)
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
