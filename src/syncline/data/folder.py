"""Image folders: path/train/<class>/*.png, *.jpg and so on, and path/test/ likewise if it is there.

Classes and the images of a class are sorted by name, by code points, so that every machine gets
the same numbers. Files with other endings and names that begin with a dot are skipped. Images are
read when a batch needs them, converted to RGB, scaled so that the shorter side is `image_size`, cut
to the central square and normalised with ImageNet's usual constants. Pillow reads them; it is
imported when the first image is read.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from syncline.data.base import DataSet, Facts, Indices, Labels, Samples, checked
from syncline.errors import ConfigError, SynclineError

ENDINGS = (".bmp", ".jpeg", ".jpg", ".png", ".ppm", ".webp")
# Of ImageNet's training pixels, by channel: what torchvision and most published weights use.
MEAN = np.array([0.485, 0.456, 0.406], np.float32)
STD = np.array([0.229, 0.224, 0.225], np.float32)
SIZE_PX = 224
LAYOUT = "Put images into train/<class>/, and into test/<class>/ if there are any to test on."


@dataclass(frozen=True)
class ImageFiles:
    """A split: the files of all classes, one class after the other."""

    files: list[Path]
    labels: Labels
    image_size: int

    def __len__(self) -> int:
        return len(self.files)

    def batch(self, indices: Indices) -> tuple[Samples, Labels]:
        rows = checked(indices, len(self))
        samples = np.empty((len(rows), 3, self.image_size, self.image_size), np.float32)
        for sample, row in zip(samples, rows, strict=True):
            pixels = _read(self.files[row], self.image_size).astype(np.float32)
            sample[...] = ((pixels / 255 - MEAN) / STD).transpose(2, 0, 1)
        return samples, self.labels[rows]


def load(*, path: str | None = None, image_size: int = SIZE_PX) -> DataSet:
    """List the images below `path`; reads none of them."""
    splits = _find(path)
    classes = sorted(splits["train"])
    train = _split(splits["train"], classes, image_size)
    test = _split(splits["test"], classes, image_size) if "test" in splits else None
    return DataSet("folder", train, test, (3, image_size, image_size), len(classes))


def describe(*, path: str | None = None, image_size: int = SIZE_PX) -> Facts:
    """Return the images' shape, and how many classes there are, if the folder is there."""
    train = None if path is None else Path(path) / "train"
    classes = len(_class_folders(train)) if train is not None and train.is_dir() else None
    return Facts("folder", (3, image_size, image_size), classes)


def check(*, path: str | None = None, image_size: int = SIZE_PX) -> None:
    """Raise ConfigError if folders are missing or empty; looks for one image a class only."""
    _find(path)


def _find(path: str | None) -> dict[str, dict[str, Path]]:
    """Return the class folders of each split, after checking them."""
    if path is None:
        raise ConfigError(
            "data.path", "it is not there", "folder reads images from a folder", LAYOUT
        )
    if importlib.util.find_spec("PIL") is None:
        raise ConfigError(
            "data.name",
            "got 'folder'",
            "images are read with Pillow, which is not installed",
            "Run: pip install 'syncline[data]'",
        )
    root = Path(path)
    splits = {"train": _class_folders(root / "train")}
    if (root / "test").exists():
        splits["test"] = _class_folders(root / "test")
        if unknown := sorted(set(splits["test"]) - set(splits["train"])):
            raise ConfigError(
                "data.path",
                f"{root / 'test'} has the class {unknown[0]}",
                "every class of test must be in train",
                "Remove it, or add images of it to train.",
            )
    return splits


def _class_folders(folder: Path) -> dict[str, Path]:
    found = {entry.name: Path(entry.path) for entry in _entries(folder) if entry.is_dir()}
    if not found:
        raise ConfigError("data.path", f"{folder} is empty", "each class is a folder", LAYOUT)
    for name in sorted(found):
        if next(_images(found[name]), None) is None:
            raise ConfigError(
                "data.path",
                f"{found[name]} has no images",
                f"each class has at least one file that ends in {', '.join(ENDINGS)}",
                "Add images or remove the folder.",
            )
    return found


def _split(folders: dict[str, Path], classes: list[str], image_size: int) -> ImageFiles:
    files: list[Path] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        of_class = sorted(_images(folders[name])) if name in folders else []
        files += of_class
        labels += [label] * len(of_class)
    return ImageFiles(files, np.array(labels, np.int64), image_size)


def _images(folder: Path) -> Iterator[Path]:
    for entry in _entries(folder):
        if entry.name.lower().endswith(ENDINGS) and entry.is_file():
            yield Path(entry.path)


def _entries(folder: Path) -> Iterator[os.DirEntry[str]]:
    """List a folder in no particular order, without names that begin with a dot."""
    try:
        with os.scandir(folder) as entries:
            yield from (entry for entry in entries if not entry.name.startswith("."))
    except OSError as error:
        raise ConfigError(
            "data.path",
            f"{folder} cannot be read ({error.strerror})",
            "images lie in folders",
            LAYOUT,
        ) from error


def _read(file: Path, size: int) -> npt.NDArray[np.uint8]:
    from PIL import Image, ImageOps

    try:
        with Image.open(file) as image:
            if image.mode.startswith(("I", "F")):
                # Pillow would clip these to white without a warning.
                raise ValueError(f"its pixels have more than 8 bits, mode {image.mode}")
            # Via RGBA: Pillow warns if a palette with transparency is converted to RGB directly.
            opaque = image.convert("RGBA") if "transparency" in image.info else image
            square = ImageOps.fit(opaque.convert("RGB"), (size, size), Image.Resampling.BILINEAR)
            return np.asarray(square)
    # A damaged file may make Pillow raise almost anything; the user needs the file's name.
    except Exception as error:
        raise SynclineError(
            f"{file}: the image cannot be read ({error})."
            " Replace it with a whole 8-bit image, or remove it and start again."
        ) from error
