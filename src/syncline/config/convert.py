"""Converting plain values to typed ones. Every error names the dotted key, the rule and a fix."""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar, get_args, get_origin

import msgspec
from msgspec import inspect

from syncline.config.describe import describe, example, literals, one_example
from syncline.config.job import KEYS
from syncline.config.words import did_you_mean, found, printable, shown, toml_value
from syncline.errors import ConfigError

_S = TypeVar("_S", bound=msgspec.Struct)


def table_rule(key: str) -> tuple[str, str]:
    """Return rule and fix for a value in the place of a table."""
    return "this is a table of settings", f"Write a line [{key}] and the settings below it."


def convert_table(kind: type[_S], raw: Any, key: str, from_sets: set[str]) -> _S:
    """Convert a table of `kind`, field by field, so that each error can name its key.

    `from_sets` are the keys set on the command line: an error says where a setting comes from.
    """
    if not isinstance(raw, dict):
        raise ConfigError(key, f"got {shown(raw)}", *table_rule(key))
    fields = {f.name: f for f in msgspec.structs.fields(kind) if f.name != "settings"}
    prefix = f"{key}." if key else ""
    for name in raw:
        if name not in fields:
            full = prefix + name
            fix = _nearest_key(name, key, fields)
            raise ConfigError(
                printable(full), found(full, from_sets), "no such setting exists", fix
            )
    values: dict[str, Any] = {}
    for name, field in fields.items():
        full = prefix + name
        if name in raw:
            if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
                values[name] = convert_table(field.type, raw[name], full, from_sets)
            elif (row := _row_type(field.type)) is not None:
                values[name] = _convert_rows(row, raw[name], full, from_sets)
            else:
                values[name] = _convert_value(full, raw[name], field.type)
        elif field.required:
            raise ConfigError(
                full, "it is not there", "it has no default", f"Write {example(full, field.type)}."
            )
    return kind(**values)


def _row_type(kind: Any) -> type[msgspec.Struct] | None:
    """Return S for a list of tables, tuple[S, ...]; None for all else."""
    match get_args(kind) if get_origin(kind) is tuple else ():
        case (type() as row, _) if issubclass(row, msgspec.Struct):
            return row
    return None


def _convert_rows(kind: type[_S], raw: Any, key: str, from_sets: set[str]) -> tuple[_S, ...]:
    """Convert a list of tables of `kind`."""
    if not isinstance(raw, list) or not all(isinstance(row, dict) for row in raw):
        needed = [field for field in msgspec.structs.fields(kind) if field.required]
        row = {field.name: one_example(inspect.type_info(field.type)) for field in needed}
        fix = f"Write for example {key} = {toml_value([row])}."
        raise ConfigError(key, f"got {shown(raw)}", "this is a list of tables", fix)
    return tuple(
        convert_table(kind, row, f"{key}[{number}]", from_sets) for number, row in enumerate(raw)
    )


def _convert_value(key: str, value: Any, kind: Any) -> Any:
    """Convert a value that is no table of settings; infinities and NaN are refused."""
    if get_origin(kind) is dict and isinstance(value, dict):
        of = get_args(kind)[1]
        return {name: _convert_value(f"{key}.{name}", one, of) for name, one in value.items()}
    try:
        converted = msgspec.convert(value, kind)
    except msgspec.ValidationError:
        rule = f"this is {describe(inspect.type_info(kind))}"
        raise ConfigError(key, f"got {shown(value)}", rule, _fix(key, value, kind)) from None
    for number in _numbers_in(converted):
        if not math.isfinite(number):
            fix = f"Write {example(key, kind)}."
            raise ConfigError(key, f"got {shown(value)}", "numbers here are finite", fix)
    return _with_tuples(converted)


def _numbers_in(value: Any) -> Iterator[float]:
    """Yield the floats in a value, its lists and its tables."""
    if isinstance(value, float):
        yield value
    elif isinstance(value, list | tuple | dict):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _numbers_in(one)


def _with_tuples(value: Any) -> Any:
    """Return a value with tuples for lists, at any depth: a job cannot be changed."""
    if isinstance(value, list | tuple):
        return tuple(_with_tuples(one) for one in value)
    if isinstance(value, dict):
        return {name: _with_tuples(one) for name, one in value.items()}
    return value


def _fix(key: str, value: Any, kind: Any) -> str:
    """Say what to write in place of a value that this type does not accept."""
    if key == "run.device":
        return "Remove the line: this version trains on CPUs."
    if isinstance(value, str):
        if meant := did_you_mean(value, literals(inspect.type_info(kind))):
            return meant
        for text in (value, value.lower()):
            try:
                msgspec.convert(tomllib.loads(f"value = {text}")["value"], kind)
            except (tomllib.TOMLDecodeError, msgspec.ValidationError):
                continue
            return f"Write it without quotes: {key} = {text}."
    return f"Write {example(key, kind)}."


def _nearest_key(name: str, table: str, fields: Iterable[str]) -> str:
    """Name the setting that an unknown key of a table may mean, or list what there is.

    First a similar spelling in the same table, then the same name in another table, then, for a
    key outside all tables, a similar spelling anywhere.
    """
    prefix = f"{table}." if table else ""
    near = difflib.get_close_matches(name, list(fields), n=1)
    if near:
        return f"Did you mean {prefix}{near[0]}?"
    for other, names in KEYS.items():
        if name in names:
            return f"Did you mean {other}.{name}?"
    if table:
        return f"Settings of {table}: {', '.join(fields)}."
    for other, names in KEYS.items():
        if near := difflib.get_close_matches(name, names, n=1):
            return f"Did you mean {other}.{near[0]}?"
    return f"Tables of a job: {', '.join(fields)}."
