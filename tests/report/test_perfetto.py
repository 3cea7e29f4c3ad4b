"""Perfetto files, decoded with Perfetto's own classes: tracks, slices, arrows, counters."""

from __future__ import annotations

import gzip
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import pytest

from simulated import trace_of
from syncline.cli.report import report
from syncline.dataset import Case, load
from syncline.errors import ConfigError
from syncline.perf.critical_path import critical_path
from syncline.perf.graph import compile_trace, retime
from syncline.perf.trace import Part, Task, Trace
from syncline.report.perfetto import write_perfetto

protos = pytest.importorskip("perfetto.protos.perfetto.trace.perfetto_trace_pb2")

DATASET = next((Path(__file__).parents[2] / "datasets").glob("predictions-*.tar.gz"))
MEASURED = {
    "shared memory": Case("", "mlp", 2, "synchronous"),
    "gossip": Case("", "mlp", 4, "gossip"),
    "network": Case("1gbit", "even", 4, "synchronous"),
    "server over a network": Case("1gbit", "even", 4, "server"),
}
SIMULATED = ("synchronous", "layered", "server", "elastic", "gossip", "hybrid")


class Slice(NamedTuple):
    track: str
    start_ns: int
    end_ns: int
    name: str
    category: str
    depth: int
    facts: dict
    flows: tuple


class Decoded:
    """A file as its events say, checked for what holds for each file."""

    def __init__(self, path):
        data = path.read_bytes()
        found = protos.Trace()
        found.ParseFromString(gzip.decompress(data) if path.suffix == ".gz" else data)
        self.slices, self.counters = [], defaultdict(list)
        self._tracks, self._open, self._last = {}, defaultdict(list), {}
        self._names, self._of_sequence = defaultdict(dict), {}
        for packet in found.packet:
            self._read(packet)
        assert not any(self._open.values()), "a slice has no end"
        self.tracks = {self._title(uuid) for uuid in self._tracks}

    def _read(self, packet):
        sequence = packet.trusted_packet_sequence_id
        if packet.HasField("track_descriptor"):
            one = packet.track_descriptor
            assert one.uuid not in self._tracks
            assert not one.parent_uuid or one.parent_uuid in self._tracks
            if one.HasField("thread"):
                assert one.thread.pid == self._tracks[one.parent_uuid].process.pid
            self._tracks[one.uuid] = one
            if sequence:
                assert packet.sequence_flags == protos.TracePacket.SEQ_INCREMENTAL_STATE_CLEARED
                defaults = packet.trace_packet_defaults.track_event_defaults
                self._of_sequence[sequence] = defaults.track_uuid
                assert defaults.track_uuid == one.uuid
        if packet.HasField("track_event"):
            assert packet.sequence_flags == protos.TracePacket.SEQ_NEEDS_INCREMENTAL_STATE
            assert packet.timestamp >= self._last.get(sequence, 0)
            self._last[sequence] = packet.timestamp
            self._learn(sequence, packet.interned_data)
            self._event(sequence, packet.timestamp, packet.track_event)

    def _learn(self, sequence, data):
        for kind in ("event_names", "event_categories", "debug_annotation_names"):
            for one in getattr(data, kind):
                assert (kind, one.iid) not in self._names[sequence]
                self._names[sequence][kind, one.iid] = one.name

    def _event(self, sequence, at_ns, event):
        uuid, names = self._of_sequence[sequence], self._names[sequence]
        if event.type == protos.TrackEvent.TYPE_COUNTER:
            assert self._tracks[uuid].HasField("counter")
            self.counters[self._title(uuid)].append((at_ns, event.counter_value))
        elif event.type == protos.TrackEvent.TYPE_SLICE_BEGIN:
            facts = {
                names["debug_annotation_names", one.name_iid]: getattr(one, one.WhichOneof("value"))
                for one in event.debug_annotations
            }
            (category,) = event.category_iids
            name, category = (
                names["event_names", event.name_iid],
                names["event_categories", category],
            )
            self._open[uuid].append((at_ns, name, category, facts, tuple(event.flow_ids)))
        else:
            assert event.type == protos.TrackEvent.TYPE_SLICE_END
            start_ns, name, category, facts, flows = self._open[uuid].pop()
            place = self._title(uuid), start_ns, at_ns
            self.slices.append(Slice(*place, name, category, len(self._open[uuid]), facts, flows))

    def _title(self, uuid):
        one = self._tracks[uuid]
        if one.HasField("process"):
            return one.process.process_name
        name = one.thread.thread_name if one.HasField("thread") else one.name
        above = self._tracks.get(one.parent_uuid)
        return f"{above.process.process_name}/{name}" if above is not None else name


