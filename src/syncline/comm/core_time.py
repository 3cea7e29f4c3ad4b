"""The processor time of a collective on each rank: messages, and bytes that it copies or adds up.

A rank that reads peers' memory inside a machine works as long as it takes, its latency included: it
has no wire to wait for.
Across machines it spends `message_s` on each peer it exchanges with, both ways, `byte_s` on each
byte that it sends or gets, and `collective_s` once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from syncline.comm.volume import Stage

if TYPE_CHECKING:
    from syncline.cluster import Cluster


def core_times(stages: Sequence[Stage], cluster: Cluster) -> tuple[float, ...]:
    """Return the processor seconds of each position."""
    found = [0.0] * max((len(one.gives) for one in stages), default=0)
    across = set[int]()
    for one in stages:
        for groups, sign in ((one.groups, 1), (one.apart, -1)):
            for group in groups:
                gives = sum(one.gives[position] for position in group)
                takes = sum(one.takes[position] for position in group)
                for position in group:
                    sent = one.gives[position] * (takes - one.takes[position])
                    got = one.takes[position] * (gives - one.gives[position])
                    if one.where == "inside":
                        found[position] += sign * got / cluster.inside.rate_bytes_per_s
                        found[position] += max(0, sign) * one.rounds * cluster.inside.latency_s
                    elif sent or got:
                        across.add(position)
                        messages_s = (len(group) - 1) * cluster.message_s
                        found[position] += sign * (messages_s + (sent + got) * cluster.byte_s)
    return tuple(
        max(0.0, core_s) + (cluster.collective_s if position in across else 0.0)
        for position, core_s in enumerate(found)
    )
