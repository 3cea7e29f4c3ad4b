"""The file of a cell: what one run found. A run that has ended is never run again.

Files hold no time of day and, but for `wall_s`, nothing that differs from one run to the next of
the same cell on the virtual clock.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec

from syncline.compare.grid import Cell
from syncline.config import job_to_toml, printable
from syncline.config.words import brief
from syncline.errors import ConfigError
from syncline.files import explained, write_atomically
from syncline.run_folder import finite

FORMAT, VERSION = "syncline-compare-cell", 1


class Point(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What had been done and sent when the run was evaluated."""

    step: int
    samples: int
    time_s: float
    sent_bytes: int | None
    loss: float | None
    test_loss: float | None
    accuracy: float | None


class Found(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a run found; or why it failed, and then nothing else."""

    points: tuple[Point, ...] = ()
    figures: dict[str, float | None] = {}
    """Of the whole run: step_s, samples_per_s, exposed_communication, and the strategy's own."""
    rank_samples: tuple[int, ...] = ()
    """How many samples each rank computed on, ranks that only serve included."""
    weights_sha256: str | None = None
    failed: str | None = None
    """Why the run ended before its time, in one line."""
    wall_s: float = 0.0


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    format: str
    version: int
    id: str
    job: str
    ranks: int
    cluster: dict[str, Any] | None
    found: Found


def path_of(folder: Path, cell: Cell) -> Path:
    return folder / "cells" / f"{cell.id}.json"


def write_cell(folder: Path, cell: Cell, found: Found) -> None:
    """Write a cell's file, whole or not at all."""
    file = _File(
        format=FORMAT,
        version=VERSION,
        id=cell.id,
        job=job_to_toml(cell.job),
        ranks=cell.cluster.ranks,
        cluster=cell.cluster.to_dict() if cell.clock == "virtual" else None,
        found=found,
    )
    data = msgspec.json.format(msgspec.json.encode(finite(msgspec.to_builtins(file))), indent=1)
    path = path_of(folder, cell)
    with explained(path):
        write_atomically(path, data + b"\n")


def read_cell(folder: Path, cell: Cell) -> Found | None:
    """Read a cell's file; None if the run has not ended yet."""
    path = path_of(folder, cell)
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _damaged(path, f"cannot be read ({brief(error.strerror)})") from None
    try:
        file = msgspec.json.decode(data, type=_File)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _damaged(path, brief(error)) from None
    if (file.format, file.version, file.id) != (FORMAT, VERSION, cell.id):
        raise _damaged(path, f"got format {brief(file.format)} of run {brief(file.id)}")
    if not (file.found.points or file.found.failed):
        raise _damaged(path, "it has no points")
    return file.found


def _damaged(path: Path, found: str) -> ConfigError:
    return ConfigError(
        printable(path),
        found,
        "this is the file of a run that has ended, as syncline compare wrote it",
        "Delete the file: the run is then run again.",
    )


def known(value: float | None) -> float | None:
    """Return a number; None for what is not finite."""
    return value if value is not None and math.isfinite(value) else None
