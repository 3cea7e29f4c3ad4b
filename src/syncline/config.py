"""The job: what to train, on what, how. Typed, frozen, read from TOML here and nowhere else.

Every mistake in a job ends as one `ConfigError` line with the dotted key, what was found, the rule
and the way out. Nothing is ignored: an unknown key, and a setting without effect under the other
settings, are refused. `job_to_toml` writes what `parse_job` reads back as an equal job.

No torch here: the command line checks a job before it pays for importing that.
"""

from __future__ import annotations

import difflib
import json
import math
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import msgspec
from msgspec import Meta, inspect

from syncline.cluster import PRESETS
from syncline.errors import ConfigError
from syncline.faults import ANY_RANK, Fault, LinkChange
from syncline.strategy_settings import SETTINGS as STRATEGIES
from syncline.strategy_settings import OwnSettings

Option = bool | int | float | str | tuple[int, ...]


class _Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the tables of a job have in common."""


class ModelSettings(_Table, frozen=True, kw_only=True):
    """Which network. What is absent follows from the data."""

    name: Annotated[str, Meta(min_length=1, examples=["cnn"])]
    image_size: Annotated[int, Meta(ge=1, examples=[32])] | None = None
    classes: Annotated[int, Meta(ge=1, examples=[10])] | None = None
    options: dict[str, Option] = {}


class DataSettings(_Table, frozen=True, kw_only=True):
    """Which samples, and how many a step takes over all shards together (`batch`)."""

    name: Annotated[str, Meta(min_length=1, examples=["digits"])]
    batch: Annotated[int, Meta(ge=1, le=10**9, examples=[64])]
    path: Annotated[str, Meta(min_length=1, examples=["/data/images"])] | None = None
    image_size: Annotated[int, Meta(ge=1, examples=[32])] | None = None
    sample_shape: (
        Annotated[
            tuple[Annotated[int, Meta(ge=1)], ...], Meta(min_length=1, examples=[(3, 32, 32)])
        ]
        | None
    ) = None
    classes: Annotated[int, Meta(ge=1, examples=[10])] | None = None
    samples: Annotated[int, Meta(ge=1, examples=[1024])] | None = None


class OptimizerSettings(_Table, frozen=True, kw_only=True):
    """The update rule and the learning rate over time.

    `None` means the default, which `resolved` writes out: sgd has momentum 0, no Nesterov and no
    weight decay; adam has betas 0.9 and 0.999 and no weight decay; adamw the same betas and a
    weight decay of 0.01. The step schedule multiplies by `decay_factor` (0.1) every `decay_steps`.
    """

    name: Literal["sgd", "adam", "adamw"] = "sgd"
    lr: Annotated[float, Meta(gt=0, examples=[0.05])]
    momentum: Annotated[float, Meta(ge=0, lt=1, examples=[0.9])] | None = None
    nesterov: bool | None = None
    weight_decay: Annotated[float, Meta(ge=0, examples=[0.0001])] | None = None
    betas: (
        Annotated[
            tuple[Annotated[float, Meta(ge=0, lt=1)], Annotated[float, Meta(ge=0, lt=1)]],
            Meta(examples=[(0.9, 0.999)]),
        ]
        | None
    ) = None
    clip_norm: Annotated[float, Meta(gt=0, examples=[1.0])] | None = None
    schedule: Literal["constant", "cosine", "step"] = "constant"
    warmup_steps: Annotated[int, Meta(ge=0, examples=[100])] = 0
    decay_steps: Annotated[int, Meta(ge=1, examples=[1000])] | None = None
    decay_factor: Annotated[float, Meta(gt=0, examples=[0.1])] | None = None

    def resolved(self) -> OptimizerSettings:
        """Write out the defaults of the chosen optimizer and schedule; the others stay None."""
        defaults: dict[str, Any] = {"weight_decay": 0.01 if self.name == "adamw" else 0.0}
        if self.name == "sgd":
            defaults |= {"momentum": 0.0, "nesterov": False}
        else:
            defaults |= {"betas": (0.9, 0.999)}
        if self.schedule == "step":
            defaults |= {"decay_factor": 0.1}
        absent = {key: value for key, value in defaults.items() if getattr(self, key) is None}
        return msgspec.structs.replace(self, **absent)


class StrategySettings(_Table, frozen=True, kw_only=True):
    """How ranks work together. `shards` alone of these changes a single bit of the result.

    `shards` is None (spelled "auto", or left out) for as many as there are ranks. `settings` is
    the strategy's own table, [strategy.NAME] in the file.
    """

    name: str = "synchronous"
    shards: Annotated[int, Meta(ge=1, examples=[8])] | None = None
    bucket_bytes: Annotated[int, Meta(ge=1, examples=[4194304])] | Literal["auto"] = "auto"
    overlap: bool | Literal["auto"] = "auto"
    comm: Literal["auto", "shared_memory", "network"] = "auto"
    settings: msgspec.Struct | None = None

    @property
    def parts(self) -> bool:
        """Whether ranks take steps on their own: then shards fix no arithmetic."""
        return isinstance(self.settings, OwnSettings)

    def num_workers(self, ranks: int) -> int:
        """Return how many ranks compute: the first ones."""
        return self.settings.num_workers(ranks) if isinstance(self.settings, OwnSettings) else ranks


class RunSettings(_Table, frozen=True, kw_only=True):
    """How long, on how many ranks, and what is written where.

    Exactly one of `steps` and `epochs`. `evaluate_every` and `checkpoint_every` count steps; None
    is once, at the end. `threads` is a rank's number of intra-op threads: part of the arithmetic,
    so the job fixes it. `silent_s` and `hung_s` are how long a rank may send no heartbeat, and how
    long it may keep others waiting, before the run is given up.
    """

    ranks: Annotated[int, Meta(ge=1, examples=[2])] = 1
    steps: Annotated[int, Meta(ge=1, examples=[1000])] | None = None
    epochs: Annotated[int, Meta(ge=1, examples=[10])] | None = None
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1, examples=[0])] = 0
    threads: Annotated[int, Meta(ge=1, le=1024, examples=[1])] = 1
    evaluate_every: Annotated[int, Meta(ge=1, examples=[500])] | None = None
    checkpoint_every: Annotated[int, Meta(ge=1, examples=[500])] | None = None
    out: Annotated[str, Meta(min_length=1, examples=["runs/first"])] | None = None
    silent_s: Annotated[float, Meta(gt=0, examples=[20.0])] = 20.0
    hung_s: Annotated[float, Meta(gt=0, examples=[600.0])] = 600.0
    device: Literal["cpu"] = "cpu"


class ClusterSettings(_Table, frozen=True, kw_only=True):
    """Which hardware a simulation is about; training takes no notice of it.

    A preset, and what is different from it. `machines` is None for one rank a machine. `input_s`
    is how long loading one rank's batch of a step takes. `algorithm` is how machines exchange.
    `jitter` makes each rank's steps differ at random, `slow_ranks` some ranks always slow (by what
    factor, by the rank's number).
    """

    preset: str = "1gbit"
    machines: Annotated[int, Meta(ge=1, examples=[4])] | None = None
    latency_s: Annotated[float, Meta(ge=0, examples=[50e-6])] | None = None
    rate_bytes_per_s: Annotated[float, Meta(gt=0, examples=[1e9])] | None = None
    inside_latency_s: Annotated[float, Meta(ge=0, examples=[20e-6])] | None = None
    inside_rate_bytes_per_s: Annotated[float, Meta(gt=0, examples=[6e9])] | None = None
    flops_per_s: Annotated[float, Meta(gt=0, examples=[5e10])] | None = None
    update_bytes_per_s: Annotated[float, Meta(gt=0, examples=[6e9])] | None = None
    input_s: Annotated[float, Meta(ge=0, examples=[0.01])] = 0.0
    algorithm: Literal["direct", "ring"] = "direct"
    jitter: Literal["none", "lognormal", "exponential"] = "none"
    jitter_sigma: Annotated[float, Meta(ge=0, examples=[0.1])] = 0.0
    jitter_shift: Annotated[float, Meta(ge=0, lt=1, examples=[0.9])] = 0.0
    slow_ranks: dict[str, Annotated[float, Meta(gt=0, examples=[2.0])]] = {}
    faults: tuple[Fault, ...] = ()
    link_changes: tuple[LinkChange, ...] = ()


class Job(_Table, frozen=True, kw_only=True):
    """Everything a training run depends on, and the cluster to simulate it on."""

    model: ModelSettings
    data: DataSettings
    optimizer: OptimizerSettings
    strategy: StrategySettings = StrategySettings()
    run: RunSettings
    cluster: ClusterSettings = ClusterSettings()
    faults: tuple[Fault, ...] = ()
    """What goes wrong on purpose: in training for real, in a simulation in virtual time."""

    @property
    def image_size(self) -> int | None:
        """The side of the images in pixels, whichever table says so; None as the data has them."""
        return self.data.image_size if self.model.image_size is None else self.model.image_size

    def resolved(self, ranks: int | None = None) -> Job:
        """Fill in what is automatic for this many ranks (`run.ranks` if None), and check it all.

        Afterwards `strategy.shards` is a number and the chosen optimizer's settings are written
        out. Resolving twice changes nothing.
        """
        ranks = self.run.ranks if ranks is None else ranks
        if ranks < 1:
            raise ConfigError(
                "run.ranks", f"got {ranks}", "a world has at least one rank", "Use 1 or more."
            )
        _check_alone(self)
        own, workers = self.strategy.settings, self.strategy.num_workers(ranks)
        if isinstance(own, OwnSettings):
            own.check(ranks)
            _check_period(self, own)
        _check_shards(self, ranks, workers)
        shards = workers if self.strategy.shards is None else self.strategy.shards
        return msgspec.structs.replace(
            self,
            optimizer=self.optimizer.resolved(),
            strategy=msgspec.structs.replace(self.strategy, shards=shards),
            run=msgspec.structs.replace(self.run, ranks=ranks),
        )


# -- reading ---------------------------------------------------------------------------------------


# What a run may change when it is resumed: where and how fast it goes, how long, what it writes.
_MAY_CHANGE = {
    "data": {"path"},
    "strategy": {"bucket_bytes", "overlap", "comm"},
    "run": {
        "ranks",
        "steps",
        "epochs",
        "evaluate_every",
        "checkpoint_every",
        "out",
        "silent_s",
        "hung_s",
    },
    "cluster": set(ClusterSettings.__struct_fields__),
}


def what_changed(before: Job, now: Job) -> Iterator[tuple[str, Any, Any]]:
    """Yield the settings that differ and fix the arithmetic: key, value before, value now."""
    before = msgspec.structs.replace(before, optimizer=before.optimizer.resolved())
    now = msgspec.structs.replace(now, optimizer=now.optimizer.resolved())
    for table in now.__struct_fields__:
        if table == "faults":
            continue
        may_change = _MAY_CHANGE.get(table, set())
        if table == "strategy" and now.strategy.parts:
            may_change = {"shards", "settings", *may_change}
            was, is_now = before.strategy.settings, now.strategy.settings
            if type(was) is type(is_now):
                yield from _differences(f"strategy.{now.strategy.name}", was, is_now, set())
        yield from _differences(table, getattr(before, table), getattr(now, table), may_change)


def _differences(
    key: str, was: Any, is_now: Any, may_change: Set[str]
) -> Iterator[tuple[str, Any, Any]]:
    for name in is_now.__struct_fields__:
        old, new = getattr(was, name), getattr(is_now, name)
        if old != new and name not in may_change:
            yield f"{key}.{name}", old, new


def read_job(path: str | Path, sets: Sequence[str] = ()) -> Job:
    """Read a job from a TOML file and lay `KEY=VALUE` settings over it.

    A value is TOML, or a bare word taken as text. An empty value takes the key out of the job.
    `run.steps` displaces the file's `run.epochs` and the other way round.
    """
    return parse_job(_read_text(Path(path)), source=str(path), sets=sets)


def parse_job(text: str, source: str = "the job", sets: Sequence[str] = ()) -> Job:
    """Read a job from TOML text. `source` is what errors call the text as a whole."""
    raw = _parse_toml(text, source)
    from_sets = _lay_over(raw, sets)
    job = _job_from(raw, source, from_sets)
    _check_alone(job)
    return job


def _read_text(path: Path) -> str:
    key = printable(path)
    fix = "Give the path of a TOML file, such as examples/digits.toml."
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise ConfigError(key, "there is no such file", "a job is read from one", fix) from None
    except IsADirectoryError:
        raise ConfigError(key, "this is a folder", "a job is one file", fix) from None
    except OSError as error:
        reason = (error.strerror or type(error).__name__).lower()
        raise ConfigError(key, f"cannot be read ({reason})", "a job is a file", fix) from None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"{key}, line {line}",
            f"byte 0x{data[error.start]:02x} is not UTF-8",
            "TOML files are",
            "Save the file as UTF-8 text.",
        ) from None


def _parse_toml(text: str, source: str) -> dict[str, Any]:
    fix = 'Settings look like this: a line [run], below it lines such as steps = 100 or out = "x".'
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        message = str(error)
        place = re.search(r" \(at line (\d+), column \d+\)", message)
        line = int(place[1]) if place else max(1, len(text.splitlines()))
        what = re.sub(r" \(at [^()]*\)$", "", message)
        key = f"{printable(source)}, line {line}"
        raise ConfigError(key, printable(what), "a job is valid TOML", fix) from None
    except RecursionError:
        key = printable(source)
        raise ConfigError(
            key, "values nested too deeply", "a job is two tables deep", fix
        ) from None


def _lay_over(raw: dict[str, Any], sets: Sequence[str]) -> set[str]:
    """Put each KEY=VALUE into `raw`; return the keys that were set."""
    keys = set()
    for text in sets:
        key, equals, written = (part.strip() for part in text.partition("="))
        names = key.split(".")
        if not equals or not all(names):
            raise ConfigError(
                "--set",
                f"got {_shown(text)}",
                "it takes KEY=VALUE",
                "Write for example --set run.steps=100.",
            )
        table: Any = raw
        for name in names[:-1]:
            table = table.setdefault(name, {})
            if not isinstance(table, dict):
                above = ".".join(names[: names.index(name) + 1])
                raise ConfigError(above, f"got {_shown(table)}", *_table_rule(above))
        if written:
            table[names[-1]] = _parse_value(key, written)
        elif names[-1] in table:
            del table[names[-1]]
        else:
            raise ConfigError(
                key, "taken out with --set", "the job does not have it", "Leave that --set away."
            )
        keys.add(key)
    run = raw.get("run")
    if isinstance(run, dict) and {"steps", "epochs"} <= run.keys():
        if "run.steps" in keys and "run.epochs" not in keys:
            del run["epochs"]
        elif "run.epochs" in keys and "run.steps" not in keys:
            del run["steps"]
    return keys


def _parse_value(key: str, written: str) -> Any:
    try:
        parsed = tomllib.loads(f"value = {written}")
    except (tomllib.TOMLDecodeError, RecursionError):
        parsed = {}
    value = parsed.get("value")
    if parsed.keys() == {"value"} and isinstance(value, bool | int | float | str | list | dict):
        return value
    if written[0] in "\"'[{":
        raise ConfigError(
            key,
            f"got {_shown(written)}",
            "that is no TOML value",
            "Look at its quotes and brackets.",
        )
    return written


def _job_from(raw: dict[str, Any], source: str, from_sets: set[str]) -> Job:
    for name in ("model", "data", "optimizer", "run"):
        if name not in raw and not raw.keys() - {*_KEYS, "faults"}:
            raise ConfigError(
                name,
                f"there is no such table in {printable(source)}",
                "a job has the tables model, data, optimizer and run",
                f"Add a line [{name}] and its settings below it.",
            )
    strategy = raw.get("strategy")
    own: msgspec.Struct | None = None
    if isinstance(strategy, dict):
        own = _own_settings(strategy, from_sets)
        strategy = {name: value for name, value in strategy.items() if name not in STRATEGIES}
        if strategy.get("shards") == "auto":
            del strategy["shards"]
        raw = {**raw, "strategy": strategy}
    job = _convert_table(Job, raw, "", from_sets)
    return msgspec.structs.replace(
        job, strategy=msgspec.structs.replace(job.strategy, settings=own)
    )


def _own_settings(strategy: dict[str, Any], from_sets: set[str]) -> msgspec.Struct | None:
    """Read [strategy.NAME] of the chosen strategy; refuse that of any other."""
    chosen = strategy.get("name", "synchronous")
    if not isinstance(chosen, str) or chosen not in STRATEGIES:
        fix = _did_you_mean(chosen, STRATEGIES) or f"Use {_any_of(STRATEGIES)}."
        raise ConfigError("strategy.name", f"got {_shown(chosen)}", "no such strategy exists", fix)
    for name in STRATEGIES:
        if name in strategy and name != chosen:
            raise ConfigError(
                f"strategy.{name}",
                f"{_found(f'strategy.{name}', from_sets)} while strategy.name is {_shown(chosen)}",
                "settings of a strategy that is not chosen have no effect",
                f'Remove them, or choose strategy.name = "{name}".',
            )
    kind = STRATEGIES[chosen]
    if kind is not None:
        return _convert_table(kind, strategy.get(chosen, {}), f"strategy.{chosen}", from_sets)
    if chosen in strategy:
        raise ConfigError(
            f"strategy.{chosen}",
            _found(f"strategy.{chosen}", from_sets),
            f"{chosen} has no settings of its own",
            "Remove it.",
        )
    return None


# -- from plain values to typed ones ---------------------------------------------------------------

_S = TypeVar("_S", bound=msgspec.Struct)


def _table_rule(key: str) -> tuple[str, str]:
    return "this is a table of settings", f"Write a line [{key}] and the settings below it."


def _convert_table(kind: type[_S], raw: Any, key: str, from_sets: set[str]) -> _S:
    """Convert a table field by field, so that each error knows its key."""
    if not isinstance(raw, dict):
        raise ConfigError(key, f"got {_shown(raw)}", *_table_rule(key))
    fields = {f.name: f for f in msgspec.structs.fields(kind) if f.name != "settings"}
    prefix = f"{key}." if key else ""
    for name in raw:
        if name not in fields:
            full = prefix + name
            fix = _nearest_key(name, key, fields)
            raise ConfigError(
                printable(full), _found(full, from_sets), "no such setting exists", fix
            )
    values: dict[str, Any] = {}
    for name, field in fields.items():
        full = prefix + name
        if name in raw:
            if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
                values[name] = _convert_table(field.type, raw[name], full, from_sets)
            elif (row := _row_type(field.type)) is not None:
                values[name] = _convert_rows(row, raw[name], full, from_sets)
            else:
                values[name] = _convert_value(full, raw[name], field.type)
        elif field.required:
            raise ConfigError(
                full, "it is not there", "it has no default", f"Write {_example(full, field.type)}."
            )
    return kind(**values)


def _row_type(kind: Any) -> type[msgspec.Struct] | None:
    """Return S for a list of tables, tuple[S, ...]; None for all else."""
    match get_args(kind) if get_origin(kind) is tuple else ():
        case (type() as row, _) if issubclass(row, msgspec.Struct):
            return row
    return None


def _convert_rows(kind: type[_S], raw: Any, key: str, from_sets: set[str]) -> tuple[_S, ...]:
    if not isinstance(raw, list) or not all(isinstance(row, dict) for row in raw):
        needed = [field for field in msgspec.structs.fields(kind) if field.required]
        row = {field.name: _one_example(inspect.type_info(field.type)) for field in needed}
        fix = f"Write for example {key} = {_toml_value([row])}."
        raise ConfigError(key, f"got {_shown(raw)}", "this is a list of tables", fix)
    return tuple(
        _convert_table(kind, row, f"{key}[{number}]", from_sets) for number, row in enumerate(raw)
    )


def _convert_value(key: str, value: Any, kind: Any) -> Any:
    if get_origin(kind) is dict and isinstance(value, dict):
        of = get_args(kind)[1]
        return {name: _convert_value(f"{key}.{name}", one, of) for name, one in value.items()}
    try:
        converted = msgspec.convert(value, kind)
    except msgspec.ValidationError:
        rule = f"this is {_describe(inspect.type_info(kind))}"
        raise ConfigError(key, f"got {_shown(value)}", rule, _way_out(key, value, kind)) from None
    for number in converted if isinstance(converted, tuple) else [converted]:
        if isinstance(number, float) and not math.isfinite(number):
            fix = f"Write {_example(key, kind)}."
            raise ConfigError(key, f"got {_shown(value)}", "numbers here are finite", fix)
    return converted


def _way_out(key: str, value: Any, kind: Any) -> str:
    if key == "run.device":
        return "Remove the line: this version trains on CPUs."
    if isinstance(value, str):
        if meant := _did_you_mean(value, _literals(inspect.type_info(kind))):
            return meant
        for text in (value, value.lower()):
            try:
                msgspec.convert(tomllib.loads(f"value = {text}")["value"], kind)
            except (tomllib.TOMLDecodeError, msgspec.ValidationError):
                continue
            return f"Write it without quotes: {key} = {text}."
    return f"Write {_example(key, kind)}."


def _example(key: str, kind: Any) -> str:
    info = inspect.type_info(kind)
    if isinstance(info, inspect.DictType):
        values = _examples(info.value_type)
        inside = f"1 = {_toml_value(values[0])}" if values else "dropout = 0.1"
        return f"for example {key} = {{{inside}}}"
    return f"for example {key} = {_toml_value(_one_example(info))}"


def _one_example(info: inspect.Type) -> Any:
    return (_examples(info) or _literals(info) or [_plain_example(info)])[0]


def _plain_example(info: inspect.Type) -> Option:
    members = info.types if isinstance(info, inspect.UnionType) else (info,)
    if any(isinstance(m, inspect.FloatType) for m in members):
        return 0.1
    return 1 if any(isinstance(m, inspect.IntType) for m in members) else True


def _examples(info: inspect.Type) -> list[Any]:
    if isinstance(info, inspect.UnionType):
        return [example for member in info.types for example in _examples(member)]
    if isinstance(info, inspect.Metadata):
        return list((info.extra_json_schema or {}).get("examples", []))
    return []


def _literals(info: inspect.Type) -> list[str]:
    if isinstance(info, inspect.UnionType):
        return [value for member in info.types for value in _literals(member)]
    return [str(v) for v in info.values] if isinstance(info, inspect.LiteralType) else []


def _describe(info: inspect.Type) -> str:
    """Say in words what values a type admits. Absence cannot be written in TOML: it is left out."""
    match info:
        case inspect.Metadata():
            return _describe(info.type)
        case inspect.UnionType():
            members = [m for m in info.types if not isinstance(m, inspect.NoneType)]
            return " or ".join(_describe(member) for member in members)
        case inspect.IntType() | inspect.FloatType():
            noun = "a whole number" if isinstance(info, inspect.IntType) else "a number"
            return noun + _bounds(info)
        case inspect.BoolType():
            return "true or false"
        case inspect.StrType():
            return "text in quotes" + (", not empty" if info.min_length else "")
        case inspect.LiteralType():
            return _any_of(_literals(info))
        case inspect.TupleType():
            return f"a list of {len(info.item_types)}, each {_describe(info.item_types[0])}"
        case inspect.VarTupleType():
            size = ", not empty" if info.min_length else ""
            return f"a list{size}, each {_describe(info.item_type)}"
        case inspect.DictType():
            return f"a table, each value {_describe(info.value_type)}"
    return type(info).__name__.removesuffix("Type").lower()


def _bounds(info: inspect.IntType | inspect.FloatType) -> str:
    low = f"{info.ge} or more" if info.ge is not None else ""
    low = f"above {info.gt}" if info.gt is not None else low
    high = f"at most {info.le}" if info.le is not None else ""
    high = f"below {info.lt}" if info.lt is not None else high
    return "".join(f", {bound}" for bound in (low, high) if bound)


def _nearest_key(name: str, table: str, fields: Iterable[str]) -> str:
    prefix = f"{table}." if table else ""
    near = difflib.get_close_matches(name, list(fields), n=1)
    if near:
        return f"Did you mean {prefix}{near[0]}?"
    for other, names in _KEYS.items():
        if name in names:
            return f"Did you mean {other}.{name}?"
    if table:
        return f"Settings of {table}: {', '.join(fields)}."
    for other, names in _KEYS.items():
        if near := difflib.get_close_matches(name, names, n=1):
            return f"Did you mean {other}.{near[0]}?"
    return f"Tables of a job: {', '.join(fields)}."


_KEYS: dict[str, list[str]] = {
    table.name: [field.name for field in msgspec.structs.fields(table.type)]
    for table in msgspec.structs.fields(Job)
    if table.name != "faults"
}
_KEYS["strategy"].remove("settings")


def keys() -> list[str]:
    """List every setting by its dotted key."""
    return [f"{table}.{name}" for table, names in _KEYS.items() for name in names]


# -- rules between settings ------------------------------------------------------------------------


def _check_alone(job: Job) -> None:
    """Check what does not depend on the number of ranks."""
    _check_optimizer(job.optimizer)
    _check_cluster(job.cluster)
    _check_faults("faults", job.faults)
    run = job.run
    if (run.steps is None) == (run.epochs is None):
        both = run.steps is not None
        raise ConfigError(
            "run.steps",
            f"got {run.steps} together with run.epochs = {run.epochs}"
            if both
            else "neither run.steps nor run.epochs is there",
            "exactly one of the two ends a run",
            "Remove one of them." if both else "Write for example run.epochs = 10.",
        )
    optimizer = job.optimizer
    if optimizer.schedule == "cosine" and run.steps and optimizer.warmup_steps >= run.steps:
        raise ConfigError(
            "optimizer.warmup_steps",
            f"got {optimizer.warmup_steps} with run.steps = {run.steps}",
            "the cosine schedule begins after the warm-up",
            f"Use less than {run.steps}.",
        )
    sizes = job.model.image_size, job.data.image_size
    if None not in sizes and sizes[0] != sizes[1]:
        raise ConfigError(
            "model.image_size",
            f"got {sizes[0]} with data.image_size = {sizes[1]}",
            "the model reads the images as the data gives them",
            "Remove one of the two.",
        )


def _check_optimizer(optimizer: OptimizerSettings) -> None:
    of_sgd, of_adam = ("momentum", "nesterov"), ("betas",)
    for setting in of_adam if optimizer.name == "sgd" else of_sgd:
        if getattr(optimizer, setting) is not None:
            raise _without_effect(
                f"optimizer.{setting}",
                getattr(optimizer, setting),
                f'optimizer.name is "{optimizer.name}"',
                "adam and adamw" if setting in of_adam else "sgd",
            )
    if optimizer.schedule != "step":
        for setting in ("decay_steps", "decay_factor"):
            value = getattr(optimizer, setting)
            if value is not None:
                when = f'optimizer.schedule is "{optimizer.schedule}"'
                raise _without_effect(f"optimizer.{setting}", value, when, 'schedule = "step"')
    elif optimizer.decay_steps is None:
        raise ConfigError(
            "optimizer.decay_steps",
            "it is not there",
            'schedule = "step" needs the steps between two decays',
            "Write for example optimizer.decay_steps = 1000.",
        )
    if optimizer.nesterov and not optimizer.momentum:
        raise ConfigError(
            "optimizer.nesterov",
            "got true without momentum",
            "Nesterov's step is a form of momentum",
            "Write for example optimizer.momentum = 0.9.",
        )


def _without_effect(key: str, value: Any, when: str, owner: str) -> ConfigError:
    how = "" if "[" in key else f" (on the command line: --set {key}=)"
    return ConfigError(
        key,
        f"got {_shown(value)} while {when}",
        f"it has an effect with {owner} only",
        f"Remove it{how}.",
    )


def _check_cluster(cluster: ClusterSettings) -> None:
    """Check what does not depend on the size of the world; `Conditions.check` does the rest."""
    if cluster.preset not in PRESETS:
        known = _any_of(PRESETS)
        fix = _did_you_mean(cluster.preset, PRESETS) or f"Use {known}."
        raise ConfigError(
            "cluster.preset", f"got {_shown(cluster.preset)}", f"this is {known}", fix
        )
    for setting, kind in (("jitter_sigma", "lognormal"), ("jitter_shift", "exponential")):
        value = getattr(cluster, setting)
        if value and cluster.jitter != kind:
            when = f'cluster.jitter is "{cluster.jitter}"'
            raise _without_effect(f"cluster.{setting}", value, when, f'jitter = "{kind}"')
    if cluster.jitter == "lognormal" and not cluster.jitter_sigma:
        raise ConfigError(
            "cluster.jitter_sigma",
            "it is not there",
            'jitter = "lognormal" needs a spread above 0',
            "Write for example cluster.jitter_sigma = 0.1.",
        )
    for rank in cluster.slow_ranks:
        if not re.fullmatch(r"0|[1-9][0-9]*", rank):
            raise ConfigError(
                f"cluster.slow_ranks.{printable(rank)}",
                f"got {_shown(rank)}",
                "ranks are whole numbers, counted from 0",
                "Write for example cluster.slow_ranks = {1 = 2.0}.",
            )
    _check_faults("cluster.faults", cluster.faults)


def _check_faults(key: str, faults: Sequence[Fault]) -> None:
    for number, fault in enumerate(faults):
        _check_fault(f"{key}[{number}]", fault)


def _check_fault(key: str, fault: Fault) -> None:
    if fault.kind == "slow" and fault.factor == 1:
        raise ConfigError(
            f"{key}.factor",
            "it is 1, or not given",
            'compute takes as many times as long with kind = "slow"',
            "Use for example factor = 5.0.",
        )
    owners = {"factor": "slow", "seconds": "pause"}
    if fault.chance == 1:
        owners["steps"] = "slow"
        if fault.rank == ANY_RANK and fault.kind == "death":
            raise ConfigError(
                f"{key}.rank",
                "got -1, every rank, for a death without a chance",
                "somebody has to live",
                "Name a rank, or write for example chance = 0.01.",
            )
    for field in msgspec.structs.fields(Fault):
        value, owner = getattr(fault, field.name), owners.get(field.name, fault.kind)
        if owner != fault.kind and value != field.default:
            when = f'its kind is "{fault.kind}"'
            raise _without_effect(f"{key}.{field.name}", value, when, f'kind = "{owner}"')


def _check_period(job: Job, own: OwnSettings) -> None:
    steps = job.run.steps
    if steps is not None and own.period > steps:
        raise ConfigError(
            f"strategy.{job.strategy.name}.period",
            f"got {own.period} with run.steps = {steps}",
            "ranks would never exchange anything",
            f"Use at most {steps}.",
        )


def _check_shards(job: Job, ranks: int, workers: int) -> None:
    batch, shards = job.data.batch, job.strategy.shards
    if shards is None:
        if batch % workers:
            serving = f" ({ranks - workers} only serve)" if workers < ranks else ""
            fitting = [n + ranks - workers for n in _divisors_near(batch, workers)]
            raise ConfigError(
                "run.ranks",
                f"got {ranks}{serving} with data.batch = {batch}",
                "without strategy.shards each rank takes one equal share of the batch",
                f"Use {_listed(fitting)} ranks, set strategy.shards,"
                f" or make data.batch {_near_multiples(batch, workers)}.",
            )
        return
    ranks = workers
    if shards > batch:
        raise ConfigError(
            "strategy.shards",
            f"got {shards} with data.batch = {batch}",
            "each shard needs at least one sample",
            f"Use at most {batch} shards, or make data.batch a multiple of {shards}.",
        )
    if batch % shards:
        raise ConfigError(
            "data.batch",
            f"got {batch} with strategy.shards = {shards}",
            "shards are equal",
            f"Use {_near_multiples(batch, shards)},"
            f" or {_listed(_divisors_near(batch, shards))} shards.",
        )
    if shards < ranks:
        enough = [n for n in _divisors(batch) if n >= ranks][:4]
        larger = f"Use {_listed(enough)} shards" if enough else "Use more shards and a larger batch"
        raise ConfigError(
            "strategy.shards",
            f"got {shards} with {ranks} ranks",
            "each rank needs at least one shard",
            f"{larger}, or at most {shards} rank{'s' if shards > 1 else ''}.",
        )


def _divisors(number: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def _divisors_near(number: int, wanted: int) -> list[int]:
    """The four divisors that are nearest to what was wanted, in ascending order."""
    return sorted(sorted(_divisors(number), key=lambda n: abs(n - wanted))[:4])


def _near_multiples(number: int, of: int) -> str:
    below = number // of * of
    return _listed([n for n in (below, below + of) if n])


# -- writing ---------------------------------------------------------------------------------------


def job_to_toml(job: Job) -> str:
    """Write a job as TOML that reads back as an equal job.

    What is None is left out, and so is a cluster that nobody has said anything about.
    """
    lines = [f"faults = {_toml_value(job.faults)}", ""] if job.faults else []
    for table in job.__struct_fields__:
        struct = getattr(job, table)
        if struct == ClusterSettings() or table == "faults":
            continue
        lines += [f"[{table}]", *_toml_lines(struct), ""]
        own = getattr(struct, "settings", None)
        if own is not None:
            lines += [f"[{table}.{_toml_key(struct.name)}]", *_toml_lines(own), ""]
    return "\n".join(lines[:-1]) + "\n"


def _toml_lines(struct: msgspec.Struct) -> list[str]:
    values = {name: getattr(struct, name) for name in struct.__struct_fields__}
    return [
        f"{name} = {_toml_value(value)}"
        for name, value in values.items()
        if name != "settings" and value is not None and value not in ({}, ())
    ]


def _toml_value(value: Any) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            # JSON's escapes are TOML's as well; DEL is the one character JSON leaves bare.
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case msgspec.Struct():
            return _toml_value(msgspec.structs.asdict(value))
        case list() | tuple():
            return f"[{', '.join(_toml_value(item) for item in value)}]"
        case Mapping():
            items = (f"{_toml_key(k)} = {_toml_value(v)}" for k, v in value.items())
            return f"{{{', '.join(items)}}}"
    return str(value)


def _toml_key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _toml_value(name)


# -- words -----------------------------------------------------------------------------------------


def printable(value: object) -> str:
    """Return the text of a value on one line: errors are one line whatever a file is called."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(value))


def _shown(value: Any) -> str:
    text = printable(_toml_value(value))
    return text if len(text) <= 60 else text[:57] + "..."


def _found(key: str, from_sets: set[str]) -> str:
    given = any(f"{one}.".startswith(f"{key}.") or key.startswith(f"{one}[") for one in from_sets)
    return "set on the command line" if given else "found in the file"


def _did_you_mean(value: Any, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(str(value).lower(), list(known), n=1)
    return f'Did you mean "{near[0]}"?' if near else ""


def _any_of(words: Iterable[str]) -> str:
    return _listed([f'"{word}"' for word in words])


def _listed(items: Sequence[object]) -> str:
    """Join as "1, 2 or 4"."""
    words = [str(item) for item in items]
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))
