"""Allocates flat memory for a layout's buckets, the same way in real and virtual time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from syncline.comm.base import Communicator, Partials, Strips
from syncline.comm.shape import places_on_machines
from syncline.contract import Plan
from syncline.engine.bucket import Bucket, Event, Slot, slots_at
from syncline.engine.layout import Layout, Shape
from syncline.engine.share import Share


def shapes_of(plan: Plan, share: Share) -> tuple[Shape, ...]:
    """Return the shape of this rank's group in each family."""
    shapes = []
    for family, part in zip(plan.families, share.families, strict=True):
        comm, owns = part.comm, None
        if family.owners is not None:
            owns = tuple(rank in family.owners for rank in comm.ranks)
        shapes.append(
            Shape(comm.size, comm.num_channels, places_on_machines(comm.machines, comm.ranks), owns)
        )
    return tuple(shapes)


def make_buckets(
    layout: Layout,
    plan: Plan,
    share: Share,
    comm: Communicator,
    slots: Sequence[Slot],
    event: Callable[[], Event],
) -> list[Bucket]:
    """Return the buckets with newly allocated memory. Every rank of the world calls it.

    `comm` is the world's, `slots` are by number. If each rank is a group by itself, the world's
    communicator allocates, so that windows can reach the memory; otherwise the group's does.
    """
    is_each_alone = [
        plan.split is None and all(len(group) == 1 for group in one.groups) for one in plan.families
    ]
    buckets = []
    for place in layout.places:
        family, part = plan.families[place.family], share.families[place.family]
        mine = slots_at(place, slots)
        size = (place.num_elements, mine[0].parameter.dtype)
        is_private = family.memory == "private"
        allocate = comm.allocate if is_each_alone[place.family] else part.comm.allocate
        memory = allocate(*size) if is_private else part.comm.allocate_common(*size)
        sums = [allocate(*size) for _ in range(part.spread.num_sums)]
        gradient = Partials(sums, place.cuts, part.spread, 1.0)
        bucket = Bucket(
            place.index,
            mine,
            *size,
            family=family,
            channel=place.channel,
            part=part,
            parameters=Strips(memory, place.cuts),
            gradient=gradient,
            ready=event(),
        )
        if family.stands_for > 1:
            bucket.holders = share.step.comm
        buckets.append(bucket)
    return buckets


def open_shard(buckets: Sequence[Bucket], shard: int) -> None:
    """Tell every bucket where the gradients of a shard go."""
    for bucket in buckets:
        bucket.untaken = len(bucket.slots)
        bucket.leaf = bucket.part.leaves[shard]
