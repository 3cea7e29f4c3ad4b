"""Cluster files: facts about a cluster as TOML, written by hand or by `syncline measure links`.

The file begins with format and version (docs/clusters.md). A fact is a number, or a table with its
range: {value = 1.1e9, low = 1.0e9, high = 1.17e9, source = "iperf3"}. What a file does not say, its
base says, a preset. Mistakes are `ConfigError`s of one line, as in a job.
"""

from __future__ import annotations

import difflib
import itertools
import math
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn, get_args

import msgspec

from syncline import device
from syncline.cluster import PRESETS
from syncline.cluster_facts import LEVELS, NUMBERS, ClusterFacts, Duplex, Fact, LinkFacts, Measured
from syncline.config.words import any_of, did_you_mean, printable, shown, toml_value
from syncline.errors import ConfigError
from syncline.files import write_atomically
from syncline.presets import PRESETS as KNOWN

FORMAT, VERSION = "syncline-cluster", 1

THIS_MACHINE = "this-machine"
"""The name of what `measure links` found here, in a file of this name in the current folder."""

_TEXTS = ("name", "source", "base", "device")
_COUNTS = ("ranks_per_machine", "cores")
_FLAGS = ("one_computer",)
_KEYS = ("format", "version", *_TEXTS, *_COUNTS, *_FLAGS, *NUMBERS, *LEVELS, "measured")
_SECONDS = ("latency_s", "message_s", "collective_s", "byte_s")
_EXAMPLES = {
    **{"latency_s": "30e-6", "message_s": "17e-6", "collective_s": "7e-6", "byte_s": "4e-10"},
    **{"flops_per_s": "5e10", "rates": "[[65536, 0.6e9], [1048576, 1.1e9]]"},
}
_COLUMNS = Measured.__struct_fields__


def find_cluster(name: str) -> ClusterFacts:
    """Return the facts of a preset, of this machine, or of a file."""
    if name in KNOWN:
        return KNOWN[name]
    path = Path(f"{THIS_MACHINE}.toml" if name == THIS_MACHINE else name)
    if name == THIS_MACHINE and not path.is_file():
        raise ConfigError(
            "--cluster",
            f"there is no file {path} here",
            f"{THIS_MACHINE} is what syncline measure links found",
            "Run syncline measure links in this folder.",
        )
    if not path.exists() and path.suffix != ".toml":
        fix = did_you_mean(name, [*KNOWN, THIS_MACHINE])
        raise ConfigError(
            "--cluster",
            f"got {shown(name)}",
            "this is a preset or a file that is there",
            fix or "syncline simulate --list-clusters has the presets.",
        )
    return read_cluster(path)


def read_cluster(path: Path) -> ClusterFacts:
    """Read a cluster file."""
    return parse_cluster(_text_of(path), printable(path))


def parse_cluster(text: str, source: str = "the cluster") -> ClusterFacts:
    """Read facts from TOML; `source` is the name of the text in errors."""
    return _Reader(source).facts(_tables(text, source))


def write_cluster(facts: ClusterFacts, path: Path) -> None:
    """Write a cluster file, whole or not at all."""
    write_atomically(path, cluster_to_toml(facts).encode())


def cluster_to_toml(facts: ClusterFacts) -> str:
    """Write facts as TOML that reads back as equal facts."""
    lines = [f'format = "{FORMAT}"', f"version = {VERSION}"]
    lines += _lines(facts, (*_TEXTS, *_COUNTS, *_FLAGS, *NUMBERS))
    for level in LEVELS:
        link = _lines(getattr(facts, level), LinkFacts.__struct_fields__)
        lines += ["", f"[{level}]", *link] if link else []
    if facts.measured:
        rows = [f"  {toml_value(list(msgspec.structs.astuple(one)))}," for one in facts.measured]
        lines += ["", "[measured]", f"columns = {toml_value(_COLUMNS)}", "rows = [", *rows, "]"]
    return "\n".join(lines) + "\n"


def _lines(struct: msgspec.Struct, names: Iterable[str]) -> list[str]:
    values = ((name, getattr(struct, name)) for name in names)
    return [f"{name} = {_fact_to_toml(value)}" for name, value in values if value not in (None, "")]


def _fact_to_toml(value: Any) -> str:
    if not isinstance(value, Fact):
        return toml_value(value)
    table = {key: one for key, one in msgspec.to_builtins(value).items() if one is not None}
    return toml_value(table if len(table) > 1 else value.value)


