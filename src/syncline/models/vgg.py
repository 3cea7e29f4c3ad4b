"""VGG-A, the eleven-layer network of Simonyan 2014: 132,851,392 weights, all convolutions 3x3.

At 224 px the first fully connected layer gets 512 x 7 x 7 values; with smaller images it is smaller
(512 at 32 px). The original trains with dropout of 0.5; the default here is none, as in the
networks that Das 2016 times.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from syncline.models.parts import tower

# maps, kernel, stride, pad, whether a 2x2 pooling follows
CONVOLUTIONS = (
    (64, 3, 1, 1, True),
    (128, 3, 1, 1, True),
    (256, 3, 1, 1, False),
    (256, 3, 1, 1, True),
    (512, 3, 1, 1, False),
    (512, 3, 1, 1, True),
    (512, 3, 1, 1, False),
    (512, 3, 1, 1, True),
)


def vgg_a(
    sample_shape: tuple[int, ...],
    classes: int,
    *,
    hidden: Sequence[int] = (4096, 4096),
    dropout: float = 0.0,
) -> nn.Sequential:
    """Return the network with He's weights. Layer names are as in the table: c1 to c8, f1 to f3."""
    return tower(sample_shape, CONVOLUTIONS, 2, hidden, classes, dropout=dropout)
