"""Small files of each kind, written for tests."""

from __future__ import annotations

import gzip
import struct

import numpy as np
from PIL import Image


def idx_bytes(array):
    """Write an array of bytes as IDX."""
    return (
        bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + bytes(array)
    )


def write_fashion(folder, *, train, test, zipped=True):
    """Write the four files of Fashion-MNIST with random images; give the arrays by file."""
    random = np.random.default_rng(0)
    arrays = {}
    for part, rows in (("train", train), ("t10k", test)):
        images = random.integers(0, 256, (rows, 28, 28), np.uint8)
        arrays[f"{part}-images-idx3-ubyte"] = images
        arrays[f"{part}-labels-idx1-ubyte"] = np.arange(rows, dtype=np.uint8) % 10
    for name, array in arrays.items():
        content = idx_bytes(np.ascontiguousarray(array))
        if zipped:
            (folder / f"{name}.gz").write_bytes(gzip.compress(content))
        else:
            (folder / name).write_bytes(content)
    return arrays


def write_image(file, *, seed=0, size=(10, 8), mode="RGB"):
    """Write a random image of this size (width, height)."""
    channels = len(mode)
    shape = (size[1], size[0], channels) if channels > 1 else (size[1], size[0])
    file.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, shape, np.uint8)
    Image.fromarray(pixels).save(file)
    return pixels
