"""CD-DNN: the acoustic model of Das 2016 (and of Seide 2014), seven sigmoid layers of 2048.

At 429 inputs (11 frames of 39 features) and 9304 outputs it has 45,099,008 weights, 45,122,648
parameters with biases. The originals were trained layer by layer; here that is not needed, because
of the initial weights (`_centre`).
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import nn

from syncline.models.parts import Layers, head


def cd_dnn(
    sample_shape: tuple[int, ...], classes: int, *, hidden: Sequence[int] = (2048,) * 7
) -> nn.Sequential:
    """Return the network for samples of any shape, flattened."""
    layers: Layers = OrderedDict(flatten=nn.Flatten())
    layers |= head(math.prod(sample_shape), hidden, classes, activation=nn.Sigmoid)
    model = nn.Sequential(layers)
    _centre([layer for layer in model if isinstance(layer, nn.Linear)][:-1])
    return model


@torch.no_grad()
def _centre(layers: Sequence[nn.Linear]) -> None:
    """Make the hidden layers start as a tanh network with Glorot's weights.

    sigmoid(z) = (1 + tanh(z / 2)) / 2, so this needs weights four times Glorot's (twice in the
    first layer, whose input is not a sigmoid) and biases that subtract the inputs' mean of 1/2.
    With torch's default, each layer shrinks the gradient about sevenfold and nothing is learnt.
    """
    for number, layer in enumerate(layers):
        nn.init.xavier_uniform_(layer.weight, gain=4.0 if number else 2.0)
        layer.bias.copy_(-layer.weight.sum(dim=1) / 2 if number else torch.zeros_like(layer.bias))
