"""Time steps over shaped links, in the lab: Syncline against DDP, ZeRO and FSDP2.

A network that sleeps instead of computing, on machines that are network namespaces. For each case
all arms live in one process per machine and run in turn, in shuffled order. Times are step start
to step start, the median of each block; the table gives the median block and the spread. DDP's
bucket sizes compete in rounds of their own, before the others, and the best goes on.

With --against REV two arms more run Syncline as it is in that commit: `other`, and `control`, the
same once more. The arm of this version then has processes of its own too.

`bound` is max(compute, wire), `ideal` what two lanes could reach on a perfect wire: reduces as
buckets become ready, then gathers in forward order. Both count packet headers.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from lab.network import Lab, LabError, rate_bytes_per_s, why_not
from rich.console import Console
from rich.table import Table

from benchmarks.busy import busy
from benchmarks.channels import ArmFailed
from benchmarks.command import add_against, add_busy, end_cleanly, machine_facts
from benchmarks.figures import speed
from benchmarks.goals import RULE_MACHINES, rule_of_speed, rule_table
from benchmarks.versions import THIS, Version, VersionError, version_of
from benchmarks.wire_machines import Machines

HEADER_SHARE = 1514 / 1448  # Ethernet frame over TCP payload, at an MTU of 1500
ARMS = ("ddp 2.5", "ddp 5", "ddp 25", "ddp_zero 5", "fsdp2", "syncline", "no_exchange")
OTHER, CONTROL = "other", "control"


@dataclass(frozen=True)
class Case:
    """Machines, their links, and how long the wire takes against compute."""

    machines: int
    rate: str
    wire_share: float
    size_bytes: int
    layers: int = 10

    @property
    def wire_s(self) -> float:
        """Time to send one's share of both halves, without headers."""
        return self.least_bytes / rate_bytes_per_s(self.rate)

    @property
    def compute_s(self) -> float:
        return self.wire_s / self.wire_share

    @property
    def least_bytes(self) -> float:
        return 2 * (self.machines - 1) / self.machines * self.size_bytes

    @property
    def name(self) -> str:
        return f"{self.machines} machines, {self.rate}, wire = {self.wire_share:g} x compute"


def ideal_step_s(compute_s: float, wire_s: float, layers: int, steps: int = 20) -> float:
    """Return the step time of two lanes on a perfect wire: forward 1/3, backward 2/3 of compute.

    >>> round(ideal_step_s(0.3, 0.3 * 1514 / 1448, 10), 3)
    0.383
    """
    forward_s, backward_s = compute_s / 3 / layers, compute_s * 2 / 3 / layers
    message_s = wire_s / 2 / layers
    gathered = [0.0] * layers
    now = started = wire = period = 0.0
    for _ in range(steps):
        started, before = now, started
        period = started - before
        for layer in range(layers):
            now = max(now, gathered[layer]) + forward_s
        for _ in range(layers):
            now += backward_s
            wire = max(wire, now) + message_s
        for layer in range(layers):
            wire += message_s
            gathered[layer] = wire
    return period