def _text_of(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        what = (error.strerror or type(error).__name__).lower()
    except UnicodeDecodeError:
        what = "it is not UTF-8 text"
    rule = "a cluster is read from a TOML file"
    fix = "Give a preset or a cluster file; docs/clusters.md has an example of ten lines."
    raise ConfigError(printable(path), what, rule, fix)


def _tables(text: str, source: str) -> dict[str, Any]:
    fix = "A fact looks like this: a line [network], below it latency_s = 30e-6."
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        place = re.search(r" \(at line (\d+), column (\d+)\)", str(error))
        where = f", line {place[1]}, column {place[2]}" if place else ""
        what = printable(re.sub(r" \(at [^()]*\)$", "", str(error)))
        raise ConfigError(f"{source}{where}", what, "a cluster is valid TOML", fix) from None
    except RecursionError:
        what = "values nested too deeply"
        raise ConfigError(source, what, "a cluster is two tables deep", fix) from None


class _Reader:
    """Reads the tables of one file: every error names the file and the key."""

    def __init__(self, source: str) -> None:
        self._source = source

    def facts(self, raw: dict[str, Any]) -> ClusterFacts:
        self._check_format(raw)
        self._check_keys(raw, "", _KEYS)
        found: dict[str, Any] = {key: self._text(raw, key) for key in _TEXTS if key in raw}
        found |= {key: self._count(raw, key) for key in _COUNTS if key in raw}
        found |= {key: self._flag(raw[key], key) for key in _FLAGS if key in raw}
        found |= {key: self._fact(raw[key], key) for key in NUMBERS if key in raw}
        found |= {key: self._link(raw[key], key) for key in LEVELS if key in raw}
        if "measured" in raw:
            found["measured"] = self._measured(raw["measured"])
        facts = ClusterFacts(**found)
        if facts.base and facts.base not in PRESETS:
            fix = did_you_mean(facts.base, PRESETS) or f"Use {any_of(PRESETS)}."
            self._refuse("base", f"got {shown(facts.base)}", "this is the name of a preset", fix)
        if facts.device and facts.device not in device.names():
            fix = did_you_mean(facts.device, device.names()) or f"Use {any_of(device.names())}."
            rule = "this is the name of a device"
            self._refuse("device", f"got {shown(facts.device)}", rule, fix)
        return facts

    def _refuse(self, key: str, what: str, rule: str, fix: str) -> NoReturn:
        raise ConfigError(f"{self._source}: {printable(key)}", what, rule, fix)

    def _check_format(self, raw: Mapping[str, Any]) -> None:
        fix = f'Begin the file with format = "{FORMAT}" and version = {VERSION}.'
        if raw.get("format") != FORMAT:
            what = f"got {shown(raw['format'])}" if "format" in raw else "it is not there"
            self._refuse("format", what, f"a cluster file has {shown(FORMAT)}", fix)
        if type(raw.get("version")) is not int or raw["version"] != VERSION:
            what = f"got {shown(raw['version'])}" if "version" in raw else "it is not there"
            self._refuse("version", what, f"this Syncline reads version {VERSION}", fix)

    def _check_keys(self, raw: Mapping[str, Any], table: str, known: Iterable[str]) -> None:
        prefix = f"{table}." if table else ""
        for key in raw:
            if key not in known:
                near = difflib.get_close_matches(key, list(known), n=1)
                levels = [level for level in LEVELS if key in LinkFacts.__struct_fields__]
                fix = f"There are {', '.join(known)}."
                if near:
                    fix = f"Did you mean {prefix}{near[0]}?"
                elif levels and not table:
                    fix = f"Write it below a line [network], [inside] or [copies]: {key} = ..."
                self._refuse(f"{prefix}{key}", "found in the file", "no such fact exists", fix)

    def _text(self, raw: Mapping[str, Any], key: str) -> str:
        value = raw[key]
        if not isinstance(value, str):
            fix = f'Write for example {key} = "text".'
            self._refuse(key, f"got {shown(value)}", "this is text in quotes", fix)
        return value

    def _count(self, raw: Mapping[str, Any], key: str) -> int:
        value = raw[key]
        if type(value) is not int or not 1 <= value <= 2**31:
            fix = f"Write for example {key} = 8."
            self._refuse(key, f"got {shown(value)}", "this is a whole number, 1 or more", fix)
        return value

    def _flag(self, value: Any, key: str) -> bool:
        if not isinstance(value, bool):
            self._refuse(
                key, f"got {shown(value)}", "this is true or false", f"Write {key} = true."
            )
        return value

    def _fact(self, raw: Any, key: str) -> Fact:
        if not isinstance(raw, dict):
            return Fact(self._number(raw, key))
        self._check_keys(raw, key, Fact.__struct_fields__)
        if "value" not in raw:
            fix = f"Write for example {key} = {{value = 1.1e9, low = 1e9, high = 1.2e9}}."
            self._refuse(f"{key}.value", "it is not there", "a range has a value in it", fix)
        numbers = {
            name: self._number(raw[name], f"{key}.{name}", key)
            for name in ("value", "low", "high")
            if name in raw
        }
        source = self._text(raw, "source") if "source" in raw else ""
        fact = Fact(**numbers, source=source)
        low, high = fact.bounds
        if not low <= fact.value <= high:
            what = f"got {fact.value:g} in a range from {low:g} to {high:g}"
            fix = "Correct low, value or high."
            self._refuse(key, what, "a value lies in its range", fix)
        return fact

    def _number(self, value: Any, key: str, of: str = "") -> float:
        least, most = _bounds(of or key)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and least <= value <= most:
            return float(value)
        rule = f"this is a number from {least:g} to {most:g}"
        self._refuse(key, f"got {shown(value)}", rule, f"Write {_example(of or key)}.")

    def _link(self, raw: Any, level: str) -> LinkFacts:
        if not isinstance(raw, dict):
            fix = f"Write a line [{level}] and the facts below it."
            self._refuse(level, f"got {shown(raw)}", "this is a table of facts", fix)
        self._check_keys(raw, level, LinkFacts.__struct_fields__)
        facts = ("latency_s", "rate_bytes_per_s", "nominal_bytes_per_s")
        found: dict[str, Any] = {
            key: self._fact(raw[key], f"{level}.{key}") for key in facts if key in raw
        }
        if "duplex" in raw:
            found["duplex"] = self._duplex(raw["duplex"], level)
        link = LinkFacts(**found)
        if "rates" in raw:
            rates = self._rates(raw["rates"], f"{level}.rates", link.rate_bytes_per_s)
            link = msgspec.structs.replace(link, rates=rates)
        self._check_link(link, level)
        return link

    def _duplex(self, value: Any, level: str) -> Any:
        words = get_args(Duplex)
        if value not in words:
            fix = f'Write {level}.duplex = "full".'
            self._refuse(f"{level}.duplex", f"got {shown(value)}", f"this is {any_of(words)}", fix)
        if value == "half" and level != "network":
            rule = "only links between machines are half duplex: other rates are of one way"
            self._refuse(f"{level}.duplex", 'got "half"', rule, "Remove it.")
        return value

    def _rates(self, raw: Any, key: str, reached: Fact | None) -> tuple[tuple[float, float], ...]:
        fix = f"Write {_example(key)}."
        rule = "this is a list of [bytes of a message, rate] with more bytes from row to row"
        if (
            not isinstance(raw, list)
            or not raw
            or not all(isinstance(row, list) and len(row) == 2 for row in raw)
        ):
            self._refuse(key, f"got {shown(raw)}", rule, fix)
        rows = tuple((self._number(a, key), self._number(b, key)) for a, b in raw)
        if any(later[0] <= row[0] for row, later in itertools.pairwise(rows)):
            self._refuse(key, f"got {shown(raw)}", rule, fix)
        highest = max(rate for _, rate in rows)
        if reached is None or highest > reached.value:
            what = f"got up to {highest:g}"
            fix = f"Write {key.replace('rates', 'rate_bytes_per_s')} = {highest:g}."
            self._refuse(key, what, "rates by size are at most rate_bytes_per_s", fix)
        return rows

    def _check_link(self, link: LinkFacts, level: str) -> None:
        reached, nominal = link.rate_bytes_per_s, link.nominal_bytes_per_s
        if reached is not None and nominal is not None and reached.value > nominal.value:
            what = f"got {reached.value:g} with nominal_bytes_per_s = {nominal.value:g}"
            rule = "no link reaches more than its nominal rate"
            self._refuse(f"{level}.rate_bytes_per_s", what, rule, "Correct one of the two.")
        if level == "copies" and (reached is None or link.latency_s is None):
            key = "rate_bytes_per_s" if reached is None else "latency_s"
            rule = "copies have a latency and a rate"
            fix = f"Write {_example(key)}."
            self._refuse(f"{level}.{key}", "it is not there", rule, fix)

    def _measured(self, raw: Any) -> tuple[Measured, ...]:
        try:
            rows = [dict(zip(raw["columns"], row, strict=True)) for row in raw["rows"]]
            found = msgspec.convert(rows, tuple[Measured, ...])
            if not all(math.isfinite(one.median_s) and one.median_s > 0 for one in found):
                raise ValueError
        except (msgspec.ValidationError, KeyError, TypeError, ValueError):
            fix = "Remove it, or measure again: syncline measure links."
            rule = f"it has columns ({', '.join(_COLUMNS)}) and rows of as many values"
            self._refuse("measured", "it is damaged", rule, fix)
        return found


def _bounds(key: str) -> tuple[float, float]:
    """Return the least and the most that a number may be: beyond them it is a typing error."""
    return (0, 1e6) if key.rpartition(".")[2] in _SECONDS else (1, 1e21)


def _example(key: str) -> str:
    name = key.rpartition(".")[2]
    return f"for example {name} = {_EXAMPLES.get(name, '1.1e9')}"
