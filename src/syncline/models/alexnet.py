"""AlexNet in its one-tower version (Krizhevsky 2014, 1404.5997): 61,100,840 parameters.

At 224 px the first fully connected layer gets 256 x 6 x 6 values; with smaller images it is
smaller. Dropout of 0.5 follows both hidden layers, as in 2012; local response normalisation is
left out, as is usual for this version.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from syncline.models.parts import tower

# maps, kernel, stride, pad, whether a 3x3 pooling with stride 2 follows
CONVOLUTIONS = (
    (64, 11, 4, 2, True),
    (192, 5, 1, 2, True),
    (384, 3, 1, 1, False),
    (256, 3, 1, 1, False),
    (256, 3, 1, 1, True),
)


def alexnet(
    sample_shape: tuple[int, ...],
    classes: int,
    *,
    hidden: Sequence[int] = (4096, 4096),
    dropout: float = 0.5,
) -> nn.Sequential:
    """Return the network with He's weights."""
    return tower(sample_shape, CONVOLUTIONS, 3, hidden, classes, first=6, dropout=dropout)
