"""GoogLeNet: Inception v1 (Szegedy 2014, 1409.4842), 6,998,552 parameters with biases.

As published, it has local response normalisation and no batch norm. The two auxiliary classifiers
are left out: they serve training only, and the timed networks do not have them. Poolings round up
as in the original, so 224 px end as 7x7 maps.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import nn

from syncline.models.parts import he_normal

# maps of: 1x1; 1x1 before 3x3, 3x3; 1x1 before 5x5, 5x5; 1x1 after pooling
INCEPTIONS: dict[str, tuple[int, int, int, int, int, int]] = {
    "3a": (64, 96, 128, 16, 32, 32),
    "3b": (128, 128, 192, 32, 96, 64),
    "4a": (192, 96, 208, 16, 48, 64),
    "4b": (160, 112, 224, 24, 64, 64),
    "4c": (128, 128, 256, 24, 64, 64),
    "4d": (112, 144, 288, 32, 64, 64),
    "4e": (256, 160, 320, 32, 128, 128),
    "5a": (256, 160, 320, 32, 128, 128),
    "5b": (384, 192, 384, 48, 128, 128),
}


class Inception(nn.Module):
    """Four branches on one input, joined along the channels."""

    def __init__(self, channels: int, maps: tuple[int, int, int, int, int, int]) -> None:
        super().__init__()
        one, before_three, three, before_five, five, after_pool = maps
        self.one = _conv(channels, one, 1)
        self.three = nn.Sequential(_conv(channels, before_three, 1), _conv(before_three, three, 3))
        self.five = nn.Sequential(_conv(channels, before_five, 1), _conv(before_five, five, 5))
        self.pool = nn.Sequential(
            nn.MaxPool2d(3, stride=1, padding=1), _conv(channels, after_pool, 1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.one(x), self.three(x), self.five(x), self.pool(x)], dim=1)


def googlenet(
    sample_shape: tuple[int, ...], classes: int, *, dropout: float = 0.4
) -> nn.Sequential:
    """Return the network with He's weights."""
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        conv1=_conv(sample_shape[0], 64, 7, stride=2),
        pool1=_pool(),
        norm1=_normalise(),
        conv2_reduce=_conv(64, 64, 1),
        conv2=_conv(64, 192, 3),
        norm2=_normalise(),
        pool2=_pool(),
    )
    channels = 192
    for name, maps in INCEPTIONS.items():
        layers[f"inception_{name}"] = Inception(channels, maps)
        channels = maps[0] + maps[2] + maps[4] + maps[5]
        if name in ("3b", "4e"):
            layers[f"pool{name[0]}"] = _pool()
    layers["pool5"] = nn.AdaptiveAvgPool2d(1)
    layers["flatten"] = nn.Flatten()
    if dropout > 0:
        layers["drop"] = nn.Dropout(dropout)
    layers["fc"] = nn.Linear(channels, classes)
    model = nn.Sequential(layers)
    he_normal(model)
    return model


def _conv(channels: int, maps: int, kernel: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(channels, maps, kernel, stride, kernel // 2), nn.ReLU())


def _pool() -> nn.MaxPool2d:
    return nn.MaxPool2d(3, stride=2, ceil_mode=True)


def _normalise() -> nn.LocalResponseNorm:
    return nn.LocalResponseNorm(5, alpha=1e-4, beta=0.75)
