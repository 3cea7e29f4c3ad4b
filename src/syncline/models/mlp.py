"""A multi-layer perceptron: flatten, then hidden layers with ReLU.

With the default of one hidden layer of 128 it has 101,770 parameters on 28x28 images and ten
classes. Takes samples of any shape.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence

from torch import nn

from syncline.models.parts import Layers, head


def mlp(
    sample_shape: tuple[int, ...],
    classes: int,
    *,
    hidden: Sequence[int] = (128,),
    dropout: float = 0.0,
    batch_norm: bool = False,
) -> nn.Sequential:
    """Return the network; an empty `hidden` gives softmax regression."""
    layers: Layers = OrderedDict(flatten=nn.Flatten())
    layers |= head(math.prod(sample_shape), hidden, classes, dropout=dropout, batch_norm=batch_norm)
    return nn.Sequential(layers)
