"""Data of a user's own: what a function named in a job returned, as two splits.

The function returns (train, test); test may be None. A split is a pair of tensors (inputs,
targets), or a data set with a length whose items are pairs (input, target). Inputs and targets may
be of any type and shape. This is the only file of the folder that imports torch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, TensorDataset, default_collate

from syncline import own_functions
from syncline.data.base import DataSet, Indices, checked
from syncline.errors import ConfigError, SynclineError

_RETURNS = "(train, test), where test may be None"
_SPLIT = "a split is a pair of tensors (inputs, targets) or a data set with a length"


class TensorPair:
    """A split that is two tensors; a sample is a row of both."""

    def __init__(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        self._inputs = inputs.detach()
        self._targets = targets.detach()

    def __len__(self) -> int:
        return len(self._targets)

    def batch(self, indices: Indices) -> tuple[torch.Tensor, torch.Tensor]:
        rows = torch.from_numpy(checked(indices, len(self)))
        return self._inputs[rows], self._targets[rows]


class MapStyle:
    """A split that is a data set whose samples are read by number and stacked to batches."""

    def __init__(self, name: str, samples: Any) -> None:
        self._name = name
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def batch(self, indices: Indices) -> tuple[torch.Tensor, torch.Tensor]:
        rows = checked(indices, len(self)).tolist()
        # As DataLoader does: some data sets read many samples at once.
        many = getattr(self._samples, "__getitems__", None)
        found = many(rows) if many else [self._samples[row] for row in rows]
        if not all(isinstance(sample, tuple | list) and len(sample) == 2 for sample in found):
            raise self._not_a_pair(found[0])
        inputs, targets = default_collate([tuple(sample) for sample in found])
        if not (isinstance(inputs, torch.Tensor) and isinstance(targets, torch.Tensor)):
            raise self._not_a_pair(found[0])
        return inputs, targets

    def _not_a_pair(self, sample: Any) -> ConfigError:
        kinds = [type(one).__name__ for one in sample] if isinstance(sample, tuple | list) else ()
        kind = f"({', '.join(kinds)})" if kinds else type(sample).__name__
        return ConfigError(
            "data.name",
            f"a sample of {self._name} is {kind}",
            "a sample is a pair (input, target) of tensors, arrays or numbers",
            "Return such pairs from the data set.",
        )


def load(name: str, options: dict[str, Any]) -> DataSet:
    """Call the user's function and return what it made as a data set."""
    made = own_functions.call("data", name, options, _RETURNS)
    if not isinstance(made, tuple | list) or len(made) != 2:
        kind = f"{len(made)} values" if isinstance(made, tuple | list) else type(made).__name__
        fix = "Return two splits, or one and None."
        raise ConfigError("data.name", f"{name} returned {kind}", f"it must return {_RETURNS}", fix)
    train = _split(name, "train", made[0])
    test = None if made[1] is None else _split(name, "test", made[1])
    first = _first_input(name, train)
    kind = str(first.dtype).removeprefix("torch.")
    return DataSet(name, train, test, tuple(first.shape[1:]), None, kind, is_own=True)


def _first_input(name: str, split: TensorPair | MapStyle) -> torch.Tensor:
    try:
        return split.batch(np.zeros(1, dtype=np.int64))[0]
    except SynclineError:
        raise
    except Exception as error:
        rule = "samples are read by number, from 0"
        raise own_functions.failed(
            "data.name", f"reading a sample of {name}", error, rule
        ) from error


def _split(name: str, part: str, made: Any) -> TensorPair | MapStyle:
    found = f"{name} returned {type(made).__name__} as {part}"
    if isinstance(made, TensorDataset) and len(made.tensors) == 2:
        made = made.tensors  # the same samples, read many at once
    if isinstance(made, tuple | list) and any(isinstance(one, torch.Tensor) for one in made):
        if len(made) != 2 or not all(isinstance(one, torch.Tensor) for one in made):
            kinds = ", ".join(type(one).__name__ for one in made)
            fix = f"Return ((inputs, targets), {'None' if part == 'train' else '...'})."
            raise ConfigError("data.name", f"{name} returned ({kinds}) as {part}", _SPLIT, fix)
        inputs, targets = made
        if not inputs.dim() or not targets.dim() or len(inputs) != len(targets):
            shapes = f"inputs of shape {tuple(inputs.shape)} and targets of {tuple(targets.shape)}"
            fix = "Give both as many rows as there are samples."
            raise ConfigError(
                "data.name", f"{part} has {shapes}", "each sample has one of each", fix
            )
        split: TensorPair | MapStyle = TensorPair(inputs, targets)
    elif (
        isinstance(made, torch.Tensor | IterableDataset | str | dict)
        or not hasattr(made, "__len__")
        or not hasattr(made, "__getitem__")
    ):
        fix = "Return ((inputs, targets), None), or two data sets whose samples have numbers."
        raise ConfigError("data.name", found, _SPLIT, fix)
    else:
        split = MapStyle(name, made)
    if not len(split):
        fix = "Return None for it." if part == "test" else "Look at data.options."
        raise ConfigError("data.name", f"{part} of {name} is empty", "a split has samples", fix)
    return split
