"""A trace as a native Perfetto trace, for ui.perfetto.dev and for SQL.

A process is a rank, a thread one of its lanes. Where tasks of the comm lane are under way at the
same time, each has a thread of its own: slices of a thread nest. The compute lane's slices are
steps, with tasks inside; those of the comm lane are tasks, with their parts inside. Counters say
what a rank has sent, and how many exchanges it takes part in. Arrows are in `perfetto_flows.py`.
The critical path has a track of its own.
"""

from __future__ import annotations

import contextlib
import gzip
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

from syncline.files import explained, replacing
from syncline.perf.critical_path import CriticalPath, critical_path
from syncline.perf.graph import compile_trace, retime
from syncline.perf.trace import Trace
from syncline.report import perfetto_packets as packets
from syncline.report.perfetto_flows import WHOLE, Flows, Slices

_PATH, _WAITING, _FIRST_RANK = 1, 2, 3
_TRACKS_OF_A_RANK = 1 << 20
_BUFFER_BYTES = 1 << 20

Change = tuple[int, int]
"""A moment in nanoseconds, and by how much a counter changes."""


def write_perfetto(trace: Trace, path: str | Path, critical: CriticalPath | None = None) -> None:
    """Write a trace as a Perfetto trace, whole or not at all; compressed if its name ends in .gz.

    `critical` is its critical path, if that is known already. Time begins with the first task.
    Equal traces give equal bytes.
    """
    path = Path(path)
    if critical is None:
        critical = critical_path(retime(compile_trace(trace)))
    with explained(path), replacing(path) as partial, _opened(partial, path.suffix) as file:
        _Writer(trace, file).write(critical)


@contextlib.contextmanager
def _opened(path: Path, suffix: str) -> Iterator[IO[bytes]]:
    with path.open("wb", buffering=_BUFFER_BYTES) as file:
        if suffix != ".gz":
            yield file
            return
        with gzip.GzipFile("", "wb", 6, file, mtime=0) as packed:
            yield packed  # type: ignore[misc]


