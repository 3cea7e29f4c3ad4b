"""Balance equations of a layer: its FLOP, and the bytes of data, model and hybrid parallelism.

Das et al. 2016, "Distributed Deep Learning Using Synchronous Stochastic Gradient Descent" (arXiv
1602.06709). In hybrid parallelism N ranks form G groups of n = N / G. The ranks of a group divide
a layer's output features among them (model parallelism); groups divide the minibatch (data
parallelism). G = 1 is pure model parallelism, G = N pure data parallelism.

The paper writes the bytes in the limit of large groups: `data_bytes`, `model_bytes` and
`hybrid_bytes`. There a rank also sends what it keeps itself. The `exact` functions count only what
goes to others: (n - 1) / n of the activations and (G - 1) / G of the gradients.

All byte counts are those that one rank sends in one step. The paper calls a rank a node, a sample a
data point. Biases are not counted unless a docstring says so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

FLOAT32_BYTES = 4


@dataclass(frozen=True)
class LayerShape:
    """A convolution or, with the defaults, a linear layer. Sizes in two dimensions are areas."""

    in_features: int
    """The paper's ifm: input feature maps, or the inputs of a linear layer."""
    out_features: int
    """The paper's ofm."""
    kernel_area: int = 1
    """kw * kh"""
    in_area: int = 1
    """in_w * in_h: how many values an input feature map has."""
    out_area: int = 1
    """out_w * out_h"""

    @property
    def num_weights(self) -> int:
        return self.in_features * self.out_features * self.kernel_area


@dataclass(frozen=True)
class HybridBytes:
    """What a rank sends in a step for one layer."""

    inside: float
    """Activations and their gradients, to the ranks of its group."""
    across: float
    """Gradients and parameters, to its counterparts in other groups."""

    @property
    def total(self) -> float:
        return self.inside + self.across


@dataclass(frozen=True)
class SplitBytes:
    """What a rank sends in a step for one linear layer that its group has split."""

    forward: float
    """Inputs to the group and, if the layer ends the split part, outputs back to their samples."""
    backward: float
    """Gradients of the inputs and, if the layer ends the split part, of the outputs."""
    gradients: float
    """The gradient of its share of the parameters, to other groups."""
    parameters: float
    """The updated parameters of its strip, to other groups."""

    @property
    def total(self) -> float:
        return self.forward + self.backward + self.gradients + self.parameters


# Data parallelism.


def flop(layer: LayerShape, samples: float) -> float:
    """Return the floating-point operations of a step on some samples.

    Each weight is multiplied and added once for each output value, in forward, for the gradient of
    the input and for that of the weight: 3 * 2 (Das et al., data parallelism).

    >>> flop(LayerShape(4096, 4096), samples=1) / 1e6
    100.663296
    """
    return 3 * 2 * samples * layer.num_weights * layer.out_area


def data_bytes(
    layer: LayerShape, *, overlap: float = 0.0, element_bytes: int = FLOAT32_BYTES
) -> float:
    """Return the bytes of data parallelism: gradients out, weights in (Das et al.).

    `overlap`, from 0 to 1, is how much of sending and receiving happens at the same time: the
    paper's volume counts both directions. Bytes that a rank sends are those of overlap 0: it sends
    its gradients, then the weights that it has updated.
    """
    assert 0 <= overlap <= 1, overlap
    return (2 - overlap) * element_bytes * layer.num_weights


def flop_per_byte(
    layers: Sequence[LayerShape],
    samples: float = 1,
    *,
    overlap: float = 1.0,
    element_bytes: int = FLOAT32_BYTES,
) -> float:
    """Return a rank's FLOP per byte in data parallelism, with some samples for each rank.

    For one layer in float32 with overlap 1 it is 1.5 * out_area * samples, whatever the features
    and the kernel: the ratio of the two equations above.

    >>> flop_per_byte([LayerShape(1024, 1024, kernel_area=9, out_area=144)])
    216.0
    """
    operations = sum(flop(layer, samples) for layer in layers)
    moved = sum(data_bytes(layer, overlap=overlap, element_bytes=element_bytes) for layer in layers)
    return operations / moved


def least_samples(
    layers: Sequence[LayerShape],
    *,
    flop_per_s: float,
    bytes_per_s: float,
    overlap: float = 1.0,
    element_bytes: int = FLOAT32_BYTES,
) -> float:
    """Return from how many samples for each rank on the layers' bytes can hide behind their FLOP.

    A rank is in balance if its layers do at least as many FLOP per byte as it computes while its
    link carries a byte (Das et al., scaling of data parallelism). Round it up.
    """
    of_one = flop_per_byte(layers, 1, overlap=overlap, element_bytes=element_bytes)
    return flop_per_s / bytes_per_s / of_one


def most_ranks(minibatch: int, samples: float) -> int:
    """Return how many ranks a minibatch suffices for, if each needs this many samples.

    >>> most_ranks(256, 5.33)
    42
    """
    return minibatch // max(1, math.ceil(samples))


# Model and hybrid parallelism.


def model_bytes(
    layer: LayerShape, minibatch: float, *, element_bytes: int = FLOAT32_BYTES
) -> float:
    """Return the bytes of model parallelism: inputs in forward, their gradients in backward.

    This is `hybrid_bytes` of one group (Das et al., model parallelism).
    """
    return 2 * element_bytes * layer.in_features * layer.in_area * minibatch


