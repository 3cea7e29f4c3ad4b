"""The loss of a job: by name, or a user's own function of output and targets.

Named losses are torch's, with torch's defaults. Three things that torch leaves to the user are
decided here, so that nothing is computed that was not meant: shapes that torch would broadcast are
refused; classes may be the last dimension of the output, as language models have them; and types
of targets that can only mean one thing are converted. No torch is imported to check a name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from syncline.errors import ConfigError, SynclineError
from syncline.own_functions import check_name, failed, find, is_own, nearest

if TYPE_CHECKING:
    import torch

DEFAULT = "cross_entropy"

CLASSES = {"cross_entropy": "cross_entropy", "nll": "nll_loss"}
"""Losses of scores of classes: name here, and in torch.nn.functional."""
ELEMENTWISE = {
    "bce_with_logits": "binary_cross_entropy_with_logits",
    "huber": "huber_loss",
    "l1": "l1_loss",
    "mse": "mse_loss",
    "smooth_l1": "smooth_l1_loss",
}
"""Losses that compare output and targets of equal shape, element by element."""

IGNORED = -100
"""A target that does not count: torch's default."""


class Score(NamedTuple):
    """The loss of some samples in sum, and how much it weighs; and how many answers are right.

    `counted` is the number of answers that can be right or wrong: 0 if accuracy has no meaning.
    """

    loss: float
    weight: float
    correct: float
    counted: float


def names() -> list[str]:
    """List the losses that have a name."""
    return sorted([*CLASSES, *ELEMENTWISE])


def check(name: str) -> None:
    """Raise ConfigError if there is no such loss. Imports neither torch nor the user's module."""
    if is_own(name):
        check_name("model.loss", name)
    elif name not in names():
        fix = nearest(name, names()) or f"Choose from {', '.join(names())}."
        fix += ' Your own is named "package.module:function".'
        raise ConfigError("model.loss", f"got {name!r}", "there is no such loss", fix)


def loss_of(name: str) -> Loss:
    """Return the loss of a job, which is called with the model's output and the targets."""
    check(name)
    if is_own(name):
        return _OwnLoss(name, _find_own(name))
    from torch.nn import functional

    if name in CLASSES:
        return _ClassLoss(name, getattr(functional, CLASSES[name]))
    return _ElementLoss(name, getattr(functional, ELEMENTWISE[name]))


class Loss:
    """A loss: the mean over a batch."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.name = name
        self._function = function

    def __call__(self, output: Any, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of a batch, to call backward on."""
        raise NotImplementedError

    def score(self, output: Any, targets: torch.Tensor) -> Score:
        """Return the loss of a batch for a mean over several batches, and the right answers."""
        raise NotImplementedError

    def _score_without_answers(self, output: Any, targets: torch.Tensor) -> Score:
        """Return the score where accuracy has no meaning: every sample weighs the same."""
        number = len(targets)
        return Score(self(output, targets).item() * number, number, 0, 0)

    def _refuse(self, output: Any, targets: torch.Tensor, rule: str, fix: str) -> ConfigError:
        shape = getattr(output, "shape", None)
        what = type(output).__name__ if shape is None else f"shape {tuple(shape)}"
        kind = str(targets.dtype).removeprefix("torch.")
        found = f"{self.name} got an output of {what} and targets of shape {tuple(targets.shape)}"
        return ConfigError("model.loss", f"{found}, {kind}", rule, fix)


class _ClassLoss(Loss):
    """A loss of scores of classes, against the numbers of the right ones or probabilities."""

    def __call__(self, output: Any, targets: torch.Tensor) -> torch.Tensor:
        return self._function(*self._arrange(output, targets))

    def score(self, output: Any, targets: torch.Tensor) -> Score:
        output, targets = self._arrange(output, targets)
        if targets.is_floating_point():
            return self._score_without_answers(output, targets)
        counted = (targets != IGNORED).sum().item()
        correct = (output.argmax(dim=1) == targets).sum().item()
        total = self._function(output, targets, reduction="sum").item()
        return Score(total, counted, correct, counted)

    def _arrange(self, output: Any, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return output and targets as torch wants them: classes in dimension 1, int64."""
        if not hasattr(output, "dim"):
            fix = 'Return a tensor from the model, or set model.loss = "package.module:function".'
            raise self._refuse(output, targets, "a named loss compares tensors", fix)
        if targets.is_floating_point():
            if self.name == DEFAULT and output.shape == targets.shape and output.dim() > 1:
                return output, targets  # probabilities of the classes
            fix = "Return integer targets, or choose a loss of numbers such as mse."
            raise self._refuse(output, targets, "targets are the numbers of classes", fix)
        if output.dim() == 2 and targets.dim() == 1 and len(output) == len(targets):
            return output, targets.long()
        is_last = output.dim() > 1 and output.shape[:-1] == targets.shape
        is_second = output.dim() > 1 and (*output.shape[:1], *output.shape[2:]) == tuple(
            targets.shape
        )
        if is_last and is_second:
            rule = "then either dimension may hold the classes"
            fix = 'Write a loss of your own: model.loss = "package.module:function".'
            raise self._refuse(output, targets, rule, fix)
        if is_last:
            return output.flatten(0, -2), targets.flatten().long()
        if is_second:
            return output, targets.long()
        fix = "Give the output one dimension more than the targets, last or second."
        raise self._refuse(output, targets, "every target has a score for each class", fix)


class _ElementLoss(Loss):
    """A loss of numbers against numbers."""

    def __call__(self, output: Any, targets: torch.Tensor) -> torch.Tensor:
        if getattr(output, "shape", None) != targets.shape:
            rule = "the two must be of one shape: torch would repeat one of them"
            fix = "Reshape the output in the model, or the targets in the data."
            raise self._refuse(output, targets, rule, fix)
        return self._function(output, targets.to(output.dtype))

    def score(self, output: Any, targets: torch.Tensor) -> Score:
        return self._score_without_answers(output, targets)


class _OwnLoss(Loss):
    """A user's own function."""

    def __call__(self, output: Any, targets: torch.Tensor) -> torch.Tensor:
        loss = self._function(output, targets)
        if getattr(loss, "numel", lambda: 0)() != 1 or not hasattr(loss, "backward"):
            shape = getattr(loss, "shape", None)
            kind = type(loss).__name__ + ("" if shape is None else f" of shape {tuple(shape)}")
            rule, fix = "a loss is a tensor with one number", "Return the mean over the batch."
            raise ConfigError("model.loss", f"{self.name} returned {kind}", rule, fix)
        return loss

    def score(self, output: Any, targets: torch.Tensor) -> Score:
        return self._score_without_answers(output, targets)


def _find_own(name: str) -> Callable[..., Any]:
    function = find("model.loss", name)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return function  # some functions written in C do not say what they take
    try:
        signature.bind("output", "targets")
    except TypeError:
        rule = "a loss is called with the model's output and the targets"
        fix = "Name a function of these two."
        raise ConfigError("model.loss", f"got {name!r}", rule, fix) from None
    return function


def try_loss(loss: Loss, output: Any, targets: torch.Tensor) -> torch.Tensor:
    """Return the loss; a failure of a user's own function becomes one line."""
    try:
        return loss(output, targets)
    except SynclineError:
        raise
    except Exception as error:
        rule = "it gets the model's output and the targets"
        raise failed("model.loss", loss.name, error, rule) from error
