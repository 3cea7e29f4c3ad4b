"""The registry of data sets, and promises that every split keeps."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_files import write_fashion, write_image
from syncline import data
from syncline.errors import ConfigError


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    """One small data set of each name."""
    fashion, folder = tmp_path_factory.mktemp("fashion"), tmp_path_factory.mktemp("folder")
    write_fashion(fashion, train=9, test=4)
    for number in range(5):
        for split in ("train", "test"):
            write_image(folder / split / f"class{number % 2}" / f"{number}.png", seed=number)
    return {
        "digits": data.load("digits"),
        "fashion-mnist": data.load("fashion-mnist", path=str(fashion), image_size=12),
        "folder": data.load("folder", path=str(folder), image_size=6),
        "synthetic": data.load("synthetic", sample_shape=(2, 9, 5), classes=3, samples=50),
    }


every_set = pytest.mark.parametrize("name", data.names())


@every_set
@given(numbers=st.data())
@settings(max_examples=20, deadline=None)
def test_a_batch_is_those_rows_of_the_whole(sets, name, numbers):
    for split in (sets[name].train, sets[name].test):
        rows = numbers.draw(st.lists(st.integers(0, len(split) - 1), max_size=7))
        whole, whole_labels = split.batch(np.arange(len(split)))
        samples, labels = split.batch(np.array(rows, dtype=np.int64))
        np.testing.assert_array_equal(samples, whole[rows])
        np.testing.assert_array_equal(labels, whole_labels[rows])


@every_set
@pytest.mark.parametrize("rows", [[], [0], [2, 0, 2]])
def test_a_batch_is_fresh_contiguous_and_of_the_right_types(sets, name, rows):
    found = sets[name]
    indices = np.array(rows, dtype=np.int32)
    samples, labels = found.train.batch(indices)
    assert samples.shape == (len(rows), *found.sample_shape)
    assert labels.shape == (len(rows),)
    assert samples.dtype == np.float32
    assert labels.dtype == np.int64
    assert samples.flags.c_contiguous
    assert labels.flags.c_contiguous
    kept = samples.copy(), labels.copy()
    samples[...], labels[...] = 7, 7
    for before, now in zip(kept, found.train.batch(indices), strict=True):
        np.testing.assert_array_equal(before, now)


@every_set
def test_labels_cover_the_classes_and_no_more(sets, name):
    found = sets[name]
    _, labels = found.train.batch(np.arange(len(found.train)))
    assert labels.min() == 0
    assert labels.max() < found.classes
    if name != "fashion-mnist":  # nine random images do not show ten classes
        assert len(set(labels.tolist())) == found.classes


@every_set
@pytest.mark.parametrize("row", [-1, 10**9])
def test_a_row_that_does_not_exist_is_an_error(sets, name, row):
    with pytest.raises(IndexError, match=str(row)):
        sets[name].train.batch(np.array([0, row]))


@every_set
@pytest.mark.parametrize("rows", [np.array([0.0]), np.zeros((1, 1), int), np.array([True])])
def test_rows_are_a_list_of_integers(sets, name, rows):
    with pytest.raises(IndexError, match="list of integers"):
        sets[name].train.batch(rows)


def test_names_are_in_order():
    assert data.names() == list(data.DATA) == sorted(data.DATA)


def test_loading_imports_neither_torch_nor_scikit_learn_nor_pillow():
    work = (
        "import sys, numpy; from syncline import data\n"
        "for name in ('digits', 'synthetic'):\n"
        "    data.check(name); data.load(name).train.batch(numpy.arange(3))\n"
        "sys.exit(', '.join({'torch', 'sklearn', 'PIL'} & set(sys.modules)) or None)"
    )
    subprocess.run([sys.executable, "-c", work], check=True)


def refusals(name, **settings):
    """Give the errors of check and load, which must agree."""
    errors = []
    for call in (data.check, data.load):
        with pytest.raises(ConfigError) as caught:
            call(name, **settings)
        errors.append((caught.value.key, str(caught.value)))
    assert errors[0] == errors[1]
    return errors[0]


def test_a_misspelt_name_gets_the_nearest_one():
    _, message = refusals("digit")
    assert message == "data.name: got 'digit', but there is no such data set. Did you mean digits?"


def test_a_name_like_no_other_gets_the_whole_list():
    _, message = refusals("imagenet-21k")
    assert message.endswith("Choose from digits, fashion-mnist, folder, synthetic.")


WITHOUT_EFFECT = [
    (name, key)
    for name in data.names()
    for key in ("path", "image_size", "sample_shape", "classes", "samples")
    if key not in data.DATA[name].settings
]


@pytest.mark.parametrize(("name", "key"), WITHOUT_EFFECT)
def test_a_setting_without_effect_is_refused(name, key):
    value = {"path": "/somewhere", "sample_shape": (3,)}.get(key, 5)
    found, message = refusals(name, **{key: value})
    assert found == f"data.{key}"
    assert f"it has no effect on {name}. Remove it; {name} takes data." in message


def test_there_are_settings_without_effect_to_test():
    assert ("digits", "classes") in WITHOUT_EFFECT
    assert ("synthetic", "image_size") in WITHOUT_EFFECT
    assert len(WITHOUT_EFFECT) == 12


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("digits", "image_size", 0),
        ("digits", "image_size", 8.0),
        ("digits", "image_size", True),
        ("synthetic", "classes", 0),
        ("synthetic", "samples", -1),
        ("synthetic", "sample_shape", ()),
        ("synthetic", "sample_shape", (3, 0)),
        ("synthetic", "sample_shape", 3),
    ],
)
def test_a_wrong_value_is_refused(name, key, value):
    found, message = refusals(name, **{key: value})
    assert found == f"data.{key}"
    assert f"got {value!r}" in message


@every_set
def test_the_jobs_seed_is_always_welcome(name, tmp_path):
    if name == "fashion-mnist":
        write_fashion(tmp_path, train=2, test=1)
    elif name == "folder":
        write_image(tmp_path / "train" / "a" / "a.png", seed=0)
    path = {"path": str(tmp_path)} if "path" in data.DATA[name].settings else {}
    data.check(name, seed=3, **path)
    data.load(name, seed=3, **path)
