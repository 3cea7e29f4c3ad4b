"""All numbers of an explained run as plain data, in SI units, by keys that stay.

`syncline explain --json` prints them, and the report shows them: docs/explain.md lists the keys.
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from syncline.perf import spread
from syncline.perf.breakdown import BucketTimes, ExchangeTimes
from syncline.perf.critical_path import Piece
from syncline.perf.explain import Explanation
from syncline.perf.graph import retime
from syncline.perf.trace import BucketFacts, Header


def to_json_dict(found: Explanation) -> dict[str, Any]:
    """Return all numbers as plain data."""
    graph, breakdown, path = found.graph, found.breakdown, found.path
    header, timing = graph.header, retime(graph)
    return {
        "strategy": header.strategy,
        "clock": header.clock,
        "model": _model(header.job),
        "parameters": sum(len(one.parameters) for one in header.buckets),
        "ranks": sum(map(len, header.machines)),
        "machines": len(header.machines),
        "steps": header.steps,
        "tasks": graph.num_tasks,
        "samples": breakdown.samples,
        "step_s": breakdown.step_s,
        "samples_per_s": breakdown.samples_per_s,
        "retimed_step_s": timing.step_s,
        "run_s": timing.run_s,
        "interval_s": list(header.interval_s),
        "steps_s": dataclasses.asdict(spread.of_steps(timing)),
        "parts_s": breakdown.parts_s,
        "shares": breakdown.shares,
        "groups_s": breakdown.groups_s,
        "exposed_s": breakdown.exposed_s,
        "exchange_s": breakdown.exchange_s,
        "hidden": breakdown.hidden,
        "sent_bytes": sum(header.sent_bytes) / max(1, len(header.sent_bytes) * header.steps),
        "buckets": list(_buckets(breakdown.buckets, header.buckets)),
        "ranks_s": [_mean_dict(one, "rank", one.ranks[0]) for one in spread.by_rank(breakdown)],
        "steps_by_s": [
            _mean_dict(one, "steps", list(one.steps)) for one in spread.by_step(breakdown)
        ],
        "by_rank": [
            {"rank": one.rank, "step": one.step, "step_s": one.step_s, "parts_s": one.parts_s}
            for one in breakdown.steps
        ],
        "tasks_s": {name: dataclasses.asdict(one) for name, one in spread.of_tasks(graph).items()},
        "gone": {str(rank): step for rank, step in spread.gone(graph).items()},
        "missing": spread.missing(graph),
        "path": {
            "length_s": path.length_s,
            "binding": path.binding,
            "binds": found.binding,
            "shares": path.shares,
            "compute_ranks": {str(rank): share for rank, share in path.compute_ranks.items()},
            "pieces": [_piece_dict(piece) for piece in path.pieces],
            "tasks_without_slack": int(np.count_nonzero(path.slack_s <= 0.0)),
            "median_slack_s": float(np.median(path.slack_s)),
        },
        "what_if": [
            {
                "edit": one.edit.name,
                "step_s": one.step_s,
                "gain": one.gain,
                "is_rough": one.is_rough,
            }
            for one in found.answers
        ],
        "network": _network(header),
        "clocks_error_s": header.clocks.error_s,
        "unknown_s": graph.between_s,
        "rough": graph.rough,
    }


def _model(job: str) -> str:
    """Return the model that a job names; empty if the trace has no job."""
    try:
        return str(tomllib.loads(job)["model"]["name"])
    except (tomllib.TOMLDecodeError, KeyError, TypeError):
        return ""


def _network(header: Header) -> dict[str, Any] | None:
    """Return the rate and the latency of the simulated link between machines, if there is one."""
    network = (header.cluster or {}).get("network")
    if not isinstance(network, dict) or len(header.machines) < 2:
        return None
    found = {name: network.get(name) for name in ("rate_bytes_per_s", "latency_s")}
    return found if all(isinstance(one, int | float) for one in found.values()) else None


def _buckets(
    times: Sequence[BucketTimes], facts: Sequence[BucketFacts]
) -> Iterator[dict[str, Any]]:
    for one in times:
        fact = facts[one.bucket] if one.bucket < len(facts) else BucketFacts(0, ())
        yield {
            "bucket": one.bucket,
            "num_bytes": fact.num_bytes,
            "first_parameter": next(iter(fact.parameters), ""),
            **_exchange_dict(one),
            "sent_bytes": one.sent_bytes,
            "rate_bytes_per_s": one.rate_bytes_per_s,
            "kinds": {kind: _exchange_dict(own) for kind, own in one.kinds.items()},
        }


def _exchange_dict(one: ExchangeTimes) -> dict[str, float]:
    return {"busy_s": one.busy_s, "exposed_s": one.exposed_s, "hidden_s": one.hidden_s}


def _mean_dict(one: spread.MeanParts, name: str, value: object) -> dict[str, Any]:
    return {
        name: value,
        "step_s": one.step_s,
        "longest_s": one.longest_s,
        "parts_s": one.parts_s,
    }


def _piece_dict(piece: Piece) -> dict[str, Any]:
    return {
        "kind": piece.kind,
        "rank": piece.rank,
        "task": piece.task,
        "bucket": piece.bucket,
        "step": piece.step,
        "start_s": piece.start_s,
        "end_s": piece.end_s,
    }
