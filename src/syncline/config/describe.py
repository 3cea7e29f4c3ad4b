"""The type of a setting in words, and examples of its values."""

from __future__ import annotations

from typing import Any

from msgspec import inspect

from syncline.config.settings import Option
from syncline.config.words import any_of, toml_value


def example(key: str, kind: Any) -> str:
    """Return "for example KEY = VALUE" with a value that this type accepts."""
    info = inspect.type_info(kind)
    if isinstance(info, inspect.DictType):
        values = examples(info.value_type)
        inside = f"1 = {toml_value(values[0])}" if values else "dropout = 0.1"
        return f"for example {key} = {{{inside}}}"
    return f"for example {key} = {toml_value(one_example(info))}"


def one_example(info: inspect.Type) -> Any:
    """Return a value that this type accepts, preferably the one given beside the setting."""
    return (examples(info) or literals(info) or [_plain_example(info)])[0]


def _plain_example(info: inspect.Type) -> Option:
    """Return a value for a setting without an example: a number, or true."""
    members = info.types if isinstance(info, inspect.UnionType) else (info,)
    if any(isinstance(m, inspect.FloatType) for m in members):
        return 0.1
    return 1 if any(isinstance(m, inspect.IntType) for m in members) else True


def examples(info: inspect.Type) -> list[Any]:
    """Return the examples given beside a setting, in `Meta`."""
    if isinstance(info, inspect.UnionType):
        return [example for member in info.types for example in examples(member)]
    if isinstance(info, inspect.Metadata):
        return list((info.extra_json_schema or {}).get("examples", []))
    return []


def literals(info: inspect.Type) -> list[str]:
    """Return the words a setting may be."""
    if isinstance(info, inspect.UnionType):
        return [value for member in info.types for value in literals(member)]
    return [str(v) for v in info.values] if isinstance(info, inspect.LiteralType) else []


def describe(info: inspect.Type) -> str:
    """Say in words which values a type accepts. None is left out: TOML cannot write it."""
    match info:
        case inspect.Metadata():
            return describe(info.type)
        case inspect.UnionType():
            members = [m for m in info.types if not isinstance(m, inspect.NoneType)]
            return " or ".join(describe(member) for member in members)
        case inspect.IntType() | inspect.FloatType():
            noun = "a whole number" if isinstance(info, inspect.IntType) else "a number"
            return noun + _bounds(info)
        case inspect.BoolType():
            return "true or false"
        case inspect.StrType():
            return "text in quotes" + (", not empty" if info.min_length else "")
        case inspect.LiteralType():
            return any_of(literals(info))
        case inspect.TupleType():
            return f"a list of {len(info.item_types)}, each {describe(info.item_types[0])}"
        case inspect.VarTupleType(item_type=inspect.AnyType()):
            return "a list"
        case inspect.DictType(value_type=inspect.AnyType()):
            return "a table"
        case inspect.VarTupleType():
            size = ", not empty" if info.min_length else ""
            return f"a list{size}, each {describe(info.item_type)}"
        case inspect.DictType():
            return f"a table, each value {describe(info.value_type)}"
    return type(info).__name__.removesuffix("Type").lower()


def _bounds(info: inspect.IntType | inspect.FloatType) -> str:
    low = f"{info.ge} or more" if info.ge is not None else ""
    low = f"above {info.gt}" if info.gt is not None else low
    high = f"at most {info.le}" if info.le is not None else ""
    high = f"below {info.lt}" if info.lt is not None else high
    return "".join(f", {bound}" for bound in (low, high) if bound)
