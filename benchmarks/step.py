"""Time one step of every arm on every workload, interleaved in one run.

For each workload and number of ranks all arms are started once and stay, asleep, while others are
measured; then rounds in which every arm in turn, in shuffled order, runs one block of steps. Where
all arms together would not fit into memory, each is started anew in every round and killed after
its block. A block lasts at least --seconds and at least five steps, and includes the communication
that its last step leaves behind.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.arms import ARMS, METHODS, SYNCHRONOUS, WORKLOADS, Arm
from benchmarks.figures import ArmResult, Comparison, check_goals, doubts, goals_table, table
from benchmarks.ranks import TOP_FOLDER, ArmFailed, Ranks

FIRST_STEPS = 3
LEAST_STEPS = 5
MEMORY_SHARE = 0.6  # of what is available at the start; the rest is for others and for peaks
BLOCK_TIMEOUT_S = 120.0  # for what should take no time; ten times the expected time comes on top


class Bench:
    """One workload at one number of ranks: the arms, those that are running, and the figures."""

    def __init__(self, workload: str, num_ranks: int, arms: Sequence[Arm], seconds: float) -> None:
        self.workload = workload
        self.num_ranks = num_ranks
        self.seconds = seconds
        self.results = [ArmResult(arm) for arm in arms]
        self.running: dict[Arm, Ranks] = {}
        self.memory_bytes = MEMORY_SHARE * available_bytes()
        self.restarts = False

    def run_block(self, result: ArmResult, *, is_last: bool) -> None:
        """Measure one arm once; if it fails, note why and leave it out from then on."""
        try:
            ranks = self._ready(result)
            steps, took_s = FIRST_STEPS, self._run(ranks, FIRST_STEPS, 0.0)[0]
            # Caches and clock rates settle, and we learn how many steps fill a block.
            while took_s < self.seconds / 10:
                steps *= 2
                took_s = self._run(ranks, steps, 2 * took_s)[0]
            steps = max(LEAST_STEPS, math.ceil(self.seconds * steps / took_s))
            took_s, result.losses = self._run(ranks, steps, self.seconds + LEAST_STEPS * took_s)
            result.step_s.append(took_s / steps)
            result.pss_bytes = ranks.pss_bytes()
            if is_last:
                result.final_sums = ranks.sums()
        except ArmFailed as failure:
            result.failure = str(failure)
            if result.arm in self.running:
                self.running.pop(result.arm).stop()
        self._make_room()

    def close(self) -> None:
        """Stop every arm that is running."""
        while self.running:
            self.running.popitem()[1].stop()

    def comparison(self) -> Comparison:
        return Comparison(self.workload, self.num_ranks, self.restarts, self.results)

    def _ready(self, result: ArmResult) -> Ranks:
        ranks = self.running.get(result.arm)
        if ranks is None:
            ranks = self.running[result.arm] = Ranks(self.workload, result.arm, self.num_ranks)
            self._run(ranks, FIRST_STEPS, 0.0)
            result.first_sums = ranks.sums()
        return ranks

    def _run(self, ranks: Ranks, steps: int, expected_s: float) -> tuple[float, list[float]]:
        return ranks.run(steps, BLOCK_TIMEOUT_S + 10 * expected_s)

    def _make_room(self) -> None:
        """Give up keeping arms alive as soon as it is clear that not all will fit."""
        largest_bytes = max(result.pss_bytes for result in self.results)
        self.restarts = self.restarts or len(self.results) * largest_bytes > self.memory_bytes
        if self.restarts:
            self.close()


def measure(job: argparse.Namespace, progress: Progress) -> Iterator[Comparison]:
    """Run the whole job; yield each workload at each number of ranks when it is done."""
    arms = [arm for arm in ARMS if arm.method in job.methods]
    cases = [(workload, ranks) for workload in job.workloads for ranks in job.ranks]
    task = progress.add_task("", total=len(cases) * job.rounds * len(arms))
    order = random.Random(0)
    for workload, num_ranks in cases:
        bench = Bench(workload, num_ranks, arms, job.seconds)
        try:
            for round_number in range(1, job.rounds + 1):
                where = f"{workload}, {num_ranks} ranks, round {round_number} of {job.rounds}"
                if not progress.console.is_terminal:
                    progress.console.print(where)
                for result in order.sample(bench.results, len(bench.results)):
                    progress.update(task, description=f"{where}: {result.arm.name}")
                    if result.failure is None:
                        bench.run_block(result, is_last=round_number == job.rounds)
                    progress.advance(task)
        finally:
            bench.close()
        yield bench.comparison()


def available_bytes() -> int:
    """Read how much memory can be used without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("the kernel does not report MemAvailable")


def machine_facts() -> dict[str, Any]:
    """Say where and with what the figures were made."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(": ", 1)[1] for line in lines if line.startswith("model name")), "?")
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "available_bytes": available_bytes(),
        "load_before": os.getloadavg()[0],
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "commit": _git("rev-parse", "HEAD"),
        "has_changes": bool(_git("status", "--porcelain")),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _git(*arguments: str) -> str | None:
    command = ["git", "-C", str(TOP_FOLDER), *arguments]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return ended.stdout.strip()


def read_job(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step", description=__doc__)
    parser.add_argument("--workloads", type=_names(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--ranks", type=_numbers, default=[2, 4])
    parser.add_argument("--methods", type=_names(METHODS), default=list(SYNCHRONOUS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=2.0, help="least length of a block")
    parser.add_argument("--json", action="store_true", help="print one object on stdout")
    parser.add_argument("--check", action="store_true", help="compare with our goals")
    job = parser.parse_args(arguments)
    if job.rounds < 1 or job.seconds <= 0:
        parser.error("--rounds is at least 1 and --seconds more than 0")
    return job


def _names(known: Sequence[str] | dict[str, Any]) -> Any:
    def read(text: str) -> list[str]:
        names = text.split(",")
        for name in names:
            if name not in known:
                rule = f"got {name!r}, choose from {', '.join(known)}"
                raise argparse.ArgumentTypeError(rule)
        return names

    return read


def _numbers(text: str) -> list[int]:
    try:
        numbers = [int(word) for word in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, write for example 2,4")
    return numbers


def _stop(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)  # as an exception: every `finally` on the way kills its ranks


def main() -> int:
    """Measure, print, and return 1 if an arm failed, did not do its work, or missed a goal."""
    job = read_job()
    signal.signal(signal.SIGTERM, _stop)
    signal.signal(signal.SIGHUP, _stop)
    machine = machine_facts()
    # A file has no width: do not squeeze the tables into the 80 columns that rich assumes.
    stream = sys.stderr if job.json else sys.stdout
    console = Console(file=stream, width=None if stream.isatty() else 130)
    console.print(machine)
    comparisons = []
    columns = (MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    try:
        with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            for comparison in measure(job, progress):
                comparisons.append(comparison)
                console.print(table(comparison))
    except KeyboardInterrupt:
        return 130
    doubtful = [line for comparison in comparisons for line in doubts(comparison)]
    goals = check_goals(comparisons) if job.check else []
    if job.json:
        result = {"machine": machine, "job": vars(job), "doubts": doubtful, "goals": goals}
        result["comparisons"] = [comparison.to_json_dict() for comparison in comparisons]
        print(json.dumps(result, indent=2))
    if goals:
        console.print(goals_table(goals))
    for line in doubtful:
        print(f"doubtful: {line}", file=sys.stderr)
    return 1 if doubtful or not all(goal["is_met"] for goal in goals) else 0


if __name__ == "__main__":
    sys.exit(main())
