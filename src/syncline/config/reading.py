"""Reading a job from TOML text and from `KEY=VALUE` settings, which win over the text."""

from __future__ import annotations

import copy
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from syncline.config.convert import convert_table, table_rule
from syncline.config.job import KEYS, Job
from syncline.config.words import any_of, did_you_mean, found, printable, shown
from syncline.errors import ConfigError
from syncline.strategies.registry import STRATEGIES
from syncline.strategies.settings import OwnSettings


def read_job(path: str | Path, sets: Sequence[str] = ()) -> Job:
    """Read a job from a TOML file; `sets` are `KEY=VALUE` settings that win over the file.

    A value is TOML, or a bare word taken as text. An empty value removes the key from the job.
    `run.steps` removes the file's `run.epochs`, and the other way round.
    """
    return parse_job(read_text(Path(path)), source=str(path), sets=sets)


def parse_job(text: str, source: str = "the job", sets: Sequence[str] = ()) -> Job:
    """Read a job from TOML text. `source` is the name of the text in errors."""
    return job_of_tables(parse_tables(text, source), source, sets)


def job_of_tables(tables: dict[str, Any], source: str, sets: Sequence[str] = ()) -> Job:
    """Read a job from the tables of a TOML file, which are not changed."""
    raw = copy.deepcopy(tables)
    from_sets = _apply_sets(raw, sets)
    job = _job_from(raw, source, from_sets)
    job.check()
    return job


def read_text(path: Path) -> str:
    key = printable(path)
    fix = "Give the path of a TOML file, such as examples/digits.toml."
    if path.suffix == ".py":
        fix = f"Start a script with syncline run --ranks 2 {key}."
        raise ConfigError(key, "this is a Python script", "a job is a TOML file", fix)
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


def parse_tables(text: str, source: str) -> dict[str, Any]:
    """Return the tables of a TOML text."""
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


def _apply_sets(raw: dict[str, Any], sets: Sequence[str]) -> set[str]:
    """Put each KEY=VALUE into `raw`; return the keys that were set."""
    keys = set()
    for text in sets:
        key, equals, written = (part.strip() for part in text.partition("="))
        names = key.split(".")
        if not equals or not all(names):
            raise ConfigError(
                "--set",
                f"got {shown(text)}",
                "it takes KEY=VALUE",
                "Write for example --set run.steps=100.",
            )
        table: Any = raw
        for name in names[:-1]:
            table = table.setdefault(name, {})
            if not isinstance(table, dict):
                above = ".".join(names[: names.index(name) + 1])
                raise ConfigError(above, f"got {shown(table)}", *table_rule(above))
        if written:
            table[names[-1]] = _parse_value(key, written)
        elif names[-1] in table:
            del table[names[-1]]
        else:
            raise ConfigError(
                key, "taken out with --set", "the job does not have it", "Remove that --set."
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
    """Return the value of one --set: TOML, or the text itself if it is a bare word."""
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
            f"got {shown(written)}",
            "that is no TOML value",
            "Look at its quotes and brackets.",
        )
    return written


def _job_from(raw: dict[str, Any], source: str, from_sets: set[str]) -> Job:
    """Convert the tables to a job, without checking rules between them."""
    for name in ("model", "data", "optimizer", "run"):
        if name not in raw and not raw.keys() - {*KEYS, "faults"}:
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
    job = convert_table(Job, raw, "", from_sets)
    return msgspec.structs.replace(
        job, strategy=msgspec.structs.replace(job.strategy, settings=own)
    )


def _own_settings(strategy: dict[str, Any], from_sets: set[str]) -> OwnSettings | None:
    """Read [strategy.NAME] of the chosen strategy; refuse that of any other."""
    chosen = strategy.get("name", "synchronous")
    if not isinstance(chosen, str) or chosen not in STRATEGIES:
        fix = did_you_mean(chosen, STRATEGIES) or f"Use {any_of(STRATEGIES)}."
        raise ConfigError("strategy.name", f"got {shown(chosen)}", "no such strategy exists", fix)
    for name in STRATEGIES:
        if name in strategy and name != chosen:
            raise ConfigError(
                f"strategy.{name}",
                f"{found(f'strategy.{name}', from_sets)} while strategy.name is {shown(chosen)}",
                "settings of a strategy that is not chosen have no effect",
                f'Remove them, or choose strategy.name = "{name}".',
            )
    kind = STRATEGIES[chosen].settings
    if kind.__struct_fields__:
        return convert_table(kind, strategy.get(chosen, {}), f"strategy.{chosen}", from_sets)
    if chosen in strategy:
        raise ConfigError(
            f"strategy.{chosen}",
            found(f"strategy.{chosen}", from_sets),
            f"{chosen} has no settings of its own",
            "Remove it.",
        )
    return None
