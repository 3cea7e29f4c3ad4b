"""The figures of a run that come from all ranks: samples a second, bytes, memory."""

from __future__ import annotations

import statistics
from typing import Any

import msgspec

from syncline.engine.replica import Replica
from syncline.perf import memory
from syncline.perf.pace import Pace
from syncline.recipe import Order
from syncline.run_ranks import RunRanks
from syncline.session import Session


class RankFigures(msgspec.Struct, frozen=True):
    """What one rank tells the others at the end of a run."""

    samples_per_s: float
    """Of this rank's own steps."""
    sent_bytes: float
    """In a step."""
    peak_memory_bytes: float
    memory_share_bytes: float


class RunFigures:
    """The figures of all ranks that are there at the end. Every rank makes it."""

    def __init__(
        self, replica: Replica, session: Session, pace: Pace, order: Order, start: int
    ) -> None:
        """`start` is how many steps were taken before this session."""
        self._pace, self._start = pace, start
        self._samples = order.batch / order.shards
        mine = RankFigures(
            pace.own_samples_per_s(self._samples * len(replica.my_shards)),
            session.comm.traffic.step_bytes / max(1, order.total - start),
            memory.peak_bytes(),
            memory.share_bytes(),
        )
        told = replica.run.tell_figures(msgspec.structs.astuple(mine), session.comm)
        self._told = [RankFigures(*one) for one in told]

    def together(self, ranks: RunRanks) -> dict[str, Any]:
        """Return the figures for the run's summary.

        Each rank's samples count over the time of its own steps, whichever rank is slow; those of
        a rank that was lost, over the time of this rank's steps.
        """
        since_s = self._pace.since_first_s
        lost = self._samples * ranks.lost_shards(self._start)
        peaks = [one.peak_memory_bytes for one in self._told]
        return {
            "samples_per_s": sum(one.samples_per_s for one in self._told)
            + (lost / since_s if since_s else 0.0),
            "sent_bytes": statistics.fmean(one.sent_bytes for one in self._told),
            "peak_memory_bytes": int(max(peaks)),
            "mean_peak_memory_bytes": statistics.fmean(peaks),
            "memory_share_bytes": statistics.fmean(one.memory_share_bytes for one in self._told),
        }
