"""Copies between a rank's device and its host, before and after a collective. Pure functions.

Messages to other machines go through the host's memory. If parameters and gradients are on a device
of their own, a rank copies what it sends from there, and what it got back to it. Ranks of one
machine exchange between their devices.
"""

from __future__ import annotations

from syncline.comm.shape import GroupShape
from syncline.comm.volume import Volume


def copied_bytes(what: str, shape: GroupShape, volume: Volume) -> tuple[float, float]:
    """Return the most bytes that a rank copies from its device to its host, and then back.

    From the device come its partial sums or its strip, of the part of the vector that it carries
    across machines; what it gets of that part goes back. Sums are taken on the host.
    """
    if what == "barrier":
        return 0.0, 0.0
    if what == "all_to_all":
        return _copied_blocks(shape, volume)
    if what == "broadcast":
        return volume.size_bytes, volume.size_bytes
    carried, strip, sums = volume.size_bytes, max(volume.strips), max(volume.sums, default=1)
    if shape.kind == "hierarchical":
        carried = max(sum(volume.strips[at] for at in column) for column in shape.columns)
        sums = max(volume.machine_sums, default=1)
    elif shape.kind == "led":
        strip = max(sum(volume.strips[at] for at in group) for group in shape.groups)
        sums = max(volume.machine_sums, default=1)
    given = strip if what == "all_gather" else sums * carried
    return given, strip if what == "reduce_scatter" else carried


def _copied_blocks(shape: GroupShape, volume: Volume) -> tuple[float, float]:
    """Return what the busiest rank gives to and gets from ranks of other machines."""
    all_gives, all_takes = sum(volume.gives), sum(volume.takes)
    out, back = [0.0], [0.0]
    for machine in shape.machines:
        takes = all_takes - sum(volume.takes[at] for at in machine)
        gives = all_gives - sum(volume.gives[at] for at in machine)
        if volume.is_for_all:
            takes = min(takes, max(volume.takes))
        out += [volume.gives[at] * takes for at in machine]
        back += [volume.takes[at] * gives for at in machine]
    return max(out), max(back)