def hybrid_bytes(
    layer: LayerShape,
    minibatch: float,
    *,
    ranks: int,
    groups: int,
    overlap: float = 0.0,
    element_bytes: int = FLOAT32_BYTES,
) -> HybridBytes:
    """Return the bytes of hybrid parallelism in the limit of large groups (Das et al.).

    inside = 2 * size * ifm * in_w * in_h * minibatch / G, and 0 if G = N
    across = (2 - overlap) * size * ifm * ofm * kw * kh * G / N, and 0 if G = 1

    So one group drops its data term as a whole, and any other number of groups pays all of it.
    `groups` need not divide `ranks`.

    >>> hybrid_bytes(LayerShape(4096, 4096), 256, ranks=64, groups=4).total / 1e6
    10.48576
    """
    assert 1 <= groups <= ranks, (groups, ranks)
    inside = model_bytes(layer, minibatch / groups, element_bytes=element_bytes)
    across = data_bytes(layer, overlap=overlap, element_bytes=element_bytes) * groups / ranks
    return HybridBytes(inside if groups < ranks else 0.0, across if groups > 1 else 0.0)


def exact_hybrid_bytes(
    layer: LayerShape,
    minibatch: float,
    *,
    ranks: int,
    groups: int,
    element_bytes: int = FLOAT32_BYTES,
) -> HybridBytes:
    """Return the bytes of hybrid parallelism that go to other ranks.

    The terms of `hybrid_bytes` with overlap 0, times (n - 1) / n and (G - 1) / G: a rank sends
    neither its own activations nor its own strip to itself. Both vanish where they must, so no
    case is special. Samples and features that do not divide evenly give the mean over ranks.

    >>> exact_hybrid_bytes(LayerShape(4096, 4096), 256, ranks=64, groups=2).total / 1e6
    6.160384
    """
    size = _group_size(ranks, groups)
    inside = model_bytes(layer, minibatch / groups, element_bytes=element_bytes)
    across = data_bytes(layer, element_bytes=element_bytes) / size
    return HybridBytes(inside * (size - 1) / size, across * (groups - 1) / groups)


def best_groups_in_the_limit(
    layer: LayerShape, minibatch: float, *, ranks: int, overlap: float = 0.0
) -> float:
    """Return the number of groups at which `hybrid_bytes` of a layer has derivative 0 (Das et al.).

    G = sqrt(2 * N * in_w * in_h * minibatch / (ofm * kw * kh * (2 - overlap)))

    It may lie outside 1 to `ranks`, and be beaten by either end, where one term is dropped.

    >>> best_groups_in_the_limit(LayerShape(4096, 4096), 256, ranks=64)
    2.0
    """
    activations = 2 * ranks * layer.in_area * minibatch
    return math.sqrt(activations / (layer.out_features * layer.kernel_area * (2 - overlap)))


def best_groups(
    layers: Sequence[LayerShape],
    minibatch: float,
    *,
    ranks: int,
    element_bytes: int = FLOAT32_BYTES,
) -> int:
    """Return the number of groups with the fewest `exact_hybrid_bytes` for all layers together.

    It divides `ranks`; of several equally good ones the smallest is returned. Fewer bytes need not
    be less time: gradients can hide behind backward, activations cannot.

    >>> best_groups([LayerShape(4096, 4096)], 256, ranks=64)
    2
    """

    def sent_bytes(groups: int) -> float:
        return sum(
            exact_hybrid_bytes(
                layer, minibatch, ranks=ranks, groups=groups, element_bytes=element_bytes
            ).total
            for layer in layers
        )

    return min((one for one in range(1, ranks + 1) if ranks % one == 0), key=sent_bytes)


def exact_split_bytes(
    in_features: int,
    out_features: int,
    minibatch: float,
    *,
    ranks: int,
    groups: int,
    is_last: bool = False,
    needs_input_gradient: bool = True,
    has_bias: bool = False,
    element_bytes: int = FLOAT32_BYTES,
) -> SplitBytes:
    """Return the bytes that a rank sends in a step for a linear layer that each group has split.

    A group of n ranks has B = minibatch / G samples. Each rank holds B / n of them outside the
    split part, and 1 / n of the features of all B samples between split layers.

    - Inputs: each rank gives the others what it holds, B * in / n values. It is as much for the
      first split layer, which gathers samples, as for later ones, which gather features.
    - The gradient of the inputs is a sum over the group, of which each rank gets what it holds of
      the inputs: a reduce-scatter of B * in values. A network's first layer does not need it.
    - The last split layer (`is_last`) deals its outputs back: each rank gives every other rank its
      features of that rank's samples, B * out / n^2 values; in backward as many gradients go the
      other way. Das et al. do not count this.
    - Across groups each rank reduces and gathers 1 / n of the parameters, as in data parallelism.

    >>> one = exact_split_bytes(6, 4, 8, ranks=4, groups=2, is_last=True)
    >>> one.forward, one.backward, one.gradients, one.parameters
    (64.0, 64.0, 24.0, 24.0)
    """
    size = _group_size(ranks, groups)
    samples, peers = minibatch / groups, size - 1
    inputs = element_bytes * samples * in_features * peers / size
    outputs = element_bytes * samples * out_features * peers / size**2 if is_last else 0.0
    num_parameters = (in_features + has_bias) * out_features / size
    strips = element_bytes * num_parameters * (groups - 1) / groups
    input_gradients = inputs if needs_input_gradient else 0.0
    return SplitBytes(inputs + outputs, input_gradients + outputs, strips, strips)


def _group_size(ranks: int, groups: int) -> int:
    assert ranks % groups == 0, f"{groups} groups of equal size cannot be made of {ranks} ranks"
    return ranks // groups