class _Writer:
    """Writes one trace to an open file."""

    def __init__(self, trace: Trace, file: IO[bytes]) -> None:
        self._tasks, self._header, self._file = trace.tasks, trace.header, file
        self._slices = Slices(trace.tasks)
        self._flows = Flows(self._slices)
        self._numbers = itertools.count(1)
        self._tids = itertools.count(_FIRST_RANK + max((t.rank for t in trace.tasks), default=0))
        self._machines = {
            rank: number for number, ranks in enumerate(trace.header.machines) for rank in ranks
        }

    def write(self, critical: CriticalPath) -> None:
        self._write_path(critical)
        waits = [at for at, task in enumerate(self._tasks) if _waits(task.lane, task.kind)]
        self._write_counter(_WAITING, 0, "compute lanes that wait", self._spans(waits))
        by_rank: defaultdict[int, list[int]] = defaultdict(list)
        for at, task in enumerate(self._tasks):
            by_rank[task.rank].append(at)
        for rank, places in by_rank.items():
            self._write_rank(rank, places)

    def _track(self, uuid: int, descriptor: bytes) -> packets.Track:
        return packets.Track(self._file, descriptor, uuid, next(self._numbers))

    def _write_path(self, critical: CriticalPath) -> None:
        track = self._track(_PATH, packets.track(_PATH, "critical path"))
        for piece in critical.pieces:
            start, end = self._slices.ns(piece.start_s), self._slices.ns(piece.end_s)
            if start == end:
                continue
            who = f"rank {piece.rank}: " if piece.rank >= 0 else ""
            name = f"{who}{piece.kind}"
            where = {"step": piece.step, "bucket": piece.bucket, "rank": piece.rank}
            track.begin(start, name, "path", (), **where, task=piece.task)
            track.end(end)

    def _write_rank(self, rank: int, places: list[int]) -> None:
        pid = rank + 1  # 0 is the system's idle process
        uuid = (rank + _FIRST_RANK) * _TRACKS_OF_A_RANK
        label = f"machine {self._machines[rank]}" if rank in self._machines else ""
        packets.write_descriptor(self._file, packets.process(uuid, pid, f"rank {rank}", label))
        lanes = self._lanes_of(places)
        for number, (name, lane) in enumerate(lanes, 1):
            descriptor = packets.thread(uuid + number, uuid, pid, next(self._tids), name)
            track = self._track(uuid + number, descriptor)
            if name == "compute":
                self._write_compute(track, lane)
            else:
                self._write_comm(track, lane)
        self._write_counters(uuid, len(lanes), places)

    def _lanes_of(self, places: list[int]) -> list[tuple[str, list[int]]]:
        """Return a rank's threads: compute, comm, more for what overlaps, and calls it served."""
        starts = self._slices.starts
        kinds: dict[str, list[int]] = {"compute": [], "comm": [], "serving calls": []}
        for at in sorted(places, key=lambda at: (starts[at], self._slices.ends[at])):
            task = self._tasks[at]
            is_served = task.kind == "serve"
            kinds[
                "compute" if task.lane == "compute" else "serving calls" if is_served else "comm"
            ].append(at)
        return [
            (name if not level else f"{name} {level + 1}", lane)
            for name, found in kinds.items()
            for level, lane in enumerate(self._apart(found))
        ]

    def _apart(self, places: list[int]) -> list[list[int]]:
        """Divide tasks, sorted by their start, into lanes in which none overlap."""
        lanes: list[list[int]] = []
        for at in places:
            start = self._slices.starts[at]
            lane = next((one for one in lanes if self._slices.ends[one[-1]] <= start), None)
            if lane is None:
                lanes.append(lane := [])
            lane.append(at)
        return lanes

    def _write_compute(self, track: packets.Track, lane: list[int]) -> None:
        for step, group in itertools.groupby(lane, key=lambda at: self._tasks[at].step):
            places = list(group)
            track.begin(self._slices.starts[places[0]], f"step {step}", "step")
            for at in places:
                self._begin(track, at)
                track.end(self._slices.ends[at])
            track.end(self._slices.ends[places[-1]])

    def _write_comm(self, track: packets.Track, lane: list[int]) -> None:
        for at in lane:
            self._begin(track, at)
            for number, part, start, end in self._slices.parts(at):
                if start == end:
                    continue
                facts: dict[str, int | str] = {"bytes": part.num_bytes} if part.num_bytes else {}
                if part.exchange:
                    facts["exchange"] = part.exchange
                track.begin(start, part.kind, "part", self._flows.of.get((at, number), ()), **facts)
                track.end(end)
            track.end(self._slices.ends[at])

    def _begin(self, track: packets.Track, at: int) -> None:
        task = self._tasks[at]
        name = task.kind if task.bucket < 0 else f"{task.kind} {task.bucket}"
        flows = self._flows.of.get((at, WHOLE), ())
        facts = (
            {"step": task.step} if task.bucket < 0 else {"step": task.step, "bucket": task.bucket}
        )
        track.begin(self._slices.starts[at], name, task.lane, flows, **facts)

    def _spans(self, places: Iterable[int]) -> Iterator[Change]:
        for at in places:
            yield self._slices.starts[at], 1
            yield self._slices.ends[at], -1

    def _write_counters(self, uuid: int, number: int, places: list[int]) -> None:
        """Write what a rank has sent, and how many exchanges it takes part in."""
        sent: list[Change] = []
        spans: dict[str, tuple[int, int]] = {}
        for at in places:
            for _, part, start, end in self._slices.parts(at):
                if part.num_bytes:
                    sent.append((end, part.num_bytes))
                if part.exchange:
                    known = spans.get(part.exchange, (start, end))
                    spans[part.exchange] = min(known[0], start), max(known[1], end)
        changes = [one for start, end in spans.values() for one in ((start, 1), (end, -1))]
        self._write_counter(uuid + number + 1, uuid, "exchanges under way", changes)
        self._write_counter(uuid + number + 2, uuid, "bytes sent", sent, is_bytes=True)

    def _write_counter(
        self,
        uuid: int,
        parent: int,
        name: str,
        changes: Iterable[Change],
        *,
        is_bytes: bool = False,
    ) -> None:
        changes = sorted(changes)
        if not changes:
            return
        track = self._track(uuid, packets.counter(uuid, parent, name, is_bytes=is_bytes))
        value = 0
        for at_ns, group in itertools.groupby(changes, key=lambda one: one[0]):
            change = sum(by for _, by in group)
            if change:
                value += change
                track.count(at_ns, value)


def _waits(lane: str, kind: str) -> bool:
    return lane == "compute" and kind == "wait"
