"""What holds for every trace, of either clock: shared by tests."""

from __future__ import annotations

import itertools
from collections import defaultdict

KINDS = {
    "work",
    "wait",
    "latency",
    "messages",
    "inside",
    "wire",
    "sum",
    "copy",
    "update",
    "lane",
    "send",
    "serve",
    "answer",
}


def check_trace(trace):
    """Check that a trace is a graph in time, within the error that it states for its clock."""
    error_s = trace.header.clocks.error_s + 1e-9
    ends = {(task.rank, task.number): task.end_s for task in trace.tasks}
    for task in trace.tasks:
        for before in task.after:
            assert task.start_s >= ends[before] - error_s, (task, before)
        _check_parts(task)
    _check_lanes(trace.tasks, error_s)
    _check_exchanges(trace, error_s)
    sent = [0] * len(trace.header.sent_bytes)
    for task in trace.tasks:
        sent[task.rank] += sum(part.num_bytes for part in task.parts)
    assert tuple(sent) == trace.header.sent_bytes


def _check_parts(task):
    """Parts of a task of the comm lane follow one another from its start to its end."""
    if task.lane == "comm":
        assert {part.kind for part in task.parts} <= KINDS
        assert all(part.end_s >= start_s for part, start_s in task.spans())
        assert task.parts[-1].end_s == task.end_s if task.parts else task.start_s == task.end_s


def _check_lanes(tasks, error_s):
    """The compute lane does one thing at a time; so does each channel, which `after` says."""
    by_rank = defaultdict(list)
    for task in tasks:
        if task.lane == "compute":
            by_rank[task.rank].append(task)
    for lane in by_rank.values():
        for sooner, later in itertools.pairwise(lane):
            assert sooner.end_s <= later.start_s + error_s
            assert (sooner.rank, sooner.number) in later.after


def _check_exchanges(trace, error_s):
    """Nobody leaves a collective before all have come; a call is served while it is under way."""
    spans = defaultdict(lambda: defaultdict(list))
    for task in trace.tasks:
        for part, start_s in task.spans():
            if part.exchange and (part.kind != "wait" or ">" not in part.exchange):
                spans[part.exchange][task.rank].append((task, part, start_s))
    for exchange, by_rank in spans.items():
        if ">" in exchange:
            caller, owner = (int(rank) for rank in exchange.split(":")[1].split(">"))
            assert caller in by_rank, exchange  # nothing is served that nobody asked for
            if owner not in by_rank or owner == caller:
                continue  # not served before the run ended; on one machine a get needs no serving
            served = by_rank[owner][-1][0]
            assert served.kind == "serve"
            sent_s = [start_s for _, part, start_s in by_rank[caller] if part.kind == "send"]
            assert all(start_s <= served.start_s + error_s for start_s in sent_s)
            ends_s = [part.end_s for _, part, _ in by_rank[caller] if part.kind != "send"]
            assert not ends_s or max(ends_s) >= served.end_s - error_s
        else:
            came_s = {rank: min(found[2] for found in of) for rank, of in by_rank.items()}
            for of in by_rank.values():
                peers = of[-1][1].peers or came_s
                if of[-1][1].kind != "send":
                    left_s = max(found[1].end_s for found in of)
                    assert left_s >= max(came_s[peer] for peer in peers) - error_s


def served_calls(trace):
    """Return the ids of calls that both the caller and the owner have recorded."""
    asked = {part.exchange for t in trace.tasks if t.kind != "serve" for part in t.parts}
    served = {part.exchange for t in trace.tasks if t.kind == "serve" for part in t.parts}
    return asked & served - {""}


def members(trace):
    """Return the ranks that took part in each collective, by its id."""
    found = defaultdict(set)
    for task in trace.tasks:
        for part in task.parts:
            if part.exchange and ">" not in part.exchange:
                found[part.exchange].add(task.rank)
    return found
