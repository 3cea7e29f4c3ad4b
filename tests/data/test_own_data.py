"""Data of a user's own: pairs of tensors, data sets by number, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from syncline import data
from syncline.errors import ConfigError


def load(own, body, before=""):
    module = own(
        f"import numpy as np, torch\nfrom torch.utils.data import *\n{before}\n"
        f"def make(): return {body}\n"
    )
    return data.load(f"{module}:make")


def rows(*numbers):
    return np.array(numbers)


def test_a_pair_of_tensors_is_a_split_of_any_type(own):
    found = load(own, "((torch.arange(12).reshape(4, 3), torch.arange(4.0)), None)")
    assert (found.test, found.classes, found.is_own) == (None, None, True)
    assert (found.sample_shape, found.sample_dtype, len(found.train)) == ((3,), "int64", 4)
    inputs, targets = found.train.batch(rows(3, 1))
    assert inputs.tolist() == [[9, 10, 11], [3, 4, 5]]
    assert targets.tolist() == [3.0, 1.0]
    inputs.zero_()
    assert found.train.batch(rows(3))[0].tolist() == [[9, 10, 11]], "a batch is new memory"


@pytest.mark.parametrize(
    "body",
    [
        "([(torch.ones(2) * k, k) for k in range(5)], None)",
        "([[np.ones(2, dtype=np.float32) * k, k] for k in range(5)], None)",
        "(TensorDataset(torch.ones(5, 2) * torch.arange(5.0)[:, None], torch.arange(5)), None)",
        "(Subset([(torch.ones(2) * k, k) for k in range(9)], range(5)), None)",
    ],
)
def test_a_data_set_with_a_length_is_a_split(own, body):
    found = load(own, body)
    inputs, targets = found.train.batch(rows(4, 0))
    assert inputs.tolist() == [[4.0, 4.0], [0.0, 0.0]]
    assert inputs.dtype == torch.float32
    assert targets.tolist() == [4, 0]
    assert targets.dtype == torch.int64
    assert len(found.train) == 5
    with pytest.raises(IndexError):
        found.train.batch(rows(-1))


PAIR = "(torch.ones(4, 2), torch.ones(4))"


@pytest.mark.parametrize(
    ("body", "line"),
    [
        ("7", "returned int, but it must return (train, test), where test may be None. Return two"),
        ("(1, 2, 3)", "returned 3 values, but it must return (train, test), where"),
        ("None", "returned NoneType, but it must return (train, test)"),
        (PAIR, "returned Tensor as train, but a split is a pair of tensors (inputs, targets) or"),
        ("(None, None)", "returned NoneType as train, but a split is a pair"),
        (f"({PAIR}, 5)", "returned int as test, but a split is a pair"),
        (f"({PAIR}, iter([]))", "returned list_iterator as test, but a split is a pair"),
        (
            "((torch.ones(4, 2), np.ones(4)), None)",
            "returned (Tensor, ndarray) as train, but a split is a pair of tensors",
        ),
        ("([], None)", "is empty, but a split has samples. Look at data.options."),
        (f"({PAIR}, [])", "is empty, but a split has samples. Return None for it."),
        ("([1, 2], None)", "is int, but a sample is a pair (input, target) of tensors, arrays or"),
        ("([('a', 'b')], None)", "is (str, str), but a sample is a pair (input, target)"),
        ("([(1, 2, 3)], None)", "is (int, int, int), but a sample is a pair (input, target)"),
    ],
)
def test_anything_else_is_refused(own, body, line):
    with pytest.raises(ConfigError) as caught:
        load(own, body)
    assert str(caught.value).startswith("data.name: ")
    assert line in str(caught.value)


def test_inputs_and_targets_have_one_row_each(own):
    with pytest.raises(ConfigError, match="each sample has one of each"):
        load(own, "((torch.ones(4, 2), torch.ones(3)), None)")


def test_a_sample_that_cannot_be_read_is_one_line(own):
    before = "class Bad(Dataset):\n    def __len__(self): return 3\n"
    before += "    def __getitem__(self, row): return {}[row]\n"
    with pytest.raises(ConfigError, match=r"reading a sample of own_\d+:make failed with KeyError"):
        load(own, "(Bad(), None)", before)


@pytest.mark.parametrize(
    ("key", "value"), [("path", "x"), ("classes", 3), ("samples", 9), ("image_size", 8)]
)
def test_settings_of_other_data_have_no_effect(key, value):
    with pytest.raises(ConfigError) as caught:
        data.check("mine:make", **{key: value})
    assert str(caught.value) == (
        f"data.{key}: got {value!r}, but it has no effect on mine:make."
        " Remove it; mine:make takes data.options."
    )


def test_options_are_for_own_data_only():
    with pytest.raises(ConfigError) as caught:
        data.check("digits", options={"size": 3})
    assert str(caught.value) == (
        "data.options.size: got 3, but options are for data of your own, and digits has none."
        " Remove it."
    )
