"""Fashion-MNIST: IDX files, whole or damaged."""

from __future__ import annotations

import gzip
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from data_files import idx_bytes, write_fashion
from syncline import data
from syncline.data import fashion_mnist, idx
from syncline.errors import ConfigError


@pytest.mark.parametrize("ending", ["", ".gz"])
@given(array=arrays(np.uint8, array_shapes(max_dims=4, max_side=6)))
@settings(max_examples=30, deadline=None)
def test_idx_survives_the_round_trip(array, ending, tmp_path_factory):
    file = tmp_path_factory.mktemp("idx") / f"array{ending}"
    content = idx_bytes(array)
    file.write_bytes(gzip.compress(content) if ending else content)
    np.testing.assert_array_equal(idx.read(file), array)
    assert idx.read_shape(file) == array.shape


@given(array=arrays(np.uint8, array_shapes(max_dims=3, max_side=4)), cut=st.data())
@settings(max_examples=50, deadline=None)
def test_a_cut_idx_file_is_always_noticed(array, cut, tmp_path_factory):
    content = idx_bytes(array)
    file = tmp_path_factory.mktemp("idx") / "array"
    file.write_bytes(content[: cut.draw(st.integers(0, len(content) - 1))])
    with pytest.raises(idx.IdxError):
        idx.read(file)


def test_lengths_in_a_header_are_not_trusted_with_memory(tmp_path):
    file = tmp_path / "array"
    file.write_bytes(bytes([0, 0, 8, 3]) + b"\xff" * 12 + b"few bytes")
    with pytest.raises(idx.IdxError, match="holds 9"):
        idx.read(file)


def test_bytes_after_the_last_value_are_noticed_even_in_a_piece_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr(idx, "PIECE_BYTES", 4)
    file = tmp_path / "array"
    file.write_bytes(idx_bytes(np.zeros(8, np.uint8)) + b"x")
    with pytest.raises(idx.IdxError, match="holds more"):
        idx.read(file)


def test_a_file_that_unpacks_to_more_than_announced_is_not_unpacked_whole(tmp_path):
    file = tmp_path / "array.gz"
    file.write_bytes(gzip.compress(bytes([0, 0, 8, 1, 0, 0, 0, 1]) + bytes(40_000_000)))
    tracemalloc.start()
    try:
        with pytest.raises(idx.IdxError, match="holds more"):
            idx.read(file)
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("zipped", [True, False])
def test_both_splits_are_read(zipped, tmp_path):
    arrays = write_fashion(tmp_path, train=12, test=3, zipped=zipped)
    data.check("fashion-mnist", path=str(tmp_path))
    found = data.load("fashion-mnist", path=str(tmp_path))
    assert (found.sample_shape, found.classes) == ((1, 28, 28), 10)
    for split, part in ((found.train, "train"), (found.test, "t10k")):
        samples, labels = split.batch(np.arange(len(split)))
        pixels = (samples[:, 0] * fashion_mnist.STD + fashion_mnist.MEAN) * 255
        np.testing.assert_allclose(pixels, arrays[f"{part}-images-idx3-ubyte"], atol=1e-3)
        np.testing.assert_array_equal(labels, arrays[f"{part}-labels-idx1-ubyte"])


def test_a_plain_file_is_taken_before_a_zipped_one(tmp_path):
    write_fashion(tmp_path, train=12, test=3, zipped=True)
    write_fashion(tmp_path, train=5, test=3, zipped=False)
    assert len(data.load("fashion-mnist", path=str(tmp_path)).train) == 5


def refusal(path, call=data.load):
    with pytest.raises(ConfigError) as caught:
        call("fashion-mnist", path=path)
    assert caught.value.key == "data.path"
    assert "apt-get install dataset-fashion-mnist" in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("call", [data.check, data.load])
@pytest.mark.parametrize("part", ["train-images-idx3", "t10k-labels-idx1"])
def test_a_missing_file_is_named(call, part, tmp_path):
    write_fashion(tmp_path, train=2, test=2)
    (tmp_path / f"{part}-ubyte.gz").unlink()
    assert f"{tmp_path / part}-ubyte is not there" in refusal(str(tmp_path), call)


@pytest.mark.parametrize("call", [data.check, data.load])
def test_without_a_path_debians_folder_is_looked_at(call, monkeypatch, tmp_path):
    assert str(fashion_mnist.DEBIAN) == "/usr/share/datasets/fashion-mnist"
    monkeypatch.setattr(fashion_mnist, "DEBIAN", tmp_path)
    assert str(tmp_path) in refusal(None, call)
    write_fashion(tmp_path, train=2, test=2)
    call("fashion-mnist")


def images(count=4, side=28):
    return idx_bytes(np.zeros((count, side, side), np.uint8))


def labels(count=4, value=0):
    return idx_bytes(np.full(count, value, np.uint8))


IN_THE_HEADER = [
    ("images-idx3", b"", "begins with nothing"),
    ("images-idx3", b"\x00\x00\x0d\x03" + images()[4:], "begins with 00 00 0d 03"),
    ("images-idx3", images()[:10], "ends within its header"),
    ("images-idx3", images(side=27), "(4, 27, 27), not (n, 28, 28)"),
    ("images-idx3", labels(), "(4,), not (n, 28, 28)"),
    ("images-idx3", images(count=0), "(0, 28, 28), not (n, 28, 28)"),
    ("labels-idx1", labels(count=5), "labels of shape (5,) for 4 images"),
]
IN_THE_VALUES = [
    ("images-idx3", images()[:-1], "announces 3136 bytes and holds 3135"),
    ("images-idx3", images() + b"x", "announces 3136 bytes and holds more"),
    ("labels-idx1", labels()[:-1], "announces 4 bytes and holds 3"),
    ("labels-idx1", labels(value=10), "holds the label 10"),
]


@pytest.mark.parametrize("part", ["train", "t10k"])
@pytest.mark.parametrize(("kind", "content", "complaint"), IN_THE_HEADER + IN_THE_VALUES)
def test_a_damaged_file_is_named_with_what_is_wrong(part, kind, content, complaint, tmp_path):
    write_fashion(tmp_path, train=4, test=4)
    file = tmp_path / f"{part}-{kind}-ubyte.gz"
    file.write_bytes(gzip.compress(content))
    message = refusal(str(tmp_path))
    assert f"{file} " in message
    assert complaint in message
    if (kind, content, complaint) in IN_THE_HEADER:
        assert refusal(str(tmp_path), data.check) == message


ZIPPED = gzip.compress(images(), mtime=0)
WRONG_CHECKSUM = ZIPPED[:-8] + bytes(byte ^ 1 for byte in ZIPPED[-8:-4]) + ZIPPED[-4:]


@pytest.mark.parametrize("content", [b"not gzip", ZIPPED[:-12], WRONG_CHECKSUM])
def test_a_damaged_gzip_is_refused(content, tmp_path):
    write_fashion(tmp_path, train=4, test=4)
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(content)
    assert "cannot be read" in refusal(str(tmp_path))


@pytest.mark.skipif(not fashion_mnist.DEBIAN.is_dir(), reason="dataset-fashion-mnist is missing")
def test_debians_files_are_the_published_ones():
    found = data.load("fashion-mnist")
    assert (len(found.train), len(found.test)) == (60_000, 10_000)
    samples, labels = found.train.batch(np.arange(60_000))
    assert abs(samples.mean()) < 0.001
    assert abs(samples.std() - 1) < 0.001
    assert np.bincount(labels).tolist() == [6000] * 10
