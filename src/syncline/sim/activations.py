"""What the ranks of a group exchange for a split layer, in sizes: see `engine/split_linear.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from syncline.comm.base import Blocks
from syncline.contract import Plan
from syncline.errors import ConfigError
from syncline.groups import Split, SplitLayer
from syncline.sizes import Size

Bytes = Mapping[str, tuple[int, int]]
"""By layer: activations of a shard, in and out."""


class SplitWork:
    """The blocks that the ranks of a group exchange for one layer. None: nothing is exchanged."""

    def __init__(
        self, layer: SplitLayer, split: Split, into: int, out: int, *, is_first: bool
    ) -> None:
        """`into` and `out` are the bytes of one rank's samples, with all features."""
        size, ones = split.size, (1,) * split.size
        columns = [len(split.rows(layer.in_features, place)) for place in range(size)]
        rows = [len(split.rows(layer.out_features, place)) for place in range(size)]
        # Bytes of one feature, of one rank's samples.
        in_one, out_one = into // layer.in_features, out // layer.out_features
        if layer.takes_features:
            features = tuple(size * in_one * one for one in columns)
            self.gather = Blocks(features, ones)
            self.input_gradient: Blocks | None = Blocks((size * in_one,) * size, tuple(columns))
        else:
            self.gather = Blocks((into,) * size, ones)
            self.input_gradient = None if is_first else Blocks((into,) * size, ones)
        self.deal = self.collect = None
        if not layer.gives_features:
            self.deal = Blocks(tuple(out_one * one for one in rows), ones)
            self.collect = Blocks((out_one,) * size, tuple(rows))


def works_of(plan: Plan, sizes: Sequence[Size], activations: Bytes) -> dict[int, SplitWork]:
    """Return the exchanges of each split layer, by the number of its weight."""
    if plan.split is None:
        return {}
    first = sizes[0].layer
    found = {}
    for layer in plan.split.layers:
        if layer.name not in activations:
            raise ConfigError(
                "--workload",
                f"layer {layer.name!r} has no input_bytes and output_bytes, or the file no samples",
                "ranks that have split a layer exchange its activations",
                "Write the file anew, or use another strategy.",
            )
        found[layer.weight] = SplitWork(
            layer, plan.split, *activations[layer.name], is_first=layer.name == first
        )
    return found
