"""Fashion-MNIST (Xiao 2017, 1708.07747): 60,000 + 10,000 grey images of clothes, 28x28 px.

Four IDX files, gzipped or not, from `path` or from the folder of Debian's package
dataset-fashion-mnist. Any data set in the same form (MNIST itself) can be read with `path`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from syncline.data import idx
from syncline.data.base import DataSet, Facts, GreyImages
from syncline.errors import ConfigError

DEBIAN = Path("/usr/share/datasets/fashion-mnist")
SIZE_PX, CLASSES = 28, 10
WHITE = 255.0
MEAN, STD = 0.286, 0.353  # of the training pixels on a scale from 0 to 1
FIX = "Run apt-get install dataset-fashion-mnist, or set data.path to a folder with the four files."


def load(*, path: str | None = None, image_size: int | None = None) -> DataSet:
    """Read both splits into memory, a byte per pixel; `image_size` scales the images."""

    def split(part: str) -> GreyImages:
        images, labels = _read(path, part)
        return GreyImages(images, labels, white=WHITE, mean=MEAN, std=STD, image_size=image_size)

    size = image_size or SIZE_PX
    return DataSet("fashion-mnist", split("train"), split("t10k"), (1, size, size), CLASSES)


def describe(*, path: str | None = None, image_size: int | None = None) -> Facts:
    """Return their shape and classes. Needs no files."""
    size = image_size or SIZE_PX
    return Facts("fashion-mnist", (1, size, size), CLASSES)


def check(*, path: str | None = None, image_size: int | None = None) -> None:
    """Raise ConfigError if a file is missing or its header is wrong."""
    for part in ("train", "t10k"):
        images, labels = _files(path, part)
        _check_shapes(images, _shape(images), labels, _shape(labels))


def _read(path: str | None, part: str) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    image_file, label_file = _files(path, part)
    # Read both headers first: they show wrong files before 47 MB are unpacked.
    _check_shapes(image_file, _shape(image_file), label_file, _shape(label_file))
    try:
        images = idx.read(image_file)
    except idx.IdxError as error:
        raise _damaged(image_file, str(error)) from error
    try:
        labels = idx.read(label_file)
    except idx.IdxError as error:
        raise _damaged(label_file, str(error)) from error
    if labels.max() >= CLASSES:
        raise _damaged(label_file, f"holds the label {labels.max()} of classes 0 to {CLASSES - 1}")
    return images, labels


def _files(path: str | None, part: str) -> tuple[Path, Path]:
    folder = DEBIAN if path is None else Path(path)
    found = []
    for name in (f"{part}-images-idx3-ubyte", f"{part}-labels-idx1-ubyte"):
        both = (folder / name, folder / f"{name}.gz")
        there = [file for file in both if file.is_file()]
        if not there:
            raise ConfigError(
                "data.path",
                f"{both[0]} is not there, nor with .gz",
                "fashion-mnist reads its images from files",
                FIX,
            )
        found.append(there[0])
    return found[0], found[1]


def _shape(file: Path) -> tuple[int, ...]:
    try:
        return idx.read_shape(file)
    except idx.IdxError as error:
        raise _damaged(file, str(error)) from error


def _check_shapes(
    image_file: Path, images: tuple[int, ...], label_file: Path, labels: tuple[int, ...]
) -> None:
    if len(images) != 3 or images[1:] != (SIZE_PX, SIZE_PX) or images[0] == 0:
        raise _damaged(image_file, f"announces values of shape {images}, not (n, 28, 28)")
    if labels != images[:1]:
        raise _damaged(label_file, f"announces labels of shape {labels} for {images[0]} images")


def _damaged(file: Path, what: str) -> ConfigError:
    return ConfigError("data.path", f"{file} {what}", "the files must be whole and match", FIX)
