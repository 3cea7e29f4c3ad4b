"""Which of a launcher's ranks still run? A frozen process uses no processor time and never wakes.

A rank that works uses processor time. A rank that waits still has a thread that sends a heartbeat
every second. Only a rank that is stopped, or stuck before it has joined its job, does neither.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path


class Activity:
    """When each rank was last seen to run."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[int, float]] = {}

    def idle_s(self, ranks: Mapping[int, int]) -> float:
        """Return for how many seconds none of the ranks (rank -> pid) has run."""
        now = time.monotonic()
        for rank, pid in ranks.items():
            turns = num_turns(pid)
            if rank not in self._seen or self._seen[rank][0] != turns:
                self._seen[rank] = turns, now
        return min((now - self._seen[rank][1] for rank in ranks), default=0.0)


def num_turns(pid: int) -> int:
    """Return a number that grows whenever a thread of the process runs; -1 if it is gone.

    It adds up the threads' switches and their processor time in ticks: a thread that never yields
    is switched seldom, and one that only wakes up uses less than a tick.
    """
    total = 0
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            folder = Path(f"/proc/{pid}/task/{thread}")
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            total += int(fields[11]) + int(fields[12])
            for line in (folder / "status").read_text().splitlines():
                if "ctxt_switches" in line:
                    total += int(line.split()[-1])
    except (OSError, ValueError, IndexError):
        return -1
    return total
