"""OverFeat-FAST (Sermanet 2014), with the layers that Das 2016 times: 145,909,792 weights.

At 231 px the first fully connected layer gets 1024 x 6 x 6 values; with smaller images it is
smaller. The original trains with dropout of 0.5; the default here is none, as in the networks that
Das 2016 times.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from syncline.models.parts import tower

# maps, kernel, stride, pad, whether a 2x2 pooling follows
CONVOLUTIONS = (
    (96, 11, 4, 0, True),
    (256, 5, 1, 0, True),
    (512, 3, 1, 1, False),
    (1024, 3, 1, 1, False),
    (1024, 3, 1, 1, True),
)


def overfeat_fast(
    sample_shape: tuple[int, ...],
    classes: int,
    *,
    hidden: Sequence[int] = (3072, 4096),
    dropout: float = 0.0,
) -> nn.Sequential:
    """Return the network with He's weights. Layer names are as in the table: c1 to c5, f6 to f8."""
    return tower(sample_shape, CONVOLUTIONS, 2, hidden, classes, first=6, dropout=dropout)
