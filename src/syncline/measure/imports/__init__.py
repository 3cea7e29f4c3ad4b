"""Workloads from measurements of others: a table of layers, logs, profile graphs, traces.

Each format has a file. A file's format is recognised by its content. A damaged file is refused in
one line that names line and column. No torch here.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from syncline.config.words import any_of, did_you_mean, printable, shown
from syncline.errors import ConfigError
from syncline.measure.imports import bcaffe, chrome, layer_table, pipedream
from syncline.measure.imports.assemble import Imported
from syncline.measure.imports.source import Source, read_source
from syncline.workload import FORMAT

PER_S = {"us": 1e6, "ms": 1e3, "s": 1.0}
"""How many of each unit a second has."""
LAYER_TABLE = "layer-table"
FORMATS: dict[str, Callable[[Source, int | None], Imported]] = {
    "bcaffe": bcaffe.read_log,
    LAYER_TABLE: lambda source, samples: layer_table.read_layer_table(source, samples, 1e6),
    "pipedream": pipedream.read_profile,
    "torch-profiler": chrome.read_trace,
}
"""Readers by name; samples are those of one forward, None if they are not known."""

_PIECE = 50
"""Lines that are looked at: a log may begin with others."""


def import_workload(
    path: Path,
    *,
    format: str | None = None,
    unit: str | None = None,
    samples: int | None = None,
) -> tuple[str, Imported]:
    """Read a file; return its format and the workload. `format` None recognises it.

    `unit` is that of the times in a layer table: "us" (the default), "ms" or "s". `samples` says of
    how many samples one forward was.
    """
    source = read_source(path)
    format = _format_of(source) if format is None else _known(format)
    if unit is None:
        return format, FORMATS[format](source, samples)
    if unit not in PER_S:
        fix = f"Use {any_of(PER_S)}."
        raise ConfigError("--unit", f"got {shown(unit)}", "times are in one of the units", fix)
    if format != LAYER_TABLE:
        found, rule = f"got {shown(unit)} for a {format} file", "that format has a unit of its own"
        raise ConfigError("--unit", found, rule, "Leave it away.")
    return format, layer_table.read_layer_table(source, samples, PER_S[unit])


def _known(format: str) -> str:
    if format in FORMATS:
        return format
    fix = did_you_mean(format, FORMATS) or f"Choose from {', '.join(FORMATS)}."
    raise ConfigError("--format", f"got {shown(format)}", "there is no such format", fix)


def _format_of(source: Source) -> str:
    """Recognise a file's format by its first lines."""
    if chrome.is_trace(source.text):
        _check_no_workload(source)
        return "torch-profiler"
    lines = [line for line in source.text[: 1 << 16].splitlines() if line.strip()][:_PIECE]
    for name, is_one in (
        (LAYER_TABLE, lambda: bool(lines) and layer_table.is_layer_table(_first_row(lines))),
        ("pipedream", lambda: any(map(pipedream.is_profile, lines))),
        ("bcaffe", lambda: any(map(bcaffe.is_log, lines))),
    ):
        if is_one():
            return name
    found = f"it begins with {shown(lines[0].strip())}" if lines else "it is empty"
    fix = f"Name its format with --format: {', '.join(FORMATS)}."
    raise source.error(0, found, "no format that is known begins like this", fix)


def _first_row(lines: list[str]) -> str:
    """Return the first line that is no comment, or a header that is written as one."""
    for line in lines:
        if not line.lstrip().startswith("#") or layer_table.is_layer_table(line):
            return line
    return ""


def _check_no_workload(source: Source) -> None:
    """Refuse a file that is a workload already."""
    if FORMAT not in source.text[:200]:
        return
    try:
        found = json.loads(source.text)
    except (ValueError, RecursionError):
        return
    if isinstance(found, dict) and found.get("format") == FORMAT:
        rule, fix = "this makes one", "Give it to simulate --workload as it is."
        raise ConfigError(printable(source.path), "this is a workload already", rule, fix)
