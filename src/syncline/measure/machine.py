"""Facts about this machine, for files of what was measured on it."""

from __future__ import annotations

import os
import platform

import torch

Facts = dict[str, str | int | float | bool]


def machine_facts(threads: int, ranks: int = 1) -> Facts:
    """Return the processor, its cores, and the versions that times depend on.

    `threads` are those of a rank, `ranks` how many of them computed at the same time.
    """
    return {
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "threads": threads,
        "ranks": ranks,
        "system": f"{platform.system()} {platform.release()}",
        "torch": str(torch.__version__),
    }


def processor() -> str:
    """Return the name of this machine's processor."""
    try:
        with open("/proc/cpuinfo") as file:
            lines = dict(line.split(":", 1) for line in file if ":" in line)
    except OSError:
        return platform.processor() or platform.machine()
    names = {key.strip(): value.strip() for key, value in lines.items()}
    return names.get("model name") or platform.machine()
