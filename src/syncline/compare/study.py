"""A study: a job, and the grid of runs that are compared, as one TOML file (docs/compare.md).

The file is a job with one more table, [compare]. No torch here: the command line checks a study
before it imports torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from syncline.config import STRATEGIES
from syncline.config.convert import convert_table
from syncline.config.reading import parse_tables, read_text
from syncline.config.settings import Table
from syncline.config.words import any_of, did_you_mean, shown, toml_key, toml_value
from syncline.errors import ConfigError

Name = Annotated[str, Meta(min_length=1, examples=["calm"])]
Sets = tuple[str, ...]
"""Settings as after --set."""
MOST_SEEDS = 1000
TUNING_SEED = 1_000_000
"""The seed of searches. No compared run has it: else a search would favour one of them."""


class Variant(Table, frozen=True, kw_only=True):
    """A strategy with its settings. Settings in `from_ranks` count from so many ranks on."""

    name: Name
    strategy: str = ""
    set: Sets = ()
    from_ranks: dict[str, Sets] = msgspec.field(default_factory=dict)


class Scenario(Table, frozen=True, kw_only=True):
    """What happens to ranks during a run: settings of the cluster, faults."""

    name: Name
    set: Sets = ()
    words: str = ""


class Grid(Table, frozen=True, kw_only=True):
    """Runs of each of these strategies on each of these numbers of ranks, in each scenario.

    `batch` is of all ranks together, `batch_per_rank` of each rank that computes; None for the
    job's data.batch, of all ranks.
    """

    name: Name
    strategies: Annotated[tuple[Name, ...], Meta(min_length=1, examples=[("synchronous",)])]
    ranks: Annotated[
        tuple[Annotated[int, Meta(ge=1, examples=[8])], ...], Meta(min_length=1, examples=[(8, 16)])
    ]
    batch: Annotated[int, Meta(ge=1, examples=[512])] | None = None
    batch_per_rank: Annotated[int, Meta(ge=1, examples=[16])] | None = None
    scenarios: Sets = ()
    set: Sets = ()

    @property
    def batch_words(self) -> str:
        if self.batch_per_rank is not None:
            return f"{self.batch_per_rank} samples on each rank that computes"
        return f"{self.batch} samples over all ranks" if self.batch else "the job's data.batch"


class Compare(Table, frozen=True, kw_only=True):
    """The table [compare]. `seeds` are so many from 0 on, or their list. `set` is for all runs.

    Every run computes on `samples` samples over all ranks, and is evaluated `evaluations` times on
    the way. `tune` settings are tried for each strategy, number of ranks and grid. A machine has
    `ranks_per_machine` ranks; None for what the cluster says.
    """

    name: str = ""
    target: Annotated[float, Meta(gt=0, le=1, examples=[0.88])] | None = None
    seeds: (
        Annotated[int, Meta(ge=1, le=MOST_SEEDS, examples=[3])]
        | Annotated[tuple[Annotated[int, Meta(ge=0)], ...], Meta(min_length=1)]
    ) = 3
    tune: Annotated[int, Meta(ge=1, le=100, examples=[3])] = 1
    samples: Annotated[int, Meta(ge=1, examples=[120000])] | None = None
    evaluations: Annotated[int, Meta(ge=1, examples=[30])] = 30
    cluster: Annotated[str, Meta(min_length=1, examples=["10gbit"])] | None = None
    ranks_per_machine: Annotated[int, Meta(ge=1, examples=[4])] | None = None
    set: Sets = ()
    grid: tuple[Grid, ...] = ()
    scenario: tuple[Scenario, ...] = (Scenario(name="calm"),)
    variant: tuple[Variant, ...] = ()

    @property
    def all_seeds(self) -> tuple[int, ...]:
        return tuple(range(self.seeds)) if isinstance(self.seeds, int) else self.seeds

    def variant_of(self, name: str) -> Variant:
        """Return a variant by its name; a strategy's name stands for its defaults."""
        found = next((one for one in self.variant if one.name == name), Variant(name=name))
        return msgspec.structs.replace(found, strategy=found.strategy or name)

    def scenarios_of(self, grid: Grid) -> list[Scenario]:
        names = grid.scenarios or tuple(one.name for one in self.scenario)
        return [one for name in names for one in self.scenario if one.name == name]


class Study(msgspec.Struct, frozen=True, kw_only=True):
    """A job's tables, as they are in the file, and what is compared."""

    tables: dict[str, Any]
    source: str
    """The name of the file, in errors."""
    compare: Compare


