"""How the ranks of a launcher ended: statuses, the launcher's own status, and words for both."""

from __future__ import annotations

import signal
from dataclasses import dataclass


@dataclass(frozen=True)
class Outcome:
    """The ranks' exit statuses, negative for a signal; the signal that stopped the launcher."""

    statuses: tuple[int, ...]
    stopped_by: signal.Signals | None = None
    goes_on: bool = False
    """Whether the run succeeds if only one rank ends well."""

    @property
    def exit_code(self) -> int:
        """0 for success, 130 after Ctrl-C, 2 if a rank refused its input, 1 otherwise."""
        if self.stopped_by is not None:
            return 128 + self.stopped_by
        if not any(self.statuses) or (self.goes_on and 0 in self.statuses):
            return 0
        return 2 if 2 in self.statuses else 1


def describe_end(rank: int, status: int) -> str:
    """Say how a rank ended, in words."""
    return f"rank {rank} {describe_status(status)}"


def describe_status(status: int) -> str:
    """Say how a process ended, in words that follow its name."""
    if status < 0:
        return f"was killed by {_signal_name(-status)} (exit status {status})"
    return f"ended with status {status}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
