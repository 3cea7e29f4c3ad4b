"""Time one step of every arm on every workload, interleaved in one run.

For each workload and number of ranks all arms are started once and stay, asleep, while others are
measured; then rounds in which every arm in turn, in shuffled order, runs one block of steps. Where
all arms together would not fit into memory, each is started anew in every round and killed after
its block. A block lasts at least --seconds and at least five steps, and includes the communication
that its last step leaves behind. DDP has an arm for each of several bucket sizes; they compete in
rounds of their own, before the others, and the best goes on.

With --against REV two arms more run Syncline as it is in that commit: `other`, and `control`, the
same once more, which shows how far two arms of the same code differ.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import random
import sys
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.arms import ARMS, CONTROL, METHODS, OTHER, SYNCHRONOUS, WORKLOADS, Arm
from benchmarks.busy import busy
from benchmarks.channels import ArmFailed
from benchmarks.command import (
    add_against,
    add_busy,
    available_bytes,
    end_cleanly,
    machine_facts,
    names,
    numbers,
)
from benchmarks.figures import ArmResult, Comparison, choose_best, doubts, table
from benchmarks.goals import RULE_WORKLOADS, check_goals, check_rule, goals_table, rule_table
from benchmarks.ranks import Ranks
from benchmarks.versions import THIS, Version, VersionError, version_of

FIRST_STEPS = 3
LEAST_STEPS = 5
MEMORY_SHARE = 0.6  # of what is available at the start; the rest is for others and for peaks
BLOCK_TIMEOUT_S = 120.0  # for what should take no time; ten times the expected time comes on top


class Bench:
    """One workload at one number of ranks: the arms, those that are running, and the figures."""

    def __init__(
        self,
        workload: str,
        num_ranks: int,
        arms: Sequence[Arm],
        seconds: float,
        other: Version | None,
    ) -> None:
        self.workload = workload
        self.num_ranks = num_ranks
        self.seconds = seconds
        self.other = other
        self.results = [ArmResult(arm) for arm in arms]
        methods = [arm.method for arm in arms]
        self.contested = [r for r in self.results if methods.count(r.arm.method) > 1]
        self.competing = self.contested
        """The arms that take part in the present rounds."""
        self.running: dict[Arm, Ranks] = {}
        self.memory_bytes = MEMORY_SHARE * available_bytes()
        self.restarts = False

    def end_selection(self) -> None:
        """Keep the best arm of each method, and stop those that were not chosen."""
        self.competing = choose_best(self.results)
        for result in self.contested:
            if result not in self.competing and result.arm in self.running:
                self.running.pop(result.arm).stop()
        self.restarts = False
        self._make_room()

    def run_block(self, result: ArmResult, times_s: list[float], *, is_last: bool) -> None:
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
            times_s.append(took_s / steps)
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
            version = self.other if result.arm.is_other else THIS
            assert version is not None, "an arm of the other version without --against"
            ranks = Ranks(self.workload, result.arm, self.num_ranks, version)
            self.running[result.arm] = ranks
            self._run(ranks, FIRST_STEPS, 0.0)
            result.first_sums = ranks.sums()
        return ranks

    def _run(self, ranks: Ranks, steps: int, expected_s: float) -> tuple[float, list[float]]:
        return ranks.run(steps, BLOCK_TIMEOUT_S + 10 * expected_s)

    def _make_room(self) -> None:
        """Give up keeping arms alive as soon as it is clear that not all will fit."""
        largest_bytes = max(result.pss_bytes for result in self.results)
        self.restarts = self.restarts or len(self.competing) * largest_bytes > self.memory_bytes
        if self.restarts:
            self.close()


def measure(
    job: argparse.Namespace, progress: Progress, other: Version | None
) -> Iterator[Comparison]:
    """Run the whole job; yield each workload at each number of ranks when it is done."""
    arms = [arm for arm in ARMS if arm.method in job.methods]
    if other is not None:
        arms += [OTHER, CONTROL]
    cases = [(workload, ranks) for workload in job.workloads for ranks in job.ranks]
    methods = [arm.method for arm in arms]
    contested = sum(methods.count(method) > 1 for method in methods)
    blocks = job.selection_rounds * contested + job.rounds * len(set(methods))
    task = progress.add_task("", total=len(cases) * blocks)
    order = random.Random(0)

    def run_rounds(bench: Bench, rounds: int, *, is_selection: bool) -> None:
        kind = "selection round" if is_selection else "round"
        for number in range(1, rounds + 1):
            where = f"{bench.workload}, {bench.num_ranks} ranks, {kind} {number} of {rounds}"
            if not progress.console.is_terminal:
                progress.console.print(where)
            for result in order.sample(bench.competing, len(bench.competing)):
                progress.update(task, description=f"{where}: {result.arm.name}")
                if result.failure is None:
                    times_s = result.selection_s if is_selection else result.step_s
                    bench.run_block(result, times_s, is_last=number == rounds)
                progress.advance(task)

    for workload, num_ranks in cases:
        bench = Bench(workload, num_ranks, arms, job.seconds, other)
        try:
            if bench.contested:
                run_rounds(bench, job.selection_rounds, is_selection=True)
            bench.end_selection()
            run_rounds(bench, job.rounds, is_selection=False)
        finally:
            bench.close()
        yield bench.comparison()


def read_job(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step", description=__doc__)
    parser.add_argument(
        "--workloads", type=names(WORKLOADS), help="default: all; with --against those of the rule"
    )
    parser.add_argument("--ranks", type=numbers, default=[2, 4])
    parser.add_argument(
        "--methods",
        type=names(METHODS),
        help="default: the synchronous ones; with --against syncline alone",
    )
    parser.add_argument("--rounds", type=int, default=7, help="rounds that are compared")
    parser.add_argument(
        "--selection-rounds",
        type=int,
        default=3,
        help="rounds before them, to choose DDP's buckets",
    )
    parser.add_argument("--seconds", type=float, default=2.0, help="least length of a block")
    parser.add_argument("--json", action="store_true", help="print one object on stdout")
    parser.add_argument("--check", action="store_true", help="compare with our goals")
    add_against(parser)
    add_busy(parser)
    job = parser.parse_args(arguments)
    if min(job.rounds, job.selection_rounds) < 1 or job.seconds <= 0 or job.busy < 0:
        parser.error(
            "--rounds and --selection-rounds are at least 1, --seconds is more than 0, "
            "--busy is at least 0"
        )
    is_against = job.against is not None
    job.workloads = job.workloads or list(RULE_WORKLOADS if is_against else WORKLOADS)
    job.methods = job.methods or (["syncline"] if is_against else list(SYNCHRONOUS))
    if is_against and "syncline" not in job.methods:
        parser.error("--against compares syncline with another commit's: add it to --methods")
    return job


def main() -> int:
    """Measure and print; return 1 if an arm failed or a goal or the rule of speed is not met."""
    job = read_job()
    end_cleanly()
    machine = machine_facts()
    # A file has no width: do not squeeze the tables into the 80 columns that rich assumes.
    stream = sys.stderr if job.json else sys.stdout
    console = Console(file=stream, width=None if stream.isatty() else 130)
    console.print(machine)
    comparisons = []
    columns = (MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    other = None
    try:
        with contextlib.ExitStack() as stack:
            if job.against is not None:
                other = stack.enter_context(version_of(job.against))
            stack.enter_context(busy(job.busy))
            progress = Progress(*columns, console=Console(stderr=True), transient=True)
            stack.enter_context(progress)
            for comparison in measure(job, progress, other):
                comparisons.append(comparison)
                console.print(table(comparison))
    except VersionError as error:
        print(f"benchmarks.step: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    doubtful = [line for comparison in comparisons for line in doubts(comparison)]
    goals = check_goals(comparisons) if job.check else []
    rule = [] if other is None else check_rule(comparisons)
    if job.json:
        result = {"machine": machine, "job": vars(job), "doubts": doubtful, "goals": goals}
        result["against"] = other and other.commit
        result["rule_of_speed"] = rule
        result["comparisons"] = [comparison.to_json_dict() for comparison in comparisons]
        print(json.dumps(result, indent=2))
    if goals:
        console.print(goals_table(goals))
    if other is not None:
        console.print(rule_table(rule, other.commit))
    for line in doubtful:
        print(f"doubtful: {line}", file=sys.stderr)
    return 0 if not doubtful and all(row["is_met"] for row in [*goals, *rule]) else 1


if __name__ == "__main__":
    sys.exit(main())
