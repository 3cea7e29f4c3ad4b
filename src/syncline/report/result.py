"""Prints the result of a run: a short table, and the path of the run folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

# The entries that are printed, in this order; all entries are in summary.json.
_SHOWN: dict[str, tuple[str, Callable[[Any], str]]] = {
    "steps": ("steps", lambda value: f"{value:,}"),
    "loss": ("loss", lambda value: f"{value:.4f}"),
    "accuracy": ("accuracy", lambda value: f"{value:.2%}"),
    "samples_per_s": ("samples/s", lambda value: f"{value:,.0f}"),
    "exposed_communication": ("exposed communication", lambda value: f"{value:.1%}"),
    "exposed_input": ("waiting for input", lambda value: f"{value:.1%}"),
    "peak_memory_bytes": ("peak memory, largest rank", lambda value: f"{value / 1e6:,.0f} MB"),
    "mean_peak_memory_bytes": ("peak memory, mean", lambda value: f"{value / 1e6:,.0f} MB"),
    "weights_sha256": ("weights (SHA-256)", str),
}


def print_result(summary: Mapping[str, Any], folder: Path, console: Console) -> None:
    """Print the most important figures of a summary, and the run folder."""
    rows = {
        label: written(summary[key])
        for key, (label, written) in _SHOWN.items()
        if summary.get(key) is not None
    }
    rows["run folder"] = str(folder)
    width = max(map(len, rows))
    for label, value in rows.items():
        # Not a rich table: in a narrow window that would cut the hash and the path.
        console.print(Text.assemble((f"{label:<{width}}  ", "bold"), value), soft_wrap=True)
