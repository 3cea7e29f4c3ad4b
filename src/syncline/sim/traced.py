"""The trace of a virtual run, put together from all ranks' tasks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec

from syncline.engine.traced import header_of
from syncline.perf.meetings import of_steps
from syncline.perf.trace import Trace
from syncline.run_folder import finite
from syncline.sim.rank import VirtualRank


def trace_of(ranks: Sequence[VirtualRank], shards: int, samples: int) -> Trace:
    """Return the tasks of all ranks; `samples` are those of a shard."""
    first = ranks[0]
    header = header_of(first.strategy, first.comm, first.buckets, shards)
    tasks = [rank.recorder.tasks for rank in ranks if rank.recorder is not None]
    return Trace(
        tuple(of_steps(itertools.chain.from_iterable(tasks))),
        msgspec.structs.replace(
            header,
            clock="virtual",
            samples=samples,
            steps=first.setting.steps,
            sent_bytes=tuple(rank.comm.traffic.step_bytes for rank in ranks),
            cluster=finite(first.world.cluster.to_dict()),
        ),
    )
