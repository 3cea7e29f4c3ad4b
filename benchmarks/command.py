"""What the benchmarks' command lines share: lists of words, facts of the machine, clean endings."""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.versions import VersionError, git
from syncline.launch.signals import end_cleanly as end_cleanly  # for every benchmark's main


def names(known: Iterable[str]) -> Callable[[str], list[str]]:
    """Return a reader of comma-separated words, each of them one of `known`."""
    choices = list(known)

    def read(text: str) -> list[str]:
        words = text.split(",")
        for word in words:
            if word not in choices:
                rule = f"got {word!r}, choose from {', '.join(choices)}"
                raise argparse.ArgumentTypeError(rule)
        return words

    return read


def numbers(text: str) -> list[int]:
    """Read comma-separated whole numbers of at least 1."""
    try:
        read = [int(word) for word in text.split(",")]
    except ValueError:
        read = []
    if not read or min(read) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, write for example 2,4")
    return read


def add_against(parser: argparse.ArgumentParser) -> None:
    """Add the option that names another commit."""
    parser.add_argument(
        "--against", metavar="REV", help="another commit, such as HEAD~1 or cd93754 (0.1.0)"
    )


def add_busy(parser: argparse.ArgumentParser) -> None:
    """Add the option that asks for other work on the machine."""
    parser.add_argument(
        "--busy", type=int, default=0, metavar="N", help="N processes that spin beside the ranks"
    )


def available_bytes() -> int:
    """Read how much memory can be used without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("the kernel does not report MemAvailable")


def machine_facts() -> dict[str, Any]:
    """Say where and with what the figures were made."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(": ", 1)[1] for line in lines if line.startswith("model name")), "?")
    try:
        commit, changes = git("rev-parse", "HEAD"), git("status", "--porcelain")
    except VersionError:  # a copy of the sources without their history
        commit, changes = None, ""
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "available_bytes": available_bytes(),
        "load_before": os.getloadavg()[0],
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "commit": commit,
        "has_changes": bool(changes),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
