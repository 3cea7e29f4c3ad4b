"""Residual networks (He 2015, 1512.03385): 18 and 50 layers for ImageNet, 20 layers for CIFAR.

At 3x224x224 and 1000 classes, resnet-18 has 11,689,512 parameters and resnet-50 25,557,032;
resnet-20 has 269,722 at 3x32x32 and ten classes. For images of at most 64 px the first two start
with a 3x3 convolution of stride 1 and no pooling, as is usual for them: the original stem would
leave one pixel of a 32 px image. Bottlenecks have their stride in the first 1x1 convolution, as in
the paper (many later versions have it in the 3x3; the number of parameters is the same).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional as F

from syncline.models.parts import Layers

SMALL_IMAGE_PX = 64
"""Up to this size the stem keeps the image's size: else the last stage would see 2 x 2 pixels."""


class Residual(nn.Module):
    """relu(body(x) + shortcut(x))."""

    def __init__(self, body: nn.Module, shortcut: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.shortcut = shortcut
        self.relu = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.relu(self.body(x) + self.shortcut(x))


class PaddedShortcut(nn.Module):
    """The paper's option A, without weights: every other pixel, new channels zero."""

    def __init__(self, new_channels: int) -> None:
        super().__init__()
        self.new_channels = new_channels

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 0, self.new_channels))


def resnet_18(sample_shape: tuple[int, ...], classes: int) -> nn.Sequential:
    """Build the 18-layer network of two-convolution blocks."""
    return _for_imagenet(sample_shape, classes, depths=(2, 2, 2, 2), bottleneck=False)


def resnet_50(sample_shape: tuple[int, ...], classes: int) -> nn.Sequential:
    """Build the 50-layer network of bottleneck blocks."""
    return _for_imagenet(sample_shape, classes, depths=(3, 4, 6, 3), bottleneck=True)


def resnet_20(sample_shape: tuple[int, ...], classes: int) -> nn.Sequential:
    """Build the 20-layer network for small images, with shortcuts that have no weights."""
    layers: Layers = OrderedDict(stem=nn.Sequential(*_conv_norm(sample_shape[0], 16, 3), nn.ReLU()))
    channels = 16
    for number, width in enumerate((16, 32, 64), start=1):
        blocks: list[nn.Module] = []
        for _ in range(3):
            shortcut = nn.Identity() if width == channels else PaddedShortcut(width - channels)
            blocks.append(Residual(_pair(channels, width, 1 + (width > channels)), shortcut))
            channels = width
        layers[f"stage{number}"] = nn.Sequential(*blocks)
    return _with_classifier(layers, channels, classes)


def _for_imagenet(
    sample_shape: tuple[int, ...], classes: int, *, depths: Sequence[int], bottleneck: bool
) -> nn.Sequential:
    if max(sample_shape[1:]) <= SMALL_IMAGE_PX:
        stem = [*_conv_norm(sample_shape[0], 64, 3), nn.ReLU()]
    else:
        pool = nn.MaxPool2d(3, stride=2, padding=1)
        stem = [*_conv_norm(sample_shape[0], 64, 7, stride=2), nn.ReLU(), pool]
    layers: Layers = OrderedDict(stem=nn.Sequential(*stem))
    channels = 64
    for number, depth in enumerate(depths, start=1):
        width = 32 * 2**number
        outputs = 4 * width if bottleneck else width
        blocks: list[nn.Module] = []
        for index in range(depth):
            stride = 2 if index == 0 and number > 1 else 1
            body = (_bottleneck if bottleneck else _pair)(channels, width, stride)
            shortcut: nn.Module = nn.Identity()
            if stride > 1 or channels != outputs:
                shortcut = nn.Sequential(*_conv_norm(channels, outputs, 1, stride))
            blocks.append(Residual(body, shortcut))
            channels = outputs
        layers[f"stage{number}"] = nn.Sequential(*blocks)
    return _with_classifier(layers, channels, classes)


def _with_classifier(layers: Layers, channels: int, classes: int) -> nn.Sequential:
    layers["pool"] = nn.AdaptiveAvgPool2d(1)
    layers["flatten"] = nn.Flatten()
    layers["fc"] = nn.Linear(channels, classes)
    return nn.Sequential(layers)


def _pair(channels: int, width: int, stride: int) -> nn.Sequential:
    return nn.Sequential(
        *_conv_norm(channels, width, 3, stride), nn.ReLU(), *_conv_norm(width, width, 3)
    )


def _bottleneck(channels: int, width: int, stride: int) -> nn.Sequential:
    return nn.Sequential(
        *_conv_norm(channels, width, 1, stride),
        nn.ReLU(),
        *_conv_norm(width, width, 3),
        nn.ReLU(),
        *_conv_norm(width, 4 * width, 1),
    )


def _conv_norm(channels: int, maps: int, kernel: int, stride: int = 1) -> list[nn.Module]:
    conv = nn.Conv2d(channels, maps, kernel, stride, kernel // 2, bias=False)
    return [conv, nn.BatchNorm2d(maps)]
