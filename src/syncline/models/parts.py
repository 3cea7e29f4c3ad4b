"""What several networks share: a tower of convolutions, the fully connected end, He's weights.

No activation works in place: that would save a little memory, but full backward hooks, with which
layers are timed, refuse modules that change their input.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from torch import nn

Layers = OrderedDict[str, nn.Module]

Convolution = tuple[int, int, int, int, bool]
"""Maps, kernel, stride, pad, and whether a pooling follows."""


def tower(
    sample_shape: tuple[int, ...],
    convolutions: Sequence[Convolution],
    pool: int,
    hidden: Sequence[int],
    classes: int,
    *,
    first: int = 1,
    dropout: float = 0.0,
) -> nn.Sequential:
    """Return convolutions with ReLU, named c1, c2, ..., and a `head`, with He's weights.

    Poolings have `pool` as kernel and stride 2. The first fully connected layer takes all values
    of the last maps.
    """
    channels, height, width = sample_shape
    layers: Layers = OrderedDict()
    for number, (maps, kernel, stride, pad, is_pooled) in enumerate(convolutions, start=1):
        layers[f"c{number}"] = nn.Conv2d(channels, maps, kernel, stride, pad)
        layers[f"act_c{number}"] = nn.ReLU()
        if is_pooled:
            layers[f"pool_c{number}"] = nn.MaxPool2d(pool, stride=2)
        channels = maps
    left = channels * map_size(layers.values(), height) * map_size(layers.values(), width)
    layers["flatten"] = nn.Flatten()
    layers |= head(left, hidden, classes, first=first, dropout=dropout)
    model = nn.Sequential(layers)
    he_normal(model)
    return model


def head(
    inputs: int,
    hidden: Sequence[int],
    classes: int,
    *,
    first: int = 1,
    dropout: float = 0.0,
    batch_norm: bool = False,
    activation: type[nn.Module] = nn.ReLU,
) -> Layers:
    """Return fully connected layers, named f1, f2, ... counting from `first`.

    Each hidden layer is followed by batch norm (if asked for), activation and dropout (if any).
    """
    layers: Layers = OrderedDict()
    for number, width in enumerate(hidden, start=first):
        layers[f"f{number}"] = nn.Linear(inputs, width, bias=not batch_norm)
        if batch_norm:
            layers[f"norm_f{number}"] = nn.BatchNorm1d(width)
        layers[f"act_f{number}"] = activation()
        if dropout > 0:
            layers[f"drop_f{number}"] = nn.Dropout(dropout)
        inputs = width
    layers[f"f{first + len(hidden)}"] = nn.Linear(inputs, classes)
    return layers


def map_size(layers: Iterable[nn.Module], size: int) -> int:
    """Return the height (or width) that convolutions and poolings leave of `size`.

    Square kernels, no dilation, rounding down: out = (size + 2 pad - kernel) // stride + 1.
    """
    for layer in layers:
        if isinstance(layer, nn.Conv2d | nn.MaxPool2d):
            kernel, stride, pad = (
                _one(value) for value in (layer.kernel_size, layer.stride, layer.padding)
            )
            size = (size + 2 * pad - kernel) // stride + 1
    return size


def _one(value: object) -> int:
    value = value[0] if isinstance(value, tuple) else value
    assert isinstance(value, int), value
    return value


def he_normal(model: nn.Module) -> None:
    """Draw weights from He's normal distribution and zero the biases (He 2015, 1502.01852).

    This keeps the size of activations through many ReLU layers; torch's default multiplies it by
    about 0.4 in each layer, and a deep network without batch norm then does not start to learn.
    The last layer has no ReLU after it and keeps torch's smaller weights: max-poolings make
    activations grow, and with He's weights there the first steps would destabilise the network.
    """
    layers = [part for part in model.modules() if isinstance(part, nn.Conv2d | nn.Linear)]
    for layer in layers[:-1]:
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)
