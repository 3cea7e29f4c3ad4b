"""Resizing, and splits of grey images in memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from syncline.data.base import GreyImages, resize

images = arrays(
    np.float32,
    st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(1, 9)),
    elements=st.floats(0, 255, width=32),
)


@given(images.filter(lambda image: image.shape[1] == image.shape[2]))
@settings(deadline=None)
def test_resizing_to_the_same_size_changes_nothing(image):
    np.testing.assert_array_equal(resize(image, image.shape[1]), image)


@given(images, st.integers(1, 20))
@settings(deadline=None)
def test_resizing_agrees_with_torch(image, size):
    theirs = torch.nn.functional.interpolate(
        torch.from_numpy(image)[None], size=(size, size), mode="bilinear", align_corners=False
    )
    np.testing.assert_allclose(resize(image, size), theirs[0].numpy(), rtol=1e-4, atol=1e-3)


def test_resizing_by_hand():
    image = np.array([[[0, 4]]], np.float32)  # one row of two pixels
    np.testing.assert_array_equal(resize(image, 4), [[[0, 1, 3, 4]] * 4])
    np.testing.assert_array_equal(resize(image, 1), [[[2]]])


@pytest.mark.parametrize(("image_size", "expected"), [(None, [[-1, 1]]), (1, [[0]])])
def test_pixels_are_scaled_then_normalised(image_size, expected):
    split = GreyImages(
        np.array([[[0, 16], [0, 16]]], np.uint8),
        np.array([3], np.uint8),
        white=16,
        mean=0.5,
        std=0.5,
        image_size=image_size,
    )
    samples, labels = split.batch(np.array([0]))
    np.testing.assert_array_equal(samples[0, 0, :1], expected)
    assert labels.tolist() == [3]
