"""Synthetic samples of any shape: a mean for each class plus noise, computed when they are read.

A sample and its label are a function of (seed, row) alone, computed with integers and a few float32
operations, so they are the same on every machine and for every batch. A network can learn them: the
class means of images are coarse, at most 8x8 squares, which survive convolution and pooling. Values
have mean 0 and variance 1. Rows beyond the training rows are the test split, a fifth as many.
Memory is about a megabyte for any number of samples: means and noise are windows into two short
pools of numbers. So some rows share their noise: one pair in 65,536.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from syncline.data.base import DataSet, Facts, Indices, Labels, Samples, checked
from syncline.seeds import seed_for

SHAPE, CLASSES, SAMPLES = (3, 32, 32), 10, 50_000
COARSE = 8  # squares along a side of an image's mean: large enough to survive pooling
NOISE_WINDOWS = 1 << 16  # a pool of about this many numbers, so memory stays small
MEAN_WEIGHT, NOISE_WEIGHT = np.float32(0.6), np.float32(0.8)  # squares add up to 1


class Synthetic:
    """Rows `first` to `first + size - 1` of the endless list of samples of a seed."""

    def __init__(
        self, sample_shape: tuple[int, ...], classes: int, first: int, size: int, seed: int
    ) -> None:
        self._shape = sample_shape
        self._classes = classes
        self._first = first
        self._size = size
        self._seed = seed
        is_image = len(sample_shape) == 3
        coarse = (min(length, COARSE) for length in sample_shape[1:]) if is_image else ()
        self._mean_shape = (sample_shape[0], *coarse) if is_image else sample_shape
        # The means of classes c and c + 1 are the same numbers shifted by one place. They differ
        # as much as two independent draws, and no table of all means is needed.
        self._means = _windows(classes, math.prod(self._mean_shape), seed_for(seed, "means"))
        self._noise = _windows(NOISE_WINDOWS, math.prod(sample_shape), seed_for(seed, "noise"))

    def __len__(self) -> int:
        return self._size

    def batch(self, indices: Indices) -> tuple[Samples, Labels]:
        rows = checked(indices, self._size) + self._first
        labels = (_hash(rows, seed_for(self._seed, "label")) % np.uint64(self._classes)).astype(
            np.int64
        )
        windows = _hash(rows, seed_for(self._seed, "window")) % np.uint64(NOISE_WINDOWS)
        samples = self._noise[windows].reshape(-1, *self._shape)
        samples *= NOISE_WEIGHT
        samples += MEAN_WEIGHT * self._spread(self._means[labels].reshape(-1, *self._mean_shape))
        return samples, labels

    def _spread(self, means: Samples) -> Samples:
        """Enlarge coarse means to whole images."""
        if self._mean_shape == self._shape:
            return means
        down, across = (
            np.arange(length) * coarse // length
            for length, coarse in zip(self._shape[1:], self._mean_shape[1:], strict=True)
        )
        return means[:, :, down][:, :, :, across]


def load(
    *,
    sample_shape: tuple[int, ...] = SHAPE,
    classes: int = CLASSES,
    samples: int = SAMPLES,
    seed: int = 0,
) -> DataSet:
    """Return `samples` training rows and a fifth as many test rows (at least one)."""
    sample_shape = tuple(sample_shape)
    train = Synthetic(sample_shape, classes, 0, samples, seed)
    test = Synthetic(sample_shape, classes, samples, max(1, samples // 5), seed)
    return DataSet("synthetic", train, test, sample_shape, classes)


def describe(
    *,
    sample_shape: tuple[int, ...] = SHAPE,
    classes: int = CLASSES,
    samples: int = SAMPLES,
    seed: int = 0,
) -> Facts:
    """Return the samples' shape and classes."""
    return Facts("synthetic", tuple(sample_shape), classes)


def check(
    *,
    sample_shape: tuple[int, ...] = SHAPE,
    classes: int = CLASSES,
    samples: int = SAMPLES,
    seed: int = 0,
) -> None:
    """Do nothing: there are no files, and the caller has checked the settings."""


def _windows(count: int, width: int, seed: int) -> npt.NDArray[np.float32]:
    """Return `count` overlapping rows of `width` numbers, uniform with mean 0 and variance 1."""
    bits = _hash(np.arange(count + width - 1), seed) >> np.uint64(40)
    pool = bits.astype(np.float32) * np.float32(2**-24)  # exact: 24 bits
    pool = (pool - np.float32(0.5)) * np.float32(math.sqrt(12))
    return np.lib.stride_tricks.sliding_window_view(pool, width)


def _hash(numbers: npt.NDArray[np.integer], seed: int) -> npt.NDArray[np.uint64]:
    """Mix each number with the seed into 64 random-looking bits (SplitMix64, Steele 2014)."""
    z = (numbers.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    z += np.uint64(seed)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
