"""What every data set is: two splits whose rows are read by number.

A row depends on its number alone, never on the rest of the batch or on the rank that reads it: so
any number of ranks can train on the same samples. Only `own.py` of this folder imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

Samples = npt.NDArray[np.float32]
Labels = npt.NDArray[np.int64]
Indices = npt.NDArray[np.integer]


class Split(Protocol):
    """Numbered samples with their labels."""

    def __len__(self) -> int: ...

    def batch(self, indices: Indices) -> tuple[Samples, Labels] | tuple[torch.Tensor, torch.Tensor]:
        """Return the samples and labels of these rows, as new C-contiguous arrays.

        A user's own data gives tensors. Raises IndexError for a row that does not exist; negative
        numbers do not count from the end.
        """
        ...


@dataclass(frozen=True)
class Facts:
    """What a model needs to know of a data set; `classes` is None if that is not known."""

    name: str
    sample_shape: tuple[int, ...]
    classes: int | None
    sample_dtype: str = "float32"


@dataclass(frozen=True)
class DataSet:
    """Samples to train on, samples to test on if there are any, and their shape and classes.

    `classes` is None for a user's own data: its targets need not be classes.
    """

    name: str
    train: Split
    test: Split | None
    sample_shape: tuple[int, ...]
    classes: int | None
    sample_dtype: str = "float32"
    is_own: bool = False


class GreyImages:
    """A split of 8-bit grey images in memory, one byte per pixel; batches are float32.

    Values are scaled from [0, white] to [0, 1] and normalised: (value / white - mean) / std.
    """

    def __init__(
        self,
        images: npt.NDArray[np.uint8],
        labels: npt.NDArray[np.uint8],
        *,
        white: float,
        mean: float,
        std: float,
        image_size: int | None,
    ) -> None:
        assert images.ndim == 3, images.shape
        assert labels.shape == images.shape[:1], (images.shape, labels.shape)
        self._images = images
        self._labels = labels
        self._scale = np.float32(1 / (white * std))
        self._shift = np.float32(mean / std)
        self._image_size = image_size

    def __len__(self) -> int:
        return len(self._labels)

    def batch(self, indices: Indices) -> tuple[Samples, Labels]:
        rows = checked(indices, len(self))
        images = self._images[rows].astype(np.float32)
        # Resized here, not at load: sixty thousand images of 224 px would fill 12 GB.
        if self._image_size is not None:
            images = resize(images, self._image_size)
        images *= self._scale
        images -= self._shift
        return images[:, np.newaxis], self._labels[rows].astype(np.int64)


def checked(indices: Indices, size: int) -> npt.NDArray[np.intp]:
    """Return `indices` as row numbers, or raise IndexError; numpy would accept -1."""
    rows = np.asarray(indices)
    if rows.ndim != 1 or (rows.size and rows.dtype.kind not in "iu"):
        raise IndexError(f"rows are a list of integers, got {rows.dtype} of shape {rows.shape}")
    if rows.size and (rows.min() < 0 or rows.max() >= size):
        raise IndexError(f"got rows {rows.min()} to {rows.max()}, there are 0 to {size - 1}")
    return rows.astype(np.intp)


def resize(images: Samples, size: int) -> Samples:
    """Scale images (..., height, width) to (..., size, size), bilinearly.

    Pixels are squares with centres at halves, edges are repeated, and there is no anti-aliasing.
    The same height and width give the same bits back. Each image's result does not depend on the
    others: everything is elementwise.
    """
    return _resize_rows(_resize_rows(images, size).swapaxes(-1, -2), size).swapaxes(-1, -2).copy()


def _resize_rows(images: Samples, size: int) -> Samples:
    height = images.shape[-2]
    centres = (np.arange(size) + 0.5) * (height / size) - 0.5
    centres = np.clip(centres, 0, height - 1)
    above = np.floor(centres).astype(np.intp)
    below = np.minimum(above + 1, height - 1)
    weight = (centres - above).astype(np.float32)[:, np.newaxis]
    return images[..., above, :] * (1 - weight) + images[..., below, :] * weight
