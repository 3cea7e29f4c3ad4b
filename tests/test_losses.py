"""Losses: torch's by name, without its traps, and users' own."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from syncline import losses
from syncline.errors import ConfigError
from syncline.losses import loss_of


def refusal(call, *arguments):
    with pytest.raises(ConfigError) as caught:
        call(*arguments)
    line = str(caught.value)
    assert line.startswith("model.loss: ")
    return line.removeprefix("model.loss: ")


def scores(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), requires_grad=True)


def test_every_name_is_torchs_function():
    for name in losses.names():
        loss = loss_of(name)
        if name in losses.CLASSES:
            output, targets = scores(4, 3), torch.tensor([0, 1, 2, 1])
        else:
            output, targets = scores(4, 3), torch.rand(4, 3)
        expected = getattr(functional, {**losses.CLASSES, **losses.ELEMENTWISE}[name])
        assert torch.equal(loss(output, targets), expected(output, targets)), name


def test_an_unknown_name_gets_the_nearest_one():
    assert refusal(loss_of, "mean_square") == (
        "got 'mean_square', but there is no such loss. Choose from bce_with_logits, cross_entropy,"
        ' huber, l1, mse, nll, smooth_l1. Your own is named "package.module:function".'
    )
    assert "Did you mean cross_entropy?" in refusal(loss_of, "crossentropy")


def test_classes_may_come_last_as_language_models_have_them_or_second():
    output, targets = scores(2, 5, 7), torch.randint(7, (2, 5))
    expected = functional.cross_entropy(output.transpose(1, 2), targets)
    torch.testing.assert_close(loss_of("cross_entropy")(output, targets), expected)
    second = output.transpose(1, 2)
    torch.testing.assert_close(loss_of("cross_entropy")(second, targets), expected)


def test_where_either_dimension_may_hold_the_classes_it_is_refused():
    line = refusal(loss_of("cross_entropy"), scores(2, 5, 5), torch.randint(5, (2, 5)))
    assert line.startswith("cross_entropy got an output of shape (2, 5, 5) and targets of shape")
    assert "but then either dimension may hold the classes." in line


def test_small_integers_and_probabilities_are_targets_too():
    loss, output = loss_of("cross_entropy"), scores(4, 3)
    whole = torch.tensor([0, 1, 2, 1])
    assert torch.equal(loss(output, whole.to(torch.uint8)), loss(output, whole))
    shares = torch.full((4, 3), 1 / 3)
    assert torch.equal(loss(output, shares), functional.cross_entropy(output, shares))
    assert loss.score(output, shares).counted == 0


def test_numbers_in_the_place_of_classes_are_refused():
    line = refusal(loss_of("cross_entropy"), scores(4, 1), torch.rand(4))
    assert line.startswith("cross_entropy got an output of shape (4, 1) and targets of shape (4,),")
    assert "but targets are the numbers of classes" in line
    assert "every target has a score" in refusal(
        loss_of("cross_entropy"), scores(4, 3), torch.zeros(5, dtype=torch.int64)
    )


def test_shapes_that_torch_would_broadcast_are_refused():
    assert refusal(loss_of("mse"), scores(4, 1), torch.rand(4)) == (
        "mse got an output of shape (4, 1) and targets of shape (4,), float32, but the two must be"
        " of one shape: torch would repeat one of them."
        " Reshape the output in the model, or the targets in the data."
    )


def test_targets_of_another_type_are_converted():
    loss, output = loss_of("bce_with_logits"), scores(4)
    answers = torch.tensor([True, False, True, True])
    assert torch.equal(loss(output, answers), loss(output, answers.float()))
    assert loss(output, answers.double()).dtype == torch.float32


def test_an_output_that_is_no_tensor_needs_a_loss_of_its_own():
    assert "a named loss compares tensors" in refusal(
        loss_of("cross_entropy"), (scores(2, 3),), torch.zeros(2, dtype=torch.int64)
    )
    assert "of one shape" in refusal(loss_of("mse"), (scores(2, 3),), torch.zeros(2, 3))


def test_the_score_of_classes_counts_right_answers_and_leaves_out_ignored_ones():
    output = torch.tensor([[2.0, 0.0], [0.0, 2.0], [2.0, 0.0]])
    found = loss_of("cross_entropy").score(output, torch.tensor([0, 0, -100]))
    assert (found.weight, found.correct, found.counted) == (2, 1, 2)
    right, wrong = -math.log(1 / (1 + math.exp(-2))), -math.log(1 / (1 + math.exp(2)))
    assert found.loss == pytest.approx(right + wrong)


def test_the_score_of_numbers_has_no_answers():
    found = loss_of("mse").score(torch.tensor([1.0, 3.0]), torch.tensor([0.0, 0.0]))
    assert found == (10.0, 2, 0, 0)


def test_a_function_of_ones_own_is_called_with_output_and_targets(own):
    module = own("def loss(output, targets): return (output['y'] - targets).abs().sum()\n")
    loss = loss_of(f"{module}:loss")
    assert loss({"y": torch.tensor([1.0, 5.0])}, torch.tensor([0.0, 0.0])).item() == 6.0


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("return output", "returned Tensor of shape (2,), but a loss is a tensor with one number."),
        ("return 3.0", "returned float, but a loss is a tensor with one number."),
        ("return None", "returned NoneType, but a loss is a tensor with one number."),
    ],
)
def test_what_is_no_loss_is_refused(own, text, line):
    module = own(f"def loss(output, targets): {text}\n")
    assert line in refusal(loss_of(f"{module}:loss"), torch.ones(2), torch.ones(2))


def test_a_function_of_other_arguments_is_refused(own):
    module = own("def loss(output): return output.sum()\n")
    line = refusal(loss_of, f"{module}:loss")
    assert line.endswith(
        "but a loss is called with the model's output and the targets."
        " Name a function of these two."
    )
