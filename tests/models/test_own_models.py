"""A network of a user's own: what its function may return."""

from __future__ import annotations

import pytest

from syncline import models
from syncline.errors import ConfigError


def refusal(call, *arguments):
    with pytest.raises(ConfigError) as caught:
        call(*arguments)
    return str(caught.value)


def test_a_function_or_a_class_makes_the_network(own):
    module = own(
        "from torch import nn\n"
        "def make(width): return nn.Linear(3, width)\n"
        "class Net(nn.Linear):\n    def __init__(self, width): super().__init__(2, width)\n"
    )
    assert models.build_own(f"{module}:make", {"width": 5}).weight.shape == (5, 3)
    assert models.build_own(f"{module}:Net", {"width": 5}).weight.shape == (5, 2)


@pytest.mark.parametrize(
    ("body", "kind"), [("3", "int"), ("None", "NoneType"), ("nn.Linear", "the class Linear")]
)
def test_what_is_no_network_is_refused(own, body, kind):
    module = own(f"from torch import nn\ndef make(): return {body}\n")
    assert refusal(models.build_own, f"{module}:make", {}) == (
        f"model.name: {module}:make returned {kind}, but it must return an nn.Module."
        " Return the network itself."
    )


def test_a_network_with_nothing_to_train_is_refused(own):
    module = own("from torch import nn\ndef make(): return nn.Linear(2, 2).requires_grad_(False)\n")
    line = refusal(models.build_own, f"{module}:make", {})
    assert line.startswith(f"model.name: {module}:make returned a network without any, but")


def test_settings_without_effect_are_refused():
    assert refusal(models.check_own, "a:b", None, 10) == (
        "model.classes: got 10, but it has no effect on a network of your own. Use model.options."
    )
    assert refusal(models.check_own, "a:b", 32, None) == (
        "model.image_size: got 32, but it has no effect on a network of your own."
        " Use data.image_size or model.options."
    )


def test_checking_a_name_imports_nothing():
    models.check("no_such_module:make", (3, 32, 32), 10, {"anything": 1})
    assert "no_such_module:make" not in models.MODELS
