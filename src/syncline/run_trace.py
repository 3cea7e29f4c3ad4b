"""The trace of a real run, put together from all ranks' tasks."""

from __future__ import annotations

from syncline.comm.base import exchange_bytes
from syncline.engine.replica import Replica
from syncline.perf.trace import Trace
from syncline.session import Session


def collect_trace(
    replica: Replica, zero_s: float, session: Session, *, is_alone: bool = False
) -> Trace:
    """Stop recording; return all ranks' tasks, each rank's times counted from its `zero_s`.

    Every rank calls it.
    With `is_alone`, where ranks are lost, the trace holds the tasks of this rank alone.
    """
    recorder, replica.recorder = replica.recorder, None
    assert recorder is not None
    mine = Trace(tuple(task.earlier_by(zero_s) for task in recorder.tasks))
    if is_alone:
        return mine
    everybody = session.lane.call(exchange_bytes, session.comm, mine.to_bytes())
    ranks = [Trace.from_bytes(each) for each in everybody]
    return Trace(tuple(task for rank in ranks for task in rank.tasks))