def check(trace, path):
    """Check that a file holds all of a trace; return what it holds."""
    found = Decoded(path)
    begin_s = min(task.start_s for task in trace.tasks)
    ranks = {task.rank for task in trace.tasks}
    assert {f"rank {rank}" for rank in ranks} <= found.tracks
    tasks = sorted(
        (task.rank, task.lane, task.step, task.bucket, round((task.start_s - begin_s) * 1e9))
        for task in trace.tasks
    )
    assert tasks == sorted(
        (rank_of(one), one.category, one.facts["step"], one.facts.get("bucket", -1), one.start_ns)
        for one in found.slices
        if one.category in ("compute", "comm")
    )
    lasted_ns = sum(one.end_ns - one.start_ns for one in found.slices if one.category == "comm")
    inside_ns = sum(one.end_ns - one.start_ns for one in found.slices if one.category == "part")
    assert inside_ns == lasted_ns > 0
    assert {one.depth for one in found.slices if one.category == "part"} == {1}
    for rank, sent in enumerate(trace.header.sent_bytes):
        counted = found.counters[f"rank {rank}/bytes sent"]
        assert (counted[-1][1] if counted else 0) == sent
        under_way = [value for _, value in found.counters[f"rank {rank}/exchanges under way"]]
        assert not under_way or min(under_way) == under_way[-1] == 0
    path = critical_path(retime(compile_trace(trace)))
    on_path_ns = sum(one.end_ns - one.start_ns for one in found.slices if one.category == "path")
    assert on_path_ns == pytest.approx(path.length_s * 1e9, abs=len(path.pieces))
    return found


def arrows_of(found):
    """Return arrows as (cause, effect), and check that each has both, in time."""
    ends = defaultdict(list)
    for one in found.slices:
        for flow in one.flows:
            ends[flow].append(one)
    assert {len(pair) for pair in ends.values()} <= {2}
    pairs = [tuple(sorted(pair, key=lambda one: one.start_ns)) for pair in ends.values()]
    assert all(cause.start_ns < effect.start_ns for cause, effect in pairs)
    return pairs


def rank_of(one):
    return int(one.track.split("/")[0].removeprefix("rank "))


def is_any_shared(trace):
    """Say whether any exchange was recorded on two ranks."""
    ranks = defaultdict(set)
    for task in trace.tasks:
        for part in task.parts:
            ranks[part.exchange].add(task.rank)
    ranks.pop("", None)
    return any(len(found) > 1 for found in ranks.values())


@pytest.mark.parametrize("strategy", SIMULATED)
def test_a_simulated_run_is_all_there(strategy, tmp_path):
    trace = trace_of(tmp_path, strategy, "cluster.slow_ranks.1=1.5", steps=3)
    write_perfetto(trace, tmp_path / "out.pftrace")
    found = check(trace, tmp_path / "out.pftrace")
    assert any(rank_of(cause) != rank_of(effect) for cause, effect in arrows_of(found))
    assert found.counters["compute lanes that wait"]


@pytest.mark.parametrize("case", MEASURED)
def test_a_measured_run_is_all_there(case, tmp_path):
    trace = load(DATASET).trace(MEASURED[case])
    write_perfetto(trace, tmp_path / "out.pftrace.gz")
    found = check(trace, tmp_path / "out.pftrace.gz")
    is_between = any(rank_of(cause) != rank_of(effect) for cause, effect in arrows_of(found))
    assert is_between == is_any_shared(trace)  # gossip in shared memory reads without asking
    is_served = any(task.kind == "serve" for task in trace.tasks)
    assert is_served == any(track.endswith("/serving calls") for track in found.tracks)
    if case == "network":  # exchanges on several channels are under way at once
        assert {"rank 0/comm", "rank 0/comm 2"} <= found.tracks
        assert max(value for _, value in found.counters["rank 0/exchanges under way"]) > 1


def titles(pairs):
    return sorted(tuple(f"{one.track} {one.name} {one.start_ns}" for one in pair) for pair in pairs)