def read_study(path: Path) -> Study:
    """Read a study, or a job: that has no table [compare]."""
    source = str(path)
    tables = parse_tables(read_text(path), source)
    compare = convert_table(Compare, tables.pop("compare", {}), "compare", set())
    return Study(tables=tables, source=source, compare=compare)


def study_to_toml(study: Study) -> str:
    """Write a study as TOML that reads back as an equal study."""
    compare = msgspec.to_builtins(study.compare)
    defaults = msgspec.to_builtins(Compare())
    given = {key: one for key, one in compare.items() if one != defaults[key]}
    rows = {key: given.pop(key) for key in ("grid", "scenario", "variant") if key in given}
    plain = {key: one for key, one in study.tables.items() if not isinstance(one, dict)}
    lines = [f"{toml_key(key)} = {toml_value(one)}" for key, one in plain.items()]
    for name, table in {**study.tables, "compare": given}.items():
        if name not in plain:
            lines += ["", f"[{toml_key(name)}]"]
            lines += [f"{toml_key(key)} = {toml_value(one)}" for key, one in table.items()]
    for key, tables in rows.items():
        for row in tables:
            lines += ["", f"[[compare.{key}]]"]
            values = ((name, one) for name, one in row.items() if one not in (None, [], {}, ""))
            lines += [f"{name} = {toml_value(one)}" for name, one in values]
    return "\n".join(lines).strip() + "\n"


def check_study(compare: Compare) -> None:
    """Refuse names that do not fit, and a study without a grid."""
    if not compare.grid:
        raise ConfigError(
            "--strategies",
            "it is not there",
            "a job says nothing of what to compare it with",
            "Write for example --strategies synchronous,gossip --ranks 8,16.",
        )
    _refuse_twice("compare.grid", compare.grid)
    _refuse_twice("compare.scenario", compare.scenario)
    _refuse_twice("compare.variant", compare.variant)
    for number, variant in enumerate(compare.variant):
        _check_variant(f"compare.variant[{number}]", variant)
    known = [*(one.name for one in compare.variant), *STRATEGIES]
    scenarios = [one.name for one in compare.scenario]
    for number, grid in enumerate(compare.grid):
        key = f"compare.grid[{number}]"
        for name in grid.strategies:
            _check_known(f"{key}.strategies", name, known, "this is a strategy or a variant")
        for name in grid.scenarios:
            _check_known(f"{key}.scenarios", name, scenarios, "this is a scenario of the study")
        if grid.batch is not None and grid.batch_per_rank is not None:
            found = f"got {grid.batch} with batch_per_rank = {grid.batch_per_rank}"
            rule = "a batch is of all ranks together, or of each"
            raise ConfigError(f"{key}.batch", found, rule, "Remove one of the two.")
    seeds = compare.all_seeds
    if len({*seeds}) < len(seeds):
        rule, fix = "each seed is run once", "Write each seed once."
        raise ConfigError("compare.seeds", f"got {shown(seeds)}", rule, fix)
    if TUNING_SEED in seeds:
        rule, fix = "this is the seed of searches", "Use another one."
        raise ConfigError("compare.seeds", f"got {TUNING_SEED}", rule, fix)


def _check_variant(key: str, variant: Variant) -> None:
    strategy = variant.strategy or variant.name
    _check_known(f"{key}.strategy", strategy, STRATEGIES, "this is a strategy")
    for ranks in variant.from_ranks:
        if not ranks.isdecimal():
            rule = "settings count from a number of ranks on"
            fix = f'Write for example {key}.from_ranks = {{"64" = ["strategy.server.servers=4"]}}.'
            raise ConfigError(f"{key}.from_ranks", f"got {shown(ranks)}", rule, fix)


def _check_known(key: str, name: str, known: Iterable[str], rule: str) -> None:
    known = list(known)
    if name not in known:
        fix = did_you_mean(name, known) or f"Use {any_of(dict.fromkeys(known))}."
        raise ConfigError(key, f"got {shown(name)}", rule, fix)


def _refuse_twice(key: str, named: Sequence[Grid | Scenario | Variant]) -> None:
    names = [one.name for one in named]
    for name in names:
        if names.count(name) > 1:
            found, rule = f"{shown(name)} is there twice", "each has a name of its own"
            raise ConfigError(f"{key}.name", found, rule, "Rename one of them.")
