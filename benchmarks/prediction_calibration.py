"""What `benchmarks.prediction` measures before its first prediction, on two ranks."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from lab.network import Lab

from benchmarks.clock_machines import Machines, ask
from benchmarks.prediction_cases import CALIBRATED_ON, Case, calibration_of, network
from benchmarks.prediction_folder import Folder
from syncline import workload as workloads
from syncline.config import Job
from syncline.files import write_atomically
from syncline.sizes import Size
from syncline.workload import Workload

LAYERS_S = 15
"""How long layers are measured."""
BUSY_STEPS = (20, 120)


@contextlib.contextmanager
def machines_at(rate: str, count: int) -> Iterator[Machines]:
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        lab = stack.enter_context(Lab(count, rate)) if rate else None
        machines = Machines(count, Path(name) / "log", lab)
        yield stack.enter_context(contextlib.closing(machines))


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


def measure_busy(folder: Folder, cases: Sequence[Case]) -> None:
    """Measure how long all cores together are busy in a step of the runs that calibrate."""
    busy = json.loads(folder.busy.read_text()) if folder.busy.exists() else {}
    for case in dict.fromkeys(calibration_of(one.network, one.rate) for one in cases):
        if case.key in busy or not network(case.network, case.rate).is_real:
            continue
        with machines_at(case.rate, case.ranks) as machines, tempfile.TemporaryDirectory() as out:
            took = []
            for steps in BUSY_STEPS:
                began = busy_s()
                name = Path(out, str(steps))
                machines.train(folder.job_file(case), case.ranks, case.sets(steps), name, None)
                took.append(busy_s() - began)
        # The difference of a long and a short run has neither start nor end.
        busy[case.key] = (took[1] - took[0]) / (BUSY_STEPS[1] - BUSY_STEPS[0])
        write_atomically(folder.busy, json.dumps(busy).encode())
        print(f"calibrated: {case.key}, {busy[case.key] * 1e3:.1f} ms of cores", file=sys.stderr)


def busy_s() -> float:
    """Return how long this computer's cores have been busy, all together: Linux's own count."""
    with open("/proc/stat") as file:
        user, nice, system, _, _, *interrupts = map(int, file.readline().split()[1:8])
    return (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK")


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
