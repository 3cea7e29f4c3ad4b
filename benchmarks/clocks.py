"""Measured and simulated steps side by side: `python -m benchmarks.clocks` (as root).

One job runs on both clocks: on four machines of the lab, and on the virtual clock. The machines
have links of 1 Gbit/s; a network that sleeps takes as long to compute as the wire takes to carry
its gradients and parameters. Data takes its time to be read, in line or ahead of use.

What the simulator is told is known, or measured on this machine before the first run by programs of
their own: latency, costs of messages, and the network's forward and backward in a plain PyTorch
loop (`latency.py`, `messages.py`, `clock_job.py`). Nothing is fitted to the runs of this benchmark.
Strategies are run in turn, in shuffled order, `--rounds` times. A step
is the median of a rank's steps, and of the ranks; samples a second are those of all ranks.
The table has the median run, the least and the most.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lab.network import Lab, LabError, rate_bytes_per_s, why_not
from rich.console import Console
from rich.table import Table

from benchmarks.channels import ArmFailed
from benchmarks.clock_machines import Machines, ask
from benchmarks.command import end_cleanly, machine_facts, names

MACHINES = 4
SIZE_BYTES, LAYERS = 25_000_000, 10
"""At 1 Gbit/s; at other rates in proportion, so that the wire takes as long."""
COMPUTE_S = 0.3
"""As long as the wire: a rank sends 2 x 3/4 x 25 MB at 125 MB/s."""
INPUT_S = 0.06
"""To read a rank's batch."""
SAMPLES = 4
"""Of a rank's batch."""

# What the simulator is told.
PAYLOAD_SHARE = 1448 / 1514
"""Of a frame, the payload of TCP: the rest are headers."""
UPDATE_BYTES_PER_S = 6e9
"""The preset's, measured on a core of such a machine."""


class Costs(NamedTuple):
    """What messages and the network cost on this machine, in seconds."""

    latency_s: float
    """Half a round trip of a byte between machines of the lab."""
    message_s: float
    collective_s: float
    forward_s: float
    """Of the network, which was told to take a third of `COMPUTE_S`."""
    backward_s: float

    @classmethod
    def measure(cls, rate: str) -> Costs:
        """Measure each in a process of its own, before anything else runs."""
        network = (json.dumps([4 * elements_of(rate)] * LAYERS), str(COMPUTE_S))
        times = ask("benchmarks.clock_job", *network)
        return cls(
            **ask("benchmarks.latency", "--json"),
            **ask("benchmarks.messages", "--json"),
            **{key: times[key] for key in ("forward_s", "backward_s")},
        )


def elements_of(rate: str) -> int:
    """Return how many parameters a layer has, so that the wire takes as long at any rate."""
    return round(SIZE_BYTES * rate_bytes_per_s(rate) / rate_bytes_per_s("1gbit")) // LAYERS // 4


ARMS: dict[str, tuple[int, tuple[str, ...]]] = {
    "alone": (1, ("strategy.name=synchronous",)),
    "synchronous": (4, ("strategy.name=synchronous",)),
    "layered": (4, ("strategy.name=layered",)),
    "all_reduce": (4, ("strategy.name=all_reduce",)),
    "wait_free": (4, ("strategy.name=wait_free",)),
    "merged": (4, ("strategy.name=merged",)),
    "sync_server": (4, ("strategy.name=sync_server",)),
    "gossip": (4, ("strategy.name=gossip",)),
    "elastic": (4, ("strategy.name=elastic",)),
    "server": (4, ("strategy.name=server",)),
    "server, one dedicated": (3, ("strategy.name=server", "strategy.server.servers=1")),
    "local, period 5": (4, ("strategy.name=local", "strategy.local.period=5")),
}
"""How many ranks compute, and the job's settings."""

INPUTS: dict[str, tuple[str, ...]] = {
    "none": ("data.options.sample_s=0.0", "cluster.input_s=0.0"),
    "in line": ("data.prefetch=0",),
    "ahead": ("data.workers=1", "data.prefetch=2"),
}

