"""A simulation as plain data, and as tables: what was found, how sure that is, and why."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from syncline.config import Job

if TYPE_CHECKING:
    from syncline.perf.explain import Explanation
    from syncline.sim.interval import Interval
    from syncline.sim.outcome import Outcome

_MOST_DOUBTS = 3
"""How many facts are named that make an interval wide."""


@dataclasses.dataclass(frozen=True)
class Simulation:
    """A job's simulation, how sure it is, and the reasons."""

    job: Job
    outcome: Outcome
    interval: Interval | None = None
    why_no_interval: str = ""
    explanation: Explanation | None = None
    trace: Path | None = None
    """Where the trace was written."""
    report: Path | None = None
    """Where the report was written."""


def to_json_dict(simulation: Simulation) -> dict[str, Any]:
    """Return the figures as plain data."""
    job, outcome = simulation.job, simulation.outcome
    found: dict[str, Any] = {
        "strategy": job.strategy.name,
        "ranks": outcome.ranks,
        "machines": outcome.machines,
        "shards": outcome.shards,
        "steps": outcome.steps,
        "step_s": outcome.step_s,
        "samples_per_s": outcome.samples_per_s,
        "alone_s": outcome.alone_s,
        "speed_up": outcome.speed_up,
        "efficiency": outcome.efficiency,
        "exposed_communication": outcome.exposed_communication,
        "exposed_input": outcome.exposed_input,
        "input_wait_s": outcome.input_wait_s,
        "layout": outcome.layout,
        "sent_bytes": outcome.sent_bytes,
        "peak_memory_bytes": outcome.peak_memory_bytes,
        "mean_peak_memory_bytes": outcome.mean_peak_memory_bytes,
        "memory_share_bytes": outcome.memory_share_bytes,
        "wall_s": outcome.wall_s,
        "gone": outcome.gone,
        "links": outcome.links,
        "link_slack": outcome.link_slack,
    }
    if outcome.choice:
        found["choice"] = list(outcome.choice)
    if simulation.interval is not None:
        found["interval"] = _interval_dict(simulation.interval, outcome)
    elif simulation.why_no_interval:
        found["why_no_interval"] = simulation.why_no_interval
    if simulation.explanation is not None:
        from syncline.perf.numbers import to_json_dict as explained

        found["explanation"] = explained(simulation.explanation)
    if outcome.weights_sha256 is not None:
        found |= {
            "loss": outcome.loss,
            "test_loss": outcome.test_loss,
            "accuracy": outcome.accuracy,
            "weights_sha256": outcome.weights_sha256,
            "curve": [dataclasses.asdict(point) for point in outcome.curve],
        }
    return found


def _interval_dict(interval: Interval, outcome: Outcome) -> dict[str, Any]:
    by = (outcome.step_s / interval.high_s, outcome.step_s / interval.low_s)
    return {
        "step_s": [interval.low_s, interval.high_s],
        "samples_per_s": [outcome.samples_per_s * one for one in by],
        "doubts": [doubt._asdict() for doubt in interval.doubts],
        "model": interval.model,
        "based_on": list(interval.based_on),
    }


def print_simulation(found: Simulation, console: Console) -> None:
    """Print what was found as tables and text."""
    _print_outcome(found, console)
    if found.interval is not None:
        for line in _in_words(found.interval):
            console.print(line, markup=False, soft_wrap=True)
    elif found.why_no_interval:
        console.print(found.why_no_interval, markup=False, soft_wrap=True)
    if found.explanation is not None:
        from syncline.perf.explain import in_words

        console.print()
        _, _, *lines = in_words(found.explanation).splitlines()
        for line in lines:
            console.print(line, markup=False, soft_wrap=True)
    for name, path in (("trace", found.trace), ("report", found.report)):
        if path is not None:
            console.print(f"{name}: {path}", soft_wrap=True)


def _in_words(interval: Interval) -> Iterator[str]:
    yield f"the ranges hold nine times in ten; they are based on {'; '.join(interval.based_on)}"
    doubts = interval.doubts[:_MOST_DOUBTS]
    if doubts:
        told = (
            f"{one.key} {one.low:.3g} to {one.high:.3g} "
            f"({one.at_low_s * 1e3:.3g} to {one.at_high_s * 1e3:.3g} ms)"
            for one in doubts
        )
        yield f"least known: {'; '.join(told)}"
    yield f"the simulator itself: within {interval.model:.0%} (docs/prediction.md)"


def _print_outcome(found: Simulation, console: Console) -> None:
    from syncline.perf.explain import short

    job, outcome, interval = found.job, found.outcome, found.interval
    where = f"{outcome.ranks} ranks on {outcome.machines} machines"
    for line in outcome.choice:
        console.print(line, soft_wrap=True)
    console.print(f"{job.model.name}, {job.strategy.name}, {where}, simulated:")
    table = Table(show_header=False)
    table.add_column()
    table.add_column(justify="right")
    step, rate = f"{outcome.step_s * 1e3:.3g} ms", short(outcome.samples_per_s)
    if interval is not None:
        low, high = _interval_dict(interval, outcome)["samples_per_s"]
        step += f" ({interval.low_s * 1e3:.3g} to {interval.high_s * 1e3:.3g})"
        rate += f" ({short(low)} to {short(high)})"
    table.add_row("step", step)
    table.add_row("samples/s", rate)
    table.add_row("one rank alone, the same batch", f"{outcome.alone_s * 1e3:.3g} ms")
    table.add_row("speed-up against it", f"{outcome.speed_up:.2f}")
    table.add_row("efficiency", f"{outcome.efficiency:.1%}")
    table.add_row("exposed communication", f"{outcome.exposed_communication:.1%}")
    if outcome.exposed_input:
        table.add_row("waiting for input", f"{outcome.exposed_input:.1%}")
    table.add_row("sent by a rank in a step", f"{outcome.sent_bytes / 1e6:.3g} MB")
    if outcome.peak_memory_bytes is not None and outcome.mean_peak_memory_bytes is not None:
        most, mean = outcome.peak_memory_bytes / 1e6, outcome.mean_peak_memory_bytes / 1e6
        table.add_row("peak memory of tensors, a rank", f"{short(most)} MB (mean {short(mean)})")
    slack = outcome.link_slack
    about = "" if slack is None else f" (approximate, slack {slack:.1%})"
    table.add_row("links", f"{outcome.links}{about}")
    if outcome.weights_sha256 is not None:
        table.add_row("loss of the last step", f"{outcome.loss:.4f}")
        if outcome.accuracy is not None:
            table.add_row("accuracy", f"{outcome.accuracy:.2%}")
        table.add_row("weights", outcome.weights_sha256[:16])
    console.print(table)
    if len(outcome.curve) > 1:
        console.print(_curve(outcome))
    for rank, how in outcome.gone.items():
        console.print(f"rank {rank} {how}; the others went on without it")


def _curve(outcome: Outcome) -> Table:
    """Return what evaluations found as a table."""
    table = Table("step", "samples", "virtual s", "sent MB", "loss", "test loss", "accuracy")
    for point in outcome.curve:
        test_loss = "" if point.test_loss is None else f"{point.test_loss:.4f}"
        accuracy = "" if point.accuracy is None else f"{point.accuracy:.2%}"
        table.add_row(
            *(f"{point.step:,}", f"{point.samples:,}", f"{point.time_s:.4g}"),
            *(f"{point.total_sent_bytes / 1e6:.4g}", f"{point.loss:.4f}", test_loss, accuracy),
        )
    return table
