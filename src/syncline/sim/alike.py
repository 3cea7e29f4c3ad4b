"""One rank stands for all: whether ranks do the same at the same time, and what then differs.

If all ranks add up all gradients together and nothing makes one of them slower, each comes to every
collective when the others come. Then one of them is simulated. Only their strips differ in size:
the others wait for the rank with the largest, so updates take its time.
"""

from __future__ import annotations

from itertools import pairwise

from syncline.contract import Plan, Strategy
from syncline.engine.bucket import Bucket
from syncline.faults import Conditions


def are_alike(strategy: Strategy, plan: Plan, conditions: Conditions) -> bool:
    """Say whether all ranks of a simulation of sizes do the same at the same time.

    A user's own strategy may do on some ranks what its plan does not say.
    """
    everybody = (tuple(range(len(plan.shards))),)
    leaders = [family.leaders for family in plan.families if family.leaders is not None]
    return (
        type(strategy).__module__.startswith("syncline.strategies.")
        and not (plan.has_own or plan.pulls)
        and all(family.groups == everybody for family in plan.families)
        and len({len(group) for one in leaders for group in one.groups}) <= 1
        and len(set(map(len, plan.shards))) == 1
        and conditions.jitter.kind == "none"
        and not (conditions.faults or conditions.slow_ranks or conditions.link_changes)
    )


def largest_strip(bucket: Bucket) -> tuple[int, int]:
    """Return the elements of a bucket whose update takes longest, on any rank."""
    if bucket.family.updates == "each":
        return bucket.owned
    return max(pairwise(bucket.parameters.cuts), key=lambda strip: strip[1] - strip[0])


def updated_elements(bucket: Bucket) -> dict[int, int]:
    """Return how many elements of a bucket each rank updates."""
    if bucket.family.updates == "each":
        return dict.fromkeys(bucket.comm.ranks, bucket.num_elements)
    strips = pairwise(bucket.parameters.cuts)
    return {rank: high - low for rank, (low, high) in zip(bucket.comm.ranks, strips, strict=True)}