JOB = """
[model]
name = "benchmarks.clock_job:make"

[model.options]
sizes = {sizes}
compute_s = {compute_s}

[data]
name = "benchmarks.clock_job:samples"
batch = 16

[data.options]
sample_s = {sample_s}

[optimizer]
lr = 1e-4

[cluster]
rate_bytes_per_s = {rate_bytes_per_s}
latency_s = {latency_s}
message_s = {message_s}
collective_s = {collective_s}
update_bytes_per_s = {update_bytes_per_s}
input_s = {input_s}

[run]
ranks = {ranks}
steps = 21
"""


def write_job(folder: Path, rate: str, costs: Costs) -> tuple[Path, Path]:
    """Write the job, and its network's times for the simulator."""
    from syncline import workload
    from syncline.sizes import Size

    job, times = folder / "job.toml", folder / "workload.json"
    elements = elements_of(rate)
    text = JOB.format(
        sizes=[4 * elements] * LAYERS,
        compute_s=COMPUTE_S,
        sample_s=INPUT_S / SAMPLES,
        rate_bytes_per_s=rate_bytes_per_s(rate) * PAYLOAD_SHARE,
        latency_s=costs.latency_s,
        message_s=costs.message_s,
        collective_s=costs.collective_s,
        update_bytes_per_s=UPDATE_BYTES_PER_S,
        input_s=INPUT_S,
        ranks=MACHINES,
    )
    job.write_text(text)
    forward_s, backward_s = costs.forward_s / LAYERS, costs.backward_s / LAYERS
    layers = [workload.Layer(str(n), 4 * elements, forward_s, backward_s) for n in range(LAYERS)]
    sizes = [Size(f"{n}.weight", n, elements, 4, "float32", True) for n in range(LAYERS)]
    found = workload.Workload("sleeping", tuple(layers), INPUT_S, tuple(sizes), samples=SAMPLES)
    workload.write(found, times)
    return job, times


def settings_of(arm: str, how: str, steps: int) -> list[str]:
    workers, sets = ARMS[arm]
    return [*sets, *INPUTS[how], f"data.batch={workers * SAMPLES}", f"run.steps={steps}"]


def ranks_of(arm: str) -> int:
    return 1 if arm == "alone" else MACHINES


def simulate(
    job_file: Path, times: Path, ranks: int, sets: Sequence[str], trace: Path | None
) -> Any:
    """Run the job on the virtual clock."""
    from syncline.cluster import cluster_of
    from syncline.config import read_job
    from syncline.sim.job import find_workload, simulate_job

    job = read_job(job_file, sets).resolved(ranks)
    cluster = cluster_of(job.cluster, ranks)
    shard = find_workload(job, cluster, times)
    asks = trace is not None
    found = simulate_job(job, cluster, steps=job.run.steps or 0, workload=shard, traces=asks)
    if trace is not None and found.trace is not None:
        found.trace.write(trace)
    return found


def measure(job: argparse.Namespace, folder: Path, job_file: Path) -> dict[tuple[str, str], Any]:
    """Run all arms on one lab, in turn; return the summaries of each."""
    arms = [(arm, how) for arm in job.arms for how in job.inputs]
    found: dict[tuple[str, str], Any] = {arm: [] for arm in arms}
    order = random.Random(0)
    with (
        Lab(MACHINES, job.rate) as lab,
        contextlib.closing(Machines(MACHINES, folder / "log", lab)) as machines,
    ):
        for turn in range(job.rounds):
            for arm, how in order.sample(arms, len(arms)):
                out = folder / f"{turn} {arm} {how}"
                sets = settings_of(arm, how, job.steps)
                trace = _trace_of(job, arm, how, "measured") if turn == 0 else None
                found[arm, how].append(machines.train(job_file, ranks_of(arm), sets, out, trace))
                step_ms = found[arm, how][-1]["step_s"] * 1e3
                print(f"round {turn + 1}: {arm}, input {how}: {step_ms:.0f} ms", file=sys.stderr)
    return found


def _trace_of(job: argparse.Namespace, arm: str, how: str, clock: str) -> Path | None:
    return None if job.traces is None else Path(job.traces) / f"{arm}, {how}, {clock}.trace"


