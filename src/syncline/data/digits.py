"""Digits: the 1797 images of handwritten digits, 8x8 px, that scikit-learn ships (UCI, 1998).

The file is read without importing scikit-learn: the import costs a second on every rank. The split
does not depend on the job's seed: rows are ordered by `seed_for(0, "digits", row)`; the first 1437
are for training, the other 360 for testing.
"""

from __future__ import annotations

import gzip
import importlib.util
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

from syncline.data.base import DataSet, Facts, GreyImages
from syncline.errors import ConfigError
from syncline.seeds import seed_for

ROWS, TRAIN_ROWS, SIZE_PX, CLASSES = 1797, 1437, 8, 10
WHITE = 16.0  # pixels are 0 to 16
MEAN, STD = 0.305, 0.376  # of all pixels on a scale from 0 to 1


def load(*, image_size: int | None = None) -> DataSet:
    """Read the digits; `image_size` scales them."""
    images, labels = _read(_file())
    order = sorted(range(ROWS), key=lambda row: seed_for(0, "digits", row))

    def split(rows: list[int]) -> GreyImages:
        return GreyImages(
            images[rows], labels[rows], white=WHITE, mean=MEAN, std=STD, image_size=image_size
        )

    size = image_size or SIZE_PX
    train, test = split(order[:TRAIN_ROWS]), split(order[TRAIN_ROWS:])
    return DataSet("digits", train, test, (1, size, size), CLASSES)


def describe(*, image_size: int | None = None) -> Facts:
    """Return their shape and classes. Needs no file."""
    size = image_size or SIZE_PX
    return Facts("digits", (1, size, size), CLASSES)


def check(*, image_size: int | None = None) -> None:
    """Raise ConfigError if the file is not there."""
    _file()


def _file() -> Path:
    found = importlib.util.find_spec("sklearn")
    if found is None or found.origin is None:
        raise ConfigError(
            "data.name",
            "got 'digits'",
            "the digits come with scikit-learn, which is not installed",
            "Run: pip install 'syncline[data]'",
        )
    path = Path(found.origin).parent / "datasets" / "data" / "digits.csv.gz"
    if not path.is_file():
        raise _damaged(path, "is missing")
    return path


def _read(path: Path) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """Read lines of 64 pixels and the digit."""
    try:
        with gzip.open(path, "rt", encoding="ascii") as lines:
            table = np.loadtxt(lines, delimiter=",", dtype=np.uint8, ndmin=2)
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise _damaged(path, f"cannot be read ({error})") from error
    if table.shape != (ROWS, SIZE_PX**2 + 1):
        raise _damaged(path, f"holds {table.shape[0]} rows of {table.shape[1]} values")
    if table[:, :-1].max() > WHITE or table[:, -1].max() >= CLASSES:
        raise _damaged(path, "holds values out of range")
    return table[:, :-1].reshape(ROWS, SIZE_PX, SIZE_PX), table[:, -1]


def _damaged(path: Path, what: str) -> ConfigError:
    return ConfigError(
        "data.name",
        f"{path} {what}",
        f"the digits are {ROWS} rows of {SIZE_PX**2 + 1} small numbers",
        "Reinstall it: pip install --force-reinstall scikit-learn",
    )
