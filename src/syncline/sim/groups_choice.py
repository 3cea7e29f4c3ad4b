"""Chooses how many groups of ranks split linear layers: the number whose step is shortest.

For each number of groups that divides the ranks, the layers for which splitting saves bytes (Das et
al. 2016, `perf/balance.py`) are split, and the step is simulated. Bytes alone would not do:
gradients hide behind compute, activations do not, and a group inside one machine saves no wire.
What a rank's processor spends on gradients hides only if a core is idle (`Handling`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from syncline.cluster import Cluster
from syncline.perf.balance import LayerShape, exact_hybrid_bytes, exact_split_bytes
from syncline.sim.run import simulate
from syncline.strategies.group_settings import HybridSettings
from syncline.strategies.hybrid import Hybrid
from syncline.workload import Layer, Workload

_STEPS = 5
"""The first steps fill the lanes."""


@dataclass(frozen=True)
class Handling:
    """What gradients cost besides backward and the wire: seconds for each byte that a rank holds.

    It adds to backward. A rank that splits a layer holds its rows' gradients only.
    """

    taking_s: float = 0.0
    """To take a gradient from autograd."""
    adding_s: float = 0.0
    """To exchange it, as far as no core is idle for that; 0 where no other rank holds the rows."""


@dataclass(frozen=True)
class Candidate:
    """A number of groups, and what a step would be."""

    settings: HybridSettings
    layers: tuple[str, ...]
    """The layers that are split; none if there are as many groups as ranks."""
    step_s: float
    sent_bytes: float
    """What a rank sends in a step."""


def candidates(
    workload: Workload,
    cluster: Cluster,
    shards: int,
    wanted: HybridSettings,
    handling: Handling | None = None,
    threads: int = 1,
) -> list[Candidate]:
    """Simulate every number of groups that divides the ranks, the most groups first.

    If `wanted` names layers, those are split, whether they pay or not.
    """
    ranks, found = cluster.ranks, []
    for groups in (one for one in range(ranks, 0, -1) if ranks % one == 0):
        layers: tuple[str, ...] = ()
        if groups < ranks:
            pay = _that_pay(workload, ranks, groups, shards)
            layers = tuple(pay) if wanted.layers == "auto" else wanted.layers
            if not layers or shards % ranks:
                continue
        settings = HybridSettings(groups=groups, layers=layers or "auto")
        make = functools.partial(Hybrid, settings)
        work = _with_handling(workload, handling or Handling(), ranks, groups, layers)
        outcome = simulate(work, cluster, make, steps=_STEPS, shards=shards, threads=threads)
        found.append(Candidate(settings, layers, outcome.step_s, outcome.sent_bytes))
    return found


def best_of(found: Sequence[Candidate]) -> Candidate:
    """Return the candidate with the shortest step; of equal ones that with the most groups."""
    return min(found, key=lambda one: one.step_s)


def _that_pay(workload: Workload, ranks: int, groups: int, shards: int) -> Iterator[str]:
    """Yield the layers of which a rank sends fewer bytes if its group splits them."""
    activations = workload.activations()
    for size in workload.sizes():
        if not (size.rows and size.name.endswith("weight") and size.layer in activations):
            continue
        if size.rows < ranks // groups:
            continue
        in_features = size.num_elements // size.rows
        vectors = shards * activations[size.layer][0] // (in_features * size.element_bytes)
        of_data = exact_hybrid_bytes(
            LayerShape(in_features, size.rows), vectors, ranks=ranks, groups=ranks
        )
        if_split = exact_split_bytes(
            in_features, size.rows, vectors, ranks=ranks, groups=groups, is_last=True
        )
        if if_split.total < of_data.total:
            yield size.layer


def _with_handling(
    workload: Workload, handling: Handling, ranks: int, groups: int, split: Sequence[str]
) -> Workload:
    """Return the workload whose backward has the cost of the gradients that a rank holds."""

    def handled(layer: Layer) -> Layer:
        holders = groups if layer.name in split else ranks
        cost_s = handling.taking_s + (handling.adding_s if holders > 1 else 0.0)
        more_s = layer.size_bytes * holders / ranks * cost_s
        return msgspec.structs.replace(layer, backward_s=layer.backward_s + more_s)

    return msgspec.structs.replace(workload, layers=tuple(map(handled, workload.layers)))


def table_of(found: Sequence[Candidate]) -> list[str]:
    """Return lines that say what each number of groups would take, and which one is chosen."""
    chosen, lines = best_of(found), []
    for one in found:
        groups = one.settings.groups
        what = f"split: {', '.join(one.layers)}" if one.layers else "nothing is split"
        lines.append(
            f"hybrid, {groups} group{'s' if groups != 1 else ''}: simulated step "
            f"{one.step_s * 1e3:.3g} ms, {one.sent_bytes / 1e6:.3g} MB sent by a rank, "
            f"{what}{' (chosen)' if one is chosen else ''}"
        )
    return lines
