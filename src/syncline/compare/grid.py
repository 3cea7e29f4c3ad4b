"""From a study to its cells: single runs, each with its job, its cluster and its seed.

No torch here. A cell's ID is a hash of all that its result depends on, so a file of that name holds
the result of this very run, whatever study it was made for.
"""

from __future__ import annotations

import copy
import hashlib
import importlib.metadata
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from syncline.cluster import PRESETS, Cluster, cluster_of, conditions_of
from syncline.cluster_facts import ClusterFacts
from syncline.cluster_file import find_cluster
from syncline.compare.study import Compare, Grid, Scenario, Study, Variant
from syncline.config import STRATEGIES, Job, job_to_toml
from syncline.config.reading import job_of_tables
from syncline.config.words import shown
from syncline.errors import ConfigError

Clock = Literal["virtual", "wall"]
_LEFT_OUT = ("ranks", "checkpoint_every", "evaluate_every", "out", "epochs")
"""Settings of [run] that a comparison sets itself."""


def version() -> str:
    """Return the version of this package."""
    return importlib.metadata.version("syncline")


@dataclass(frozen=True)
class Cell:
    """One run."""

    grid: str
    scenario: str
    variant: str
    ranks: int
    """Ranks that compute."""
    seed: int
    job: Job
    """Resolved."""
    cluster: Cluster
    clock: Clock
    settings: tuple[str, ...]
    """What a search has set, as after --set."""

    @property
    def servers(self) -> int:
        """How many ranks serve only."""
        return self.cluster.ranks - self.ranks

    @cached_property
    def id(self) -> str:
        about = {
            "syncline": version(),
            "torch": importlib.metadata.version("torch"),
            "clock": self.clock,
            "job": job_to_toml(self.job),
            "cluster": self.cluster.to_dict() if self.clock == "virtual" else None,
        }
        text = json.dumps(about, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True, eq=False)
class Place:
    """Runs of a study that differ in their seed only."""

    grid: Grid
    scenario: Scenario
    variant: Variant
    ranks: int

    @property
    def tuned_at(self) -> tuple[str, str, int]:
        """What is tuned together: the scenarios of a variant on so many ranks."""
        return self.grid.name, self.variant.name, self.ranks


