"""Synthetic samples: a function of seed and row, cheap, and learnable."""

from __future__ import annotations

import hashlib
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from syncline import data


def rows(split, count=None):
    return split.batch(np.arange(len(split) if count is None else count))


@given(
    shape=st.lists(st.integers(1, 12), min_size=1, max_size=4).map(tuple),
    classes=st.integers(1, 20),
    samples=st.integers(1, 30),
    seed=st.integers(0, 2**63),
)
@settings(max_examples=40, deadline=None)
def test_any_shape_can_be_had(shape, classes, samples, seed):
    found = data.load("synthetic", sample_shape=shape, classes=classes, samples=samples, seed=seed)
    assert (found.sample_shape, found.classes) == (shape, classes)
    assert (len(found.train), len(found.test)) == (samples, max(1, samples // 5))
    values, labels = rows(found.train)
    assert values.shape == (samples, *shape)
    assert labels.max() < classes


def test_the_numbers_never_change():
    # Same seed, same bits: on every machine and in every version.
    values, labels = rows(data.load("synthetic", sample_shape=(2, 9, 9), seed=5).train, 100)
    digest = hashlib.sha256(values.astype("<f4").tobytes() + labels.astype("<i8").tobytes())
    assert digest.hexdigest()[:16] == "5ab3a90d0af3b266"


def test_the_seed_changes_samples_and_labels():
    (one, one_labels), (two, two_labels) = (
        rows(data.load("synthetic", samples=100, seed=seed).train) for seed in (1, 2)
    )
    assert (one != two).mean() > 0.99
    assert (one_labels != two_labels).mean() > 0.5


def test_more_samples_extend_fewer():
    few, many = (rows(data.load("synthetic", samples=n).train, 20) for n in (20, 40))
    np.testing.assert_array_equal(few[0], many[0])
    np.testing.assert_array_equal(few[1], many[1])


def test_the_test_rows_follow_the_training_rows():
    short, long = (data.load("synthetic", samples=samples) for samples in (20, 24))
    values, labels = long.train.batch(np.arange(20, 24))
    np.testing.assert_array_equal(short.test.batch(np.arange(4))[0], values)
    np.testing.assert_array_equal(short.test.batch(np.arange(4))[1], labels)


def test_values_have_mean_0_and_variance_1():
    values, labels = rows(data.load("synthetic", samples=2000).train)
    assert abs(values.mean()) < 0.05
    assert abs(values.var() - 1) < 0.05
    assert np.bincount(labels).min() > 150


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 32, 32), (64,), (4, 16)])
def test_the_nearest_class_mean_is_right_on_unseen_rows(shape):
    found = data.load("synthetic", sample_shape=shape, classes=10, samples=1000)
    (seen, seen_labels), (unseen, labels) = rows(found.train), rows(found.test)
    means = np.stack([seen[seen_labels == label].mean(axis=0).ravel() for label in range(10)])
    distances = ((unseen.reshape(len(unseen), 1, -1) - means) ** 2).sum(axis=2)
    assert (distances.argmin(axis=1) == labels).mean() > 0.95


def test_no_two_classes_have_the_same_mean():
    split = data.load("synthetic", sample_shape=(20,), classes=9304).train
    assert len(np.unique(split._means, axis=0)) == 9304


def test_the_means_of_images_are_squares():
    split = data.load("synthetic", sample_shape=(1, 32, 32), classes=1, samples=3000).train
    mean = rows(split)[0].mean(axis=0)[0]
    squares = mean.reshape(8, 4, 8, 4)
    within = squares.std(axis=(1, 3)).max()
    between = squares.mean(axis=(1, 3)).std()
    assert within < 0.2 * between


def test_memory_does_not_grow_with_the_number_of_samples():
    tracemalloc.start()
    try:
        found = data.load("synthetic", sample_shape=(3, 64, 64), classes=1000, samples=10**9)
        found.train.batch(np.array([0, 10**9 - 1]))
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 10e6
