"""Digits: read from scikit-learn's folder, split once and for all."""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
from types import SimpleNamespace

import numpy as np
import pytest
from sklearn.datasets import load_digits

from syncline import data
from syncline.data import digits
from syncline.errors import ConfigError


def whole(split):
    return split.batch(np.arange(len(split)))


def test_the_two_splits_together_are_scikit_learns_digits():
    found = data.load("digits")
    assert (len(found.train), len(found.test)) == (1437, 360)
    assert (found.sample_shape, found.classes) == ((1, 8, 8), 10)
    train, test = whole(found.train), whole(found.test)
    samples, labels = (np.concatenate(pair) for pair in zip(train, test, strict=True))
    pixels = (samples * digits.STD + digits.MEAN) * 16
    ours = sorted(zip(pixels.round().reshape(-1, 64).tolist(), labels.tolist(), strict=True))
    theirs = load_digits()
    assert ours == sorted(zip(theirs.data.tolist(), theirs.target.tolist(), strict=True))


def test_values_are_normalised():
    samples, _ = whole(data.load("digits").train)
    assert abs(samples.mean()) < 0.01
    assert abs(samples.std() - 1) < 0.01


def test_the_split_never_changes():
    # Accuracies of different versions and seeds are compared: the test rows must stay the same.
    _, labels = whole(data.load("digits", seed=1).test)
    digest = hashlib.sha256(labels.astype("<i8").tobytes()).hexdigest()
    assert digest[:16] == "ea89ad6efde9b340"


def test_image_size_scales_the_digits():
    found = data.load("digits", image_size=32)
    assert found.sample_shape == (1, 32, 32)
    assert found.test.batch(np.array([0]))[0].shape == (1, 1, 32, 32)


def refusal(call):
    with pytest.raises(ConfigError) as caught:
        call("digits")
    return str(caught.value)


@pytest.mark.parametrize("call", [data.check, data.load])
def test_without_scikit_learn_the_fix_is_an_install(call, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install 'syncline[data]'" in refusal(call)


def rows(count=1797, width=65, value="1"):
    return gzip.compress("\n".join([",".join([value] * width)] * count).encode())


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "is missing"),
        (b"not gzip", "cannot be read"),
        (rows()[:-20], "cannot be read"),
        (rows(value="x"), "cannot be read"),
        (rows(count=1796), "holds 1796 rows of 65 values"),
        (rows(width=64), "holds 1797 rows of 64 values"),
        (rows(value="17"), "out of range"),
        (rows(value="10"), "out of range"),
    ],
)
def test_a_damaged_file_is_refused(content, complaint, monkeypatch, tmp_path):
    folder = tmp_path / "datasets" / "data"
    folder.mkdir(parents=True)
    if content is not None:
        (folder / "digits.csv.gz").write_bytes(content)
    spec = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    message = refusal(data.load)
    assert complaint in message
    assert "--force-reinstall scikit-learn" in message