def hand_made():
    """Three ranks: rank 1 comes last to a collective, rank 2 before it; then 1 calls 0."""
    met, call = "0-2.0:0", "calls box:1>0:0"
    return Trace(
        (
            Task(0, 0, "compute", "backward", 0, 0, 1.0, 2.0),
            Task(0, 1, "comm", "reduce", 0, 0, 2.0, 5.0, ((0, 0),), (
                Part("wait", 4.0, 0, met), Part("wire", 5.0, 8, met),
            )),
            Task(0, 2, "comm", "serve", -1, 0, 6.0, 7.0, (), (
                Part("work", 7.0), Part("answer", 7.0, 0, call, (1,)),
            )),
            Task(1, 0, "compute", "backward", 0, 0, 1.0, 4.0),
            Task(1, 1, "comm", "reduce", 0, 0, 4.0, 5.0, ((1, 0),), (Part("wire", 5.0, 8, met),)),
            Task(1, 2, "comm", "gather", 0, 0, 5.0, 9.0, ((1, 1),), (
                Part("send", 5.5, 4, call), Part("wait", 7.0, 0, call), Part("wire", 9.0, 0, call),
            )),
            Task(1, 3, "compute", "forward", 0, 1, 9.0, 10.0, ((1, 0), (1, 2))),
            Task(2, 0, "compute", "backward", 0, 0, 1.0, 3.0),
            Task(2, 1, "comm", "reduce", 0, 0, 3.0, 5.0, ((2, 0),), (
                Part("wait", 4.0, 0, met), Part("wire", 5.0, 8, met),
            )),
        )
    )  # fmt: skip


def test_arrows_go_from_what_came_last_and_from_calls_to_their_service(tmp_path):
    write_perfetto(hand_made(), tmp_path / "out.pftrace")
    found = Decoded(tmp_path / "out.pftrace")
    s = 1_000_000_000
    assert titles(arrows_of(found)) == sorted(
        [
            ("rank 0/compute backward 0 0", f"rank 0/comm reduce 0 {s}"),
            ("rank 1/compute backward 0 0", f"rank 1/comm reduce 0 {3 * s}"),
            ("rank 1/compute backward 0 0", f"rank 0/comm wire {3 * s}"),  # it came last
            ("rank 1/compute backward 0 0", f"rank 2/comm wire {3 * s}"),
            (f"rank 2/comm reduce 0 {2 * s}", f"rank 1/comm wire {3 * s}"),
            ("rank 2/compute backward 0 0", f"rank 2/comm reduce 0 {2 * s}"),
            (f"rank 1/comm gather 0 {4 * s}", f"rank 0/serving calls serve {5 * s}"),
            (f"rank 0/serving calls serve {5 * s}", f"rank 1/comm wire {6 * s}"),
            (f"rank 1/comm gather 0 {4 * s}", f"rank 1/compute forward 0 {8 * s}"),
        ]
    )
    assert found.counters["rank 1/bytes sent"] == [(4 * s, 8), (9 * s // 2, 12)]
    assert found.counters["rank 0/exchanges under way"] == [(s, 1), (4 * s, 0)]


def test_what_overlaps_has_a_thread_of_its_own(tmp_path):
    wire = (Part("wire", 2.0, 0, "0.1:0"),), (Part("wire", 3.0, 0, "0.2:0"),)
    trace = Trace(
        (
            Task(0, 0, "comm", "reduce", 1, 0, 0.0, 2.0, (), wire[0]),
            Task(0, 1, "comm", "reduce", 0, 0, 1.0, 3.0, (), wire[1]),
            Task(0, 2, "comm", "gather", 0, 0, 2.0, 2.0),
            Task(0, 3, "compute", "wait", -1, 0, 0.0, 3.0),
        )
    )
    write_perfetto(trace, tmp_path / "out.pftrace")
    found = Decoded(tmp_path / "out.pftrace")
    assert [(one.track, one.name) for one in found.slices if one.category == "comm"] == [
        ("rank 0/comm", "reduce 1"),
        ("rank 0/comm", "gather 0"),
        ("rank 0/comm 2", "reduce 0"),
    ]


def test_the_command_writes_it_and_equal_traces_give_equal_bytes(tmp_path, capsys):
    hand_made().write(tmp_path / "run.trace")
    for name in ("a.pftrace.gz", "b.pftrace.gz"):
        report([tmp_path], tmp_path / "report.html", tmp_path / name, debug=False)
        assert capsys.readouterr().out.endswith(f"perfetto: {tmp_path / name}\n")
    assert (tmp_path / "a.pftrace.gz").read_bytes() == (tmp_path / "b.pftrace.gz").read_bytes()
    with pytest.raises(ConfigError, match="--perfetto: there is no folder"):
        report([tmp_path], tmp_path / "report.html", tmp_path / "no" / "file", debug=False)
    with pytest.raises(ConfigError, match="--perfetto: got it with 2 runs"):
        report([tmp_path] * 2, tmp_path / "report.html", tmp_path / "a.pftrace", debug=False)


def test_perfetto_without_a_trace_is_refused_before_anything_is_written(tmp_path):
    (tmp_path / "summary.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"--perfetto: .* holds no trace, but tasks come from"):
        report([tmp_path], tmp_path / "report.html", tmp_path / "a.pftrace", debug=False)
    assert not (tmp_path / "report.html").exists()