def compare(arm: str, how: str, measured: Sequence[dict[str, Any]], simulated: Any) -> Any:
    """Put the figures of an arm together; errors are simulated over measured, minus 1."""
    row: dict[str, Any] = {"strategy": arm, "input": how}
    for key in ("step_s", "samples_per_s"):
        runs = [one[key] for one in measured]
        middle, predicted = statistics.median(runs), getattr(simulated, key)
        row[key] = {
            **{"measured": middle, "least": min(runs), "most": max(runs)},
            **{"simulated": predicted, "error": predicted / middle - 1},
        }
    row["exposed"] = statistics.median(one["exposed_communication"] for one in measured)
    row["simulated_exposed"] = simulated.exposed_communication
    row["sent_bytes"] = measured[0]["sent_bytes"], simulated.sent_bytes
    return row


def table_of(rows: Sequence[dict[str, Any]], rate: str) -> Table:
    table = Table(title=f"{MACHINES} machines, {rate}, compute = wire = {COMPUTE_S * 1e3:.0f} ms")
    for column in ("strategy", "input"):
        table.add_column(column)
    for column in ("step, ms: measured", "simulated", "error"):
        table.add_column(column, justify="right")
    for column in ("samples/s: measured", "simulated", "error"):
        table.add_column(column, justify="right")
    for row in rows:
        step, rate = row["step_s"], row["samples_per_s"]
        table.add_row(
            *(row["strategy"], row["input"]),
            f"{step['measured'] * 1e3:.0f} ({step['least'] * 1e3:.0f} to {step['most'] * 1e3:.0f})",
            *(f"{step['simulated'] * 1e3:.0f}", f"{step['error']:+.1%}"),
            f"{rate['measured']:.1f} ({rate['least']:.1f} to {rate['most']:.1f})",
            *(f"{rate['simulated']:.1f}", f"{rate['error']:+.1%}"),
        )
    return table


def read_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.clocks", description=__doc__)
    parser.add_argument("--arms", help=f"default: all of {'; '.join(ARMS)} (split by ;)")
    parser.add_argument("--inputs", type=names(INPUTS), default=["in line", "ahead"])
    parser.add_argument("--rate", default="1gbit", help="with 100mbit a tenth of the bytes is sent")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=21, help="the first is not timed")
    parser.add_argument("--traces", metavar="FOLDER", help="write the first round's traces here")
    parser.add_argument("--json", action="store_true")
    job = parser.parse_args(arguments)
    job.arms = job.arms.split(";") if job.arms else list(ARMS)
    if unknown := [arm for arm in job.arms if arm not in ARMS]:
        parser.error(f"there is no arm {unknown[0]!r}")
    if job.rounds < 1 or job.steps < 3:
        parser.error("--rounds is at least 1, --steps at least 3")
    return job


def main() -> int:
    """Simulate, measure and print."""
    job = read_arguments()
    if reason := why_not():
        print(f"benchmarks.clocks: {reason}", file=sys.stderr)
        return 2
    end_cleanly()
    facts = machine_facts()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            costs = Costs.measure(job.rate)
            job_file, times = write_job(folder, job.rate, costs)
            simulated = {
                (arm, how): simulate(
                    job_file,
                    times,
                    ranks_of(arm),
                    settings_of(arm, how, job.steps),
                    _trace_of(job, arm, how, "simulated"),
                )
                for arm in job.arms
                for how in job.inputs
            }
            measured = measure(job, folder, job_file)
        except (LabError, ArmFailed) as error:
            print(f"benchmarks.clocks: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            return 130
    rows = [compare(*arm, measured[arm], simulated[arm]) for arm in simulated]
    if job.json:
        print(json.dumps({"machine": facts, "costs": costs._asdict(), "rows": rows}, indent=2))
    else:
        console = Console(width=None if sys.stdout.isatty() else 130)
        console.print(table_of(rows, job.rate))
        console.print(
            ", ".join(f"{name} {found * 1e6:.1f} us" for name, found in costs._asdict().items())
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
