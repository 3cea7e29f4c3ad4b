"""Hybrid parallelism: linear layers are split over groups of ranks, all else is replicated.

Das et al. 2016 (arXiv 1602.06709). N ranks form G groups. The ranks of a group divide the output
features of each split layer among them; all of them compute on the samples of the whole group, so
they exchange activations, and no gradients of that layer. Its gradients are added up across groups
only, between ranks that hold the same rows. Everything else is synchronous SGD on all ranks: one
process on the whole batch would get the same result, up to rounding. With as many groups as ranks
nothing is split.

A group takes ranks of as many machines as it can: the ranks of one machine add up their gradients
before they send, so a group inside a machine would save nothing on the wire.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from syncline.contract import Family, Plan, Strategy, UpdateSettings, World, deal
from syncline.engine.bucket import Bucket
from syncline.errors import ConfigError
from syncline.groups import Group, Split, SplitLayer
from syncline.sizes import Size
from syncline.strategies.group_settings import HybridSettings, refuse_uneven
from syncline.strategies.synchronous import Synchronous


class Hybrid(Strategy):
    """Synchronous SGD in which groups of ranks have split linear layers."""

    settings: HybridSettings

    def __init__(self, settings: HybridSettings | None = None, seed: int = 0) -> None:
        self.settings = settings or HybridSettings()
        self._rule = Synchronous()

    def plan(self, world: World, sizes: Sequence[Size], shards: int) -> Plan:
        # Sizes alone do not say what pays. If no choice has replaced "auto", nothing is split.
        groups = world.size if self.settings.groups == "auto" else self.settings.groups
        size = world.size // groups
        layers = _layers(self.settings, sizes, size) if size > 1 else ()
        if not layers:
            return self._rule.plan(world, sizes, shards)
        refuse_uneven(shards, world.size)
        members = in_groups(world, groups)
        split = Split(members, layers)
        across = tuple(sorted(tuple(sorted(ranks)) for ranks in zip(*members, strict=True)))
        families = (
            Family(across, parameters=split.numbers, stands_for=size),
            Family(world.everybody),
        )
        dealt = deal(shards, world.size, world.size)
        return Plan(families, dealt, overlap=True, split=split)

    def gradient_ready(self, bucket: Bucket) -> None:
        self._rule.gradient_ready(bucket)

    def before_use(self, bucket: Bucket, update: UpdateSettings) -> None:
        self._rule.before_use(bucket, update)


def in_groups(world: World, groups: int) -> tuple[Group, ...]:
    """Return the ranks of each group, from as many machines as possible.

    >>> in_groups(World(((0, 1), (2, 3))), 2)
    ((0, 2), (1, 3))
    """
    order = [rank for machine in world.machines for rank in machine]
    return tuple(tuple(sorted(order[first::groups])) for first in range(groups))


def _layers(settings: HybridSettings, sizes: Sequence[Size], size: int) -> tuple[SplitLayer, ...]:
    """Return the layers that groups of so many ranks split."""
    weights = {one.layer: one for one in sizes if one.rows and one.name.endswith("weight")}
    biases = {one.layer: one for one in sizes if one.rows and one.name.endswith("bias")}
    can = [name for name, weight in weights.items() if weight.rows >= size]
    chosen = can if settings.layers == "auto" else settings.layers
    _refuse_layers(chosen, can, weights, size)
    follows = {
        name: one.follows
        for name, one in weights.items()
        if name in chosen and one.follows in chosen
    }
    return tuple(
        SplitLayer(
            name,
            weight.number,
            biases[name].number if name in biases else None,
            weight.num_elements // weight.rows,
            weight.rows,
            follows=follows.get(name, ""),
            gives_features=name in follows.values(),
        )
        for name, weight in weights.items()
        if name in chosen
    )


def _refuse_layers(
    chosen: Sequence[str], can: Sequence[str], weights: Mapping[str, Size], size: int
) -> None:
    for name in chosen:
        if name in can:
            continue
        why = "it is not a linear layer of its own, with all its parameters trained"
        if name in weights:
            why = f"it has {weights[name].rows} output features for {size} ranks"
        raise ConfigError(
            "strategy.hybrid.layers",
            f"got {name!r}",
            f"{why}, so it cannot be split",
            f"Choose from {', '.join(can)}." if can else "This model has no layer to split.",
        )
