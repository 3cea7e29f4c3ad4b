"""Kill one of four ranks at a random step, again and again: `python -m benchmarks.kills`.

Each run must finish on the three that are left, with status 0, and leave no process and no shared
memory behind. Accuracies are shown beside those of undisturbed runs, whose spread is theirs too.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil

RANKS = 4
EPOCHS = 8
STEPS = EPOCHS * (1437 // 64)
JOB = Path(__file__).parent.parent / "examples" / "digits.toml"
TIMEOUT_S = 120.0


def run(strategy: str, seed: int, fault: dict[str, Any] | None, folder: Path) -> dict[str, Any]:
    """Train once; return what came of it."""
    command = [sys.executable, "-m", "syncline", "train", str(JOB), "--ranks", str(RANKS), "--json"]
    sets = [f"strategy.name={strategy}", f"run.epochs={EPOCHS}", f"run.seed={seed}"]
    if fault is not None:
        inside = ", ".join(f"{key}={json.dumps(value)}" for key, value in fault.items())
        sets.append(f"faults=[{{{inside}}}]")
    for one in sets:
        command += ["--set", one]
    done = subprocess.run(
        [*command, "--out", str(folder)], capture_output=True, text=True, timeout=TIMEOUT_S
    )
    if done.returncode:
        return {"status": done.returncode, "said": done.stderr[-2000:], "accuracy": 0.0, "gone": {}}
    found = json.loads(done.stdout)
    return {"status": 0, "accuracy": found["accuracy"], "gone": found["gone"]}


def leftovers(folder: Path) -> list[str]:
    """Name processes that still work in a run folder."""
    left = []
    for process in psutil.process_iter(["cmdline"]):
        if str(folder) in (process.info["cmdline"] or []):
            left.append(f"process {process.pid}")
    return left


def main() -> int:
    """Run, print a line for each strategy, return 1 if any run did not do as promised."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kills")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--undisturbed", type=int, default=5)
    parser.add_argument("--strategies", default="gossip,elastic")
    job = parser.parse_args()
    segments = set(Path("/dev/shm").iterdir())
    is_well = True
    for strategy in job.strategies.split(","):
        draw = random.Random(strategy)
        killed, free, failures = [], [], []
        for seed in range(job.runs + job.undisturbed):
            fault = None
            if seed < job.runs:
                step = draw.randrange(1, STEPS)
                fault = {"rank": draw.randrange(RANKS), "step": step, "kind": "death"}
            with tempfile.TemporaryDirectory() as name:
                folder = Path(name) / "run"
                found = run(strategy, seed, fault, folder)
                failures += leftovers(folder)
            if found["status"] or (fault and list(found["gone"]) != [str(fault["rank"])]):
                failures.append(f"seed {seed}, {fault}: {found}")
            (free if fault is None else killed).append(found["accuracy"])
        failures += [str(path) for path in set(Path("/dev/shm").iterdir()) - segments]
        is_well = is_well and not failures
        print(f"{strategy}: {len(killed) - len(failures)} of {len(killed)} finished as promised")
        for what, values in (("killed", killed), ("undisturbed", free)):
            shown = [f"{f(values):.4f}" for f in (min, statistics.median, max)] if values else []
            print(f"  accuracy, {what}: least, median, most {', '.join(shown)}")
        for failure in failures:
            print(f"  {failure}")
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())
