"""Image folders: what is found, how it is cut, and what is refused."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
from PIL import Image

from data_files import write_image
from syncline import data
from syncline.data import folder
from syncline.errors import ConfigError, SynclineError


def pixels(split, row=0):
    """Undo the normalisation: (height, width, 3) of 0 to 255."""
    sample = split.batch(np.array([row]))[0][0].transpose(1, 2, 0)
    return ((sample * folder.STD + folder.MEAN) * 255).round()


def test_classes_and_images_are_numbered_by_name(tmp_path):
    for name in ("train/b/2.png", "train/b/10.PNG", "train/a/z.jpg", "train/B/x.png"):
        write_image(tmp_path / name)
    write_image(tmp_path / "test/b/x.bmp")
    data.check("folder", path=str(tmp_path))
    found = data.load("folder", path=str(tmp_path))
    assert (found.classes, found.sample_shape) == (3, (3, 224, 224))
    names = [str(file.relative_to(tmp_path)) for file in found.train.files]
    assert names == ["train/B/x.png", "train/a/z.jpg", "train/b/10.PNG", "train/b/2.png"]
    assert found.train.labels.tolist() == [0, 1, 2, 2]
    assert found.test.labels.tolist() == [2]


def test_other_files_and_hidden_ones_are_not_images(tmp_path):
    write_image(tmp_path / "train/a/1.png")
    write_image(tmp_path / "train/a/._1.png")
    write_image(tmp_path / "train/.cache/1.png")
    (tmp_path / "train/a/notes.txt").write_text("no image")
    (tmp_path / "train/README").write_text("no class")
    (tmp_path / "train/a/folder.png").mkdir()
    found = data.load("folder", path=str(tmp_path))
    assert (found.classes, len(found.train), found.test) == (1, 1, None)


def test_an_image_of_the_right_size_is_taken_as_it_is(tmp_path):
    image = write_image(tmp_path / "train/a/1.png", size=(8, 8))
    found = data.load("folder", path=str(tmp_path), image_size=8)
    np.testing.assert_array_equal(pixels(found.train), image)


@pytest.mark.parametrize("turned", [False, True])
def test_the_shorter_side_is_scaled_and_the_middle_is_kept(turned, tmp_path):
    image = np.zeros((4, 12, 3), np.uint8)
    image[:, 2:10] = 200  # the central square, and as far around it as smoothing reaches
    file = tmp_path / "train/a/1.png"
    file.parent.mkdir(parents=True)
    Image.fromarray(image.swapaxes(0, 1) if turned else image).save(file)
    found = data.load("folder", path=str(tmp_path), image_size=2)
    np.testing.assert_array_equal(pixels(found.train), np.full((2, 2, 3), 200))


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "transparent"])
def test_every_kind_of_8_bit_image_becomes_rgb(mode, tmp_path):
    file = tmp_path / "train/a/1.png"
    file.parent.mkdir(parents=True)
    image = Image.new("RGB", (4, 4), (90, 90, 90))
    if mode == "transparent":
        image.quantize(4).save(file, transparency=b"\xff\x80\x00\x00")
    else:
        (image.quantize(4) if mode == "P" else image.convert(mode)).save(file)
    found = data.load("folder", path=str(tmp_path), image_size=4)
    np.testing.assert_allclose(pixels(found.train), 90, atol=2)  # a palette may round


def test_an_unreadable_image_is_named_when_it_is_read(tmp_path):
    write_image(tmp_path / "train/a/1.png")
    broken = tmp_path / "train/a/2.png"
    broken.write_bytes((tmp_path / "train/a/1.png").read_bytes()[:60])
    found = data.load("folder", path=str(tmp_path), image_size=4)
    found.train.batch(np.array([0]))
    with pytest.raises(SynclineError, match="cannot be read") as caught:
        found.train.batch(np.array([0, 1]))
    assert str(broken) in str(caught.value)


def test_a_16_bit_image_is_refused_rather_than_clipped(tmp_path):
    file = tmp_path / "train/a/1.png"
    file.parent.mkdir(parents=True)
    Image.fromarray(np.full((4, 4), 40_000, np.uint16)).save(file)
    found = data.load("folder", path=str(tmp_path), image_size=4)
    with pytest.raises(SynclineError, match="more than 8 bits"):
        found.train.batch(np.array([0]))


def refusal(path):
    messages = []
    for call in (data.check, data.load):
        with pytest.raises(ConfigError) as caught:
            call("folder", path=path)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
    return messages[0]


def test_a_path_is_needed():
    assert refusal(None).startswith("data.path: it is not there")


def test_a_missing_folder_is_refused(tmp_path):
    assert f"{tmp_path / 'train'} cannot be read (No such file" in refusal(str(tmp_path))


def test_a_folder_without_classes_is_refused(tmp_path):
    (tmp_path / "train").mkdir()
    assert f"{tmp_path / 'train'} is empty" in refusal(str(tmp_path))


@pytest.mark.parametrize("split", ["train", "test"])
def test_a_class_without_images_is_refused(split, tmp_path):
    write_image(tmp_path / "train/a/1.png")
    write_image(tmp_path / "train/b/1.png")
    write_image(tmp_path / "test/a/1.png")
    (tmp_path / split / "b").mkdir(exist_ok=True)
    for file in (tmp_path / split / "b").iterdir():
        file.unlink()
    assert f"{tmp_path / split / 'b'} has no images" in refusal(str(tmp_path))


def test_a_class_that_is_only_in_test_is_refused(tmp_path):
    write_image(tmp_path / "train/a/1.png")
    write_image(tmp_path / "test/b/1.png")
    assert "has the class b" in refusal(str(tmp_path))


def test_without_pillow_the_fix_is_an_install(monkeypatch, tmp_path):
    write_image(tmp_path / "train/a/1.png")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install 'syncline[data]'" in refusal(str(tmp_path))