class Plan:
    """All runs of a study."""

    def __init__(self, study: Study, samples: int, clock: Clock) -> None:
        """`samples` is what each run computes on, before it is rounded down."""
        self.study, self.compare, self.clock = study, study.compare, clock
        self.facts = _facts_of(study)
        self.places = tuple(_places(study.compare))
        """In the order of the study."""
        batches = sorted({_batch_of(study, place) for place in self.places})
        each = math.lcm(*batches)
        self.samples = samples // each * each
        """Of every run, over all ranks."""
        if not self.samples:
            raise ConfigError(
                "compare.samples",
                f"got {samples} with batches of {shown(batches)}",
                "every run ends after whole steps at the same number of samples",
                f"Use a multiple of {each}, or other batches.",
            )
        count = max(1, round(self.samples / each / self.compare.evaluations))
        self.evaluates_every = count * each
        """Samples from one evaluation to the next."""

    def cell(self, place: Place, seed: int, settings: Sequence[str] = ()) -> Cell:
        """Return one run; raise ConfigError if it cannot be. `settings` are those of a search."""
        batch = _batch_of(self.study, place)
        sets = [f"data.batch={batch}", f"run.steps={self.samples // batch}", f"run.seed={seed}"]
        if self.evaluates_every < self.samples:
            sets.append(f"run.evaluate_every={self.evaluates_every // batch}")
        job = _job_of(self.study, place, [*sets, *settings])
        try:
            if self.clock == "virtual" and job.strategy.own.splits_layers:
                raise ConfigError(
                    f"strategy.{job.strategy.name}",
                    "layers split over ranks",
                    "the arithmetic of a virtual rank is done a whole shard at a time",
                    "Compare it with --real, or leave it away.",
                )
            job, cluster = self._on_cluster(job, place.ranks)
        except ConfigError as error:
            raise _at(place, error) from None
        names = (place.grid.name, place.scenario.name, place.variant.name, place.ranks)
        return Cell(*names, seed, job, cluster, self.clock, tuple(settings))

    def _on_cluster(self, job: Job, wanted: int) -> tuple[Job, Cluster]:
        """Return the job resolved, on a cluster on which so many ranks compute."""
        each = self.compare.ranks_per_machine or self.facts.ranks_per_machine or 1
        for ranks in range(wanted, 2 * wanted + 1):
            job.strategy.own.check(ranks)
            if self.clock == "virtual" and ranks % each and not ranks == wanted < each:
                continue
            machines = 1 if self.clock == "wall" else -(-ranks // each)
            cluster = cluster_of(job.cluster, ranks, machines, self.facts)
            workers = job.strategy.own.workers(cluster.by_machine)
            if len(workers) == wanted:
                conditions = conditions_of(job.cluster, job.run.seed, job.faults)
                conditions.check(ranks, machines, workers=workers)
                return job.resolved(ranks, cluster.by_machine), cluster
        raise ConfigError(
            "ranks",
            f"got {wanted} on machines of {each}",
            "ranks that compute, and those that only serve, fill all machines",
            f"Use a multiple of {each}, or other ranks_per_machine or servers.",
        )


def _places(compare: Compare) -> Iterator[Place]:
    for grid in compare.grid:
        for scenario in compare.scenarios_of(grid):
            for ranks in grid.ranks:
                for name in grid.strategies:
                    yield Place(grid, scenario, compare.variant_of(name), ranks)


def _facts_of(study: Study) -> ClusterFacts:
    name = study.compare.cluster
    return find_cluster(name or study.tables.get("cluster", {}).get("preset", "1gbit"))


def _batch_of(study: Study, place: Place) -> int:
    """Return the samples of a step, over all ranks."""
    if place.grid.batch_per_rank is not None:
        return place.grid.batch_per_rank * place.ranks
    return place.grid.batch or _job_of(study, place, []).data.batch


def _job_of(study: Study, place: Place, sets: Sequence[str]) -> Job:
    """Return the job of a run, not resolved. Later settings win."""
    tables, strategy = copy.deepcopy(study.tables), place.variant.strategy
    own = tables.setdefault("strategy", {})
    if isinstance(own, dict):
        for name in (*STRATEGIES, "shards"):
            if name != strategy:
                own.pop(name, None)
    for name in _LEFT_OUT:
        if isinstance(tables.get("run"), dict):
            tables["run"].pop(name, None)
    if study.compare.cluster in PRESETS:
        tables.setdefault("cluster", {})["preset"] = study.compare.cluster
    of_ranks = [
        setting
        for ranks, settings in sorted(place.variant.from_ranks.items(), key=lambda one: int(one[0]))
        if place.ranks >= int(ranks)
        for setting in settings
    ]
    given = [
        *study.compare.set,
        *place.grid.set,
        *place.variant.set,
        *of_ranks,
        *place.scenario.set,
    ]
    chosen = [one for one in given if _is_of(one, strategy)]
    last = dict(_split(one) for one in (f"strategy.name={strategy}", *chosen, *sets))
    try:
        return job_of_tables(tables, study.source, [f"{key}={one}" for key, one in last.items()])
    except ConfigError as error:
        raise _at(place, error) from None


def _split(setting: str) -> tuple[str, str]:
    key, _, value = setting.partition("=")
    return key.strip(), value


def _is_of(setting: str, strategy: str) -> bool:
    """Say whether a setting is not that of another strategy alone."""
    table, _, rest = setting.partition("=")[0].strip().partition(".")
    name = rest.partition(".")[0]
    return not (table == "strategy" and name in STRATEGIES and name != strategy)


def _at(place: Place, error: ConfigError) -> ConfigError:
    """Return the error with the run that it is about."""
    where = f"{place.variant.name} on {place.ranks} ranks"
    if where in error.key:
        return error
    return ConfigError(f"{where}: {error.key}", error.found, error.rule, error.fix)
