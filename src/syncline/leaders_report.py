"""Where the exchange of leaders was hidden in a run, and whether it was worth having them."""

from __future__ import annotations

from collections.abc import Sequence

from syncline.comm.busy import BusyTime
from syncline.config import Job
from syncline.engine.replica import Replica
from syncline.input import Input
from syncline.report.progress import Progress

_LEAST_EXPOSED = 0.02
"""Exposed exchanges in a smaller share of the step are not worth another strategy."""


class LeadersReport:
    """Adds up, on one rank, how long its leader exchanged with others.

    The first step does not count: it includes set-up.
    """

    def __init__(self, job: Job, replica: Replica, batches: Input) -> None:
        self._job, self._replica = job, replica
        self._busy: BusyTime | None = replica.leaders_busy
        self._before_s = 0.0
        self._behind_input_s = 0.0
        self._num_steps = 0
        if self._busy is not None:
            batches.on_wait = self._end_input

    def _end_input(self, started_s: float, ended_s: float) -> None:
        assert self._busy is not None
        self._behind_input_s += self._busy.between_s(started_s, ended_s)

    def end_step(self, *, is_first: bool) -> None:
        if self._busy is None:
            return
        if is_first:
            self._before_s, self._behind_input_s = self._busy.total_s, 0.0
            self._replica.leaders_exposed_s = 0.0
        else:
            self._num_steps += 1

    def figures(self) -> dict[str, float]:
        """Return seconds of a step; empty if no leader speaks for this rank."""
        if self._busy is None or not self._num_steps:
            return {}
        total_s = self._busy.total_s - self._before_s
        exposed_s, behind_s = self._replica.leaders_exposed_s, self._behind_input_s
        found = {
            "leaders_s": total_s,
            "leaders_behind_input_s": behind_s,
            "leaders_behind_compute_s": max(0.0, total_s - exposed_s - behind_s),
            "leaders_exposed_s": exposed_s,
        }
        return {name: seconds / self._num_steps for name, seconds in found.items()}

    def say(self, progress: Progress, step_s: float) -> None:
        """Note in words what the figures mean."""
        if figures := self.figures():
            for line in self._lines(figures, step_s):
                progress.note(line)

    def _lines(self, figures: dict[str, float], step_s: float) -> Sequence[str]:
        total, behind, compute, exposed = (1e3 * seconds for seconds in figures.values())
        lines = [
            f"leaders exchanged for {total:.1f} ms of a step: {behind:.1f} ms behind loading, "
            f"{compute:.1f} ms behind compute, {exposed:.1f} ms while compute waited"
        ]
        if self._job.data.prefetch:
            lines.append(
                "input is read ahead, so that there is no loading in line to hide the leaders' "
                "exchange behind: nothing is left of the idea of layered SGD"
            )
        if self._replica.comm.num_machines == 1:
            lines.append(
                'all ranks are on one machine: strategy.name = "synchronous" is faster, since no '
                "rank waits for a leader"
            )
        elif exposed > 1e3 * _LEAST_EXPOSED * step_s:
            lines.append(
                'compute waited for leaders: strategy.name = "synchronous" is likely faster, since '
                "there all ranks of a machine send"
            )
        return lines
