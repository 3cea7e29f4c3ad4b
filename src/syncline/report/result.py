"""The result of a run, readable: a short table and where the run folder is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

# What a summary is read for, in this order; further entries are in summary.json.
_SHOWN: dict[str, tuple[str, Callable[[Any], str]]] = {
    "steps": ("steps", lambda value: f"{value:,}"),
    "loss": ("loss", lambda value: f"{value:.4f}"),
    "accuracy": ("accuracy", lambda value: f"{value:.2%}"),
    "samples_per_s": ("samples/s", lambda value: f"{value:,.0f}"),
    "exposed_communication": ("exposed communication", lambda value: f"{value:.1%}"),
    "weights_sha256": ("weights (SHA-256)", str),
}


def print_result(summary: Mapping[str, Any], folder: Path, console: Console) -> None:
    """Print the figures of a summary that people look for, and the run folder."""
    table = Table(show_header=False, box=None, pad_edge=False)
    for key, (label, written) in _SHOWN.items():
        if summary.get(key) is not None:
            table.add_row(Text(label, style="bold"), Text(written(summary[key])))
    console.print(table)
    # No wrapping: the path is there to be copied.
    console.print(Text(f"run folder: {folder}"), soft_wrap=True)
