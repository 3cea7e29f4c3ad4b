"""What a logger is: a class with three methods, which a thread of its own calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

Line = tuple[int, Mapping[str, float]]
"""A step, and its values by name."""


@dataclass(frozen=True)
class Opening:
    """What a logger is opened with."""

    where: str
    """What the target says after its name; empty if nothing."""
    folder: Path | None = None
    """The run folder, if there is one."""
    title: str | None = None
    config: Mapping[str, object] = field(default_factory=dict)
    """The run's settings by dotted name."""
    first_step: int = 0
    """Lines of this step and later ones, of an earlier try of the same run, do not count."""
    identity: str | None = None
    """What the logger called this run when it was opened before."""


class Logger(Protocol):
    """Somewhere that numbers of a run are written. Its methods may raise and may be slow."""

    identity: str | None
    """The run's name at the logger, if the run can be opened again by it."""

    def __init__(self, opening: Opening) -> None: ...

    def write(self, lines: Sequence[Line]) -> None:
        """Write lines, and make sure that they are safe if this process is killed."""

    def close(self, *, failed: bool) -> None:
        """Finish; `failed` says that the run did."""
