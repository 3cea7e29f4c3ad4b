"""A job predicted and run on this machine: how far off each figure was.

The prediction knows layers and links as two ranks measured them, and nothing of the runs that it is
compared with.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from syncline.cluster import cluster_of, known_facts
from syncline.cluster_facts import ClusterFacts
from syncline.config import ClusterSettings, Job, printable
from syncline.errors import ConfigError
from syncline.sim.interval import Interval, find_interval
from syncline.sim.job import STEPS, find_workload, simulate_job, with_choices
from syncline.sim.outcome import Outcome
from syncline.workload import Workload


class Predicted(NamedTuple):
    """What is said beforehand."""

    outcome: Outcome
    interval: Interval


class Figure(NamedTuple):
    """One figure, said beforehand and measured: the median run, the least and the most."""

    name: str
    predicted: float
    measured: float
    least: float
    most: float

    @property
    def error(self) -> float:
        """How far off it was: of what was measured, or in points if it is a share."""
        off = self.predicted - self.measured
        if self.name in SHARES:
            return off
        return (
            off / self.measured if self.measured else math.copysign(math.inf, off) if off else 0.0
        )


SHARES = ("exposed_communication",)
FIGURES = ("step_s", "samples_per_s", "exposed_communication", "sent_bytes")


@dataclass(frozen=True)
class Compared:
    """One number of ranks."""

    ranks: int
    figures: tuple[Figure, ...]
    interval: Interval

    @property
    def step(self) -> Figure:
        return next(one for one in self.figures if one.name == "step_s")

    @property
    def is_inside(self) -> bool:
        """Whether the measured step lies in its interval."""
        return self.interval.low_s <= self.step.measured <= self.interval.high_s

    def to_json_dict(self) -> dict[str, Any]:
        return {
            "ranks": self.ranks,
            "interval_s": [self.interval.low_s, self.interval.high_s],
            "is_inside": self.is_inside,
            "figures": {
                one.name: {
                    "predicted": one.predicted,
                    "measured": one.measured,
                    "least": one.least,
                    "most": one.most,
                    "error": one.error,
                }
                for one in self.figures
            },
        }


def on_this_machine(job: Job) -> Job:
    """Return the job without the cluster that it describes: it runs here."""
    return msgspec.structs.replace(job, cluster=ClusterSettings())


def predict(
    job: Job,
    ranks: int,
    machines: int,
    facts: ClusterFacts,
    workload: Workload,
    steps: int = STEPS,
    step_of: Callable[[Outcome], float] = lambda outcome: outcome.step_s,
) -> Predicted:
    """Predict a job's steps from what was measured; the workload has a shard's samples.

    The interval is of the step that `step_of` takes from what was simulated.
    """
    cluster = cluster_of(job.cluster, ranks, machines, facts)
    job = job.resolved(ranks, cluster.by_machine)
    own = of_shard(workload, job)
    outcome = simulate_job(job, cluster, steps=steps, workload=own)
    chosen, _ = with_choices(job, cluster, own)
    interval = find_interval(
        lambda other, its: step_of(simulate_job(chosen, other, steps=steps, workload=its)),
        cluster,
        own,
        known_facts(facts),
        threads=job.run.threads,
        middle_s=step_of(outcome),
    )
    return Predicted(outcome, interval)


def of_shard(workload: Workload, job: Job) -> Workload:
    """Return the workload of a resolved job's shard; raise ConfigError if it is not known."""
    assert job.strategy.shards is not None
    samples = job.data.batch // job.strategy.shards
    try:
        return workload.for_samples(samples)
    except ValueError as error:
        what, rule = printable(error), f"a shard of this job has {samples} samples on some ranks"
        raise ConfigError("--layers", what, rule, "Measure these, too.") from None


def check_layers(workload: Workload, job: Job, ranks: Sequence[int]) -> None:
    """Refuse layers of another model, or without the samples that shards have."""
    for number in ranks:
        of_shard(workload, job.resolved(number))
    resolved = job.resolved(ranks[0])
    own = find_workload(resolved, cluster_of(resolved.cluster, ranks[0]))
    ours, theirs = ({(one.name, one.num_elements) for one in w.parameters} for w in (own, workload))
    if theirs and ours != theirs:
        name = min(ours ^ theirs)[0]
        what = f"parameter {printable(name)} is not the same in the file and in the job's model"
        raise ConfigError("--layers", what, "they are the job's layers", "Measure them anew.")


def compare(predicted: Predicted, runs: Sequence[dict[str, Any]]) -> Compared:
    """Put a prediction beside the summaries of some runs."""
    outcome = predicted.outcome
    figures = []
    for name in FIGURES:
        found = [run[name] for run in runs]
        median = statistics.median(found)
        figures.append(Figure(name, getattr(outcome, name), median, min(found), max(found)))
    return Compared(outcome.ranks, tuple(figures), predicted.interval)


def shard_samples(job: Job, ranks: Sequence[int]) -> list[int]:
    """Return the numbers of samples that shards have, on these numbers of ranks."""
    found = set()
    for number in ranks:
        resolved = job.resolved(number)
        assert resolved.strategy.shards is not None
        found.add(resolved.data.batch // resolved.strategy.shards)
    return sorted(found)
