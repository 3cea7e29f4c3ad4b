"""A small convolutional network for small images: two convolutions and one hidden layer.

824,554 parameters on 28x28 grey images and ten classes; works from 4 px on.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from torch import nn

from syncline.models.parts import Layers, head, map_size


def cnn(
    sample_shape: tuple[int, ...],
    classes: int,
    *,
    hidden: Sequence[int] = (256,),
    dropout: float = 0.25,
    batch_norm: bool = True,
) -> nn.Sequential:
    """Return the network. Batch norm follows the convolutions, dropout the hidden layers."""
    channels, height, width = sample_shape
    layers: Layers = OrderedDict()
    for number, maps in enumerate((32, 64), start=1):
        layers[f"c{number}"] = nn.Conv2d(channels, maps, 3, padding=1, bias=not batch_norm)
        if batch_norm:
            layers[f"norm_c{number}"] = nn.BatchNorm2d(maps)
        layers[f"act_c{number}"] = nn.ReLU()
        layers[f"pool_c{number}"] = nn.MaxPool2d(2)
        channels = maps
    left = channels * map_size(layers.values(), height) * map_size(layers.values(), width)
    layers["flatten"] = nn.Flatten()
    layers |= head(left, hidden, classes, dropout=dropout)
    return nn.Sequential(layers)