@dataclass
class Blocks:
    """What was measured of one case: for each arm and round, the figures of every machine."""

    compared: dict[str, list[list[dict[str, Any]]]] = field(default_factory=dict)
    selection: dict[str, list[list[dict[str, Any]]]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    congestion_control: str = ""


def run_case(case: Case, arms: Sequence[str], other: Version | None, job: Any) -> Blocks:
    """Run all arms on one lab."""
    found = Blocks()
    with (
        tempfile.TemporaryDirectory() as folder,
        Lab(case.machines, case.rate) as lab,
        contextlib.ExitStack() as stack,
    ):
        spec = {
            "bytes": case.size_bytes,
            "layers": case.layers,
            "compute_s": case.compute_s,
            "folder": folder,
        }
        found.congestion_control = lab.congestion_control(0)
        places: dict[str, tuple[Machines, str]] = {}
        for number, (version, names) in enumerate(processes_of(arms, other)):
            machines = Machines(lab, version, list(names.values()), spec, number)
            stack.callback(machines.close)
            for name, arm in names.items():
                if arm in machines.failures:
                    found.failures[name] = machines.failures[arm]
                else:
                    places[name] = machines, arm
        order = random.Random(0)
        contested = [name for name in places if name.startswith("ddp ")]
        if len(contested) > 1:
            found.selection = {name: [] for name in contested}
            for _ in range(job.selection_rounds):
                _run_round(places, contested, order, job.steps, found.selection)
            best = min(
                contested, key=lambda name: statistics.median(_times_s(found.selection[name]))
            )
            places = {
                name: place
                for name, place in places.items()
                if name == best or name not in contested
            }
        found.compared = {name: [] for name in places}
        for _ in range(job.rounds):
            _run_round(places, list(places), order, job.steps, found.compared)
    return found


def processes_of(
    arms: Sequence[str], other: Version | None
) -> Iterator[tuple[Version, dict[str, str]]]:
    """Yield which arms live together in processes: by the arm's name in tables, what it runs."""
    if other is None:
        yield THIS, {arm: arm for arm in arms}
        return
    # Arms that are compared live alike: alone.
    yield THIS, {"syncline": "syncline"}
    yield other, {OTHER: "syncline"}
    yield other, {CONTROL: "syncline"}
    if rest := {arm: arm for arm in arms if arm != "syncline"}:
        yield THIS, rest


def _run_round(
    places: dict[str, tuple[Machines, str]],
    names: Sequence[str],
    order: random.Random,
    steps: int,
    blocks: dict[str, list[list[dict[str, Any]]]],
) -> None:
    for name in order.sample(names, len(names)):
        machines, arm = places[name]
        blocks[name].append(machines.run(arm, steps))


def _times_s(rounds: Sequence[Sequence[dict[str, Any]]]) -> list[float]:
    """Return the slowest machine's step time in each round."""
    return [max(machine["step_s"] for machine in block) for block in rounds]


def summarise(case: Case, found: Blocks) -> dict[str, Any]:
    """Put a case's figures together: the slowest machine's time, the median machine's bytes."""
    best = next((name for name in found.compared if name.startswith("ddp ")), None)
    rows = {}
    for arm, rounds in (found.selection | found.compared).items():
        times_s = _times_s(rounds)
        is_compared = arm in found.compared
        against = speed(times_s, _times_s(found.compared[best])) if best and is_compared else None
        everything = [machine for block in rounds for machine in block]
        rows[arm] = {
            "step_s": statistics.median(times_s),
            "least_s": min(times_s),
            "most_s": max(times_s),
            "step_s_by_round": times_s,
            "is_compared": is_compared,
            "speed_against_best_ddp": against and asdict(against),
            "sent_bytes": statistics.median(machine["sent_bytes"] for machine in everything),
            "cpu_s": statistics.median(machine["cpu_s"] for machine in everything),
        }
    compute_s = rows["no_exchange"]["step_s"] if "no_exchange" in rows else case.compute_s
    wire_s = case.wire_s * HEADER_SHARE
    return {
        "case": case.name,
        "machines": case.machines,
        "rate": case.rate,
        "wire_share": case.wire_share,
        "bytes": case.size_bytes,
        "compute_s": compute_s,
        "wire_s": wire_s,
        "bound_s": max(compute_s, wire_s),
        "ideal_s": ideal_step_s(compute_s, wire_s, case.layers),
        "least_bytes": case.least_bytes,
        "congestion_control": found.congestion_control,
        "failures": found.failures,
        "arms": rows,
    }


def judge(found: dict[str, Any]) -> dict[str, Any]:
    """Hold a case against the rule of speed."""
    times = [
        found["arms"].get(arm, {}).get("step_s_by_round", [])
        for arm in ("syncline", OTHER, CONTROL)
    ]
    return rule_of_speed(found["case"], *times)


def table_of(found: dict[str, Any]) -> Table:
    ideal_ms, bound_ms = found["ideal_s"] * 1e3, found["bound_s"] * 1e3
    title = f"{found['case']}: ideal {ideal_ms:.0f} ms, bound {bound_ms:.0f} ms"
    table = Table(title=title)
    for column in ("arm", "step, ms", "of ideal", "against best DDP", "bytes of least", "CPU, ms"):
        table.add_column(column, justify="left" if column == "arm" else "right")
    for arm, row in found["arms"].items():
        against = row["speed_against_best_ddp"]
        table.add_row(
            arm if row["is_compared"] else f"{arm} (selection rounds)",
            f"{row['step_s'] * 1e3:.0f} ({row['least_s'] * 1e3:.0f} to {row['most_s'] * 1e3:.0f})",
            f"{row['step_s'] / found['ideal_s']:.3f}",
            f"{against['median']:.2f}" if against else "",
            f"{row['sent_bytes'] / found['least_bytes']:.3f}",
            f"{row['cpu_s'] * 1e3:.0f}",
        )
    for arm, reason in found["failures"].items():
        table.add_row(arm, reason)
    return table


def read_job(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line. With --against the defaults are the cases of the rule of speed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.wire", description=__doc__)
    parser.add_argument("--machines", help="default: 2,4,8; with --against 4")
    parser.add_argument("--rates", help="default: 100mbit,1gbit,5gbit; with --against 1gbit")
    parser.add_argument("--wire", default="0.5,1,2", help="wire time over compute time")
    parser.add_argument("--arms", help="default: all synchronous; with --against syncline")
    parser.add_argument("--megabytes", type=float, default=25.0, help="at 1 Gbit/s; in proportion")
    parser.add_argument("--rounds", type=int, help="rounds compared; default: 3; with --against 7")
    parser.add_argument(
        "--selection-rounds", type=int, default=2, help="rounds before, to choose DDP's buckets"
    )
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--json", action="store_true")
    add_against(parser)
    add_busy(parser)
    job = parser.parse_args(arguments)
    is_against = job.against is not None
    job.machines = job.machines or (str(RULE_MACHINES) if is_against else "2,4,8")
    job.rates = job.rates or ("1gbit" if is_against else "100mbit,1gbit,5gbit")
    job.arms = job.arms or ("syncline" if is_against else ",".join(ARMS))
    job.rounds = (7 if is_against else 3) if job.rounds is None else job.rounds
    if min(job.rounds, job.selection_rounds) < 1 or job.busy < 0:
        parser.error("--rounds and --selection-rounds are at least 1, --busy is at least 0")
    if is_against and "syncline" not in job.arms.split(","):
        parser.error("--against compares syncline with another commit's: add it to --arms")
    return job


def cases_of(job: argparse.Namespace) -> Iterator[Case]:
    for machines in map(int, job.machines.split(",")):
        for rate in job.rates.split(","):
            # The same seconds on every wire.
            size = int(job.megabytes * 1e6 * rate_bytes_per_s(rate) / rate_bytes_per_s("1gbit"))
            for share in map(float, job.wire.split(",")):
                yield Case(machines, rate, share, size // 40 * 40)


def main() -> int:
    """Measure and print; return 1 if a case failed or the rule of speed is not met."""
    job = read_job()
    if reason := why_not():
        print(f"benchmarks.wire: {reason}", file=sys.stderr)
        return 2
    end_cleanly()
    console = Console(width=None if sys.stdout.isatty() else 130)
    results, rule, other = [], [], None
    try:
        with contextlib.ExitStack() as stack:
            if job.against is not None:
                other = stack.enter_context(version_of(job.against))
            stack.enter_context(busy(job.busy))
            for case in cases_of(job):
                print(f"{case.name} ...", file=sys.stderr)
                found = summarise(case, run_case(case, job.arms.split(","), other, job))
                results.append(found)
                if other is not None:
                    rule.append(judge(found))
                if not job.json:
                    console.print(table_of(found))
    except VersionError as error:
        print(f"benchmarks.wire: {error}", file=sys.stderr)
        return 2
    except (LabError, ArmFailed) as error:
        print(f"benchmarks.wire: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    if job.json:
        facts = {"machine": machine_facts(), "against": other and other.commit}
        print(json.dumps(facts | {"rule_of_speed": rule, "cases": results}, indent=2))
    elif other is not None:
        console.print(rule_table(rule, other.commit))
    return 0 if all(row["is_met"] for row in rule) else 1


if __name__ == "__main__":
    sys.exit(main())
