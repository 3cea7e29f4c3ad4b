"""Networks by name: those of the papers, two small ones for quick work, and users' own.

Importing this package does not import torch: the command line checks names, options and image
sizes first (`check`); only `build` loads torch. A network is a plain `nn.Module` whose layers are
registered in the order in which forward uses them, and its initial weights come from torch's
global generator only.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from syncline.errors import ConfigError
from syncline.own_functions import call, check_name, is_own

if TYPE_CHECKING:
    import torch

MODELS: dict[str, str] = {
    "alexnet": "syncline.models.alexnet:alexnet",
    "cd-dnn": "syncline.models.cd_dnn:cd_dnn",
    "cnn": "syncline.models.cnn:cnn",
    "googlenet": "syncline.models.googlenet:googlenet",
    "mlp": "syncline.models.mlp:mlp",
    "overfeat-fast": "syncline.models.overfeat:overfeat_fast",
    "resnet-18": "syncline.models.resnet:resnet_18",
    "resnet-20": "syncline.models.resnet:resnet_20",
    "resnet-50": "syncline.models.resnet:resnet_50",
    "vgg-a": "syncline.models.vgg:vgg_a",
}

OPTIONS: dict[str, tuple[str, ...]] = {
    "alexnet": ("hidden", "dropout"),
    "cd-dnn": ("hidden",),
    "cnn": ("hidden", "dropout", "batch_norm"),
    "googlenet": ("dropout",),
    "mlp": ("hidden", "dropout", "batch_norm"),
    "overfeat-fast": ("hidden", "dropout"),
    "resnet-18": (),
    "resnet-20": (),
    "resnet-50": (),
    "vgg-a": ("hidden", "dropout"),
}
"""The options of each network: `hidden`, the widths of the hidden fully connected layers;
`dropout`, the chance of dropping a value; `batch_norm`, true or false."""

LEAST_PX: dict[str, int] = {
    "alexnet": 63,
    "cnn": 4,
    "googlenet": 31,
    "overfeat-fast": 71,
    "resnet-18": 1,
    "resnet-20": 1,
    "resnet-50": 1,
    "vgg-a": 32,
}
"""Least height and width at which a pixel is left after the last pooling. A network that is not
listed takes samples of any shape."""

PUBLISHED: dict[str, tuple[tuple[int, ...], int]] = {
    "alexnet": ((3, 224, 224), 1000),
    "cd-dnn": ((429,), 9304),
    "googlenet": ((3, 224, 224), 1000),
    "overfeat-fast": ((3, 231, 231), 1000),
    "resnet-18": ((3, 224, 224), 1000),
    "resnet-20": ((3, 32, 32), 10),
    "resnet-50": ((3, 224, 224), 1000),
    "vgg-a": ((3, 224, 224), 1000),
}
"""The sample shape and number of classes of each network's paper."""


def names() -> list[str]:
    """List the networks that can be built."""
    return sorted(MODELS)


def check(
    name: str, sample_shape: tuple[int, ...], classes: int, options: Mapping[str, Any]
) -> None:
    """Raise the ConfigError that `build` would raise. Needs no torch.

    Of a user's own network nothing is known here but its name.
    """
    if is_own(name):
        check_name("model.name", name)
        return
    if name not in MODELS:
        fix = _nearest(name, MODELS)
        raise ConfigError("model.name", f"got {name!r}", "there is no such model", fix)
    for option, value in options.items():
        if option not in OPTIONS[name]:
            fix = _nearest(option, OPTIONS[name])
            raise ConfigError(
                f"model.options.{option}", f"got {value!r}", f"{name} has no such option", fix
            )
        _check_value(option, value)
    if classes < 1:
        raise ConfigError(
            "model.classes", f"got {classes}", "a network has at least one output", "Use 1 or more."
        )
    if not sample_shape or min(sample_shape) < 1:
        raise ConfigError(
            "model.sample_shape",
            f"got {sample_shape}",
            "a sample has at least one value",
            "Write (features,) or (channels, height, width).",
        )
    if name not in LEAST_PX:
        return
    if len(sample_shape) != 3:
        raise ConfigError(
            "model.name",
            f"got {name!r} for samples of shape {sample_shape}",
            "this network takes images (channels, height, width)",
            "Choose mlp or cd-dnn, or a data set of images.",
        )
    if min(sample_shape[1:]) < LEAST_PX[name]:
        raise ConfigError(
            "model.image_size",
            f"got {sample_shape[1]}x{sample_shape[2]} px",
            f"{name} has nothing left to pool below {LEAST_PX[name]} px",
            f"Use image_size {LEAST_PX[name]} or more, or a model with fewer poolings such as cnn.",
        )


def check_own(name: str, image_size: int | None, classes: int | None) -> None:
    """Raise ConfigError if this cannot be a user's own network with these settings."""
    check_name("model.name", name)
    for key, value in (("image_size", image_size), ("classes", classes)):
        if value is not None:
            instead = "data.image_size or model.options" if key == "image_size" else "model.options"
            rule = "it has no effect on a network of your own"
            raise ConfigError(f"model.{key}", f"got {value}", rule, f"Use {instead}.")


def build_own(name: str, options: Mapping[str, Any]) -> torch.nn.Module:
    """Return the network that a user's own function makes, called with these options."""
    import torch

    made = call("model", name, options, "an nn.Module")
    if not isinstance(made, torch.nn.Module):
        kind = f"the class {made.__name__}" if isinstance(made, type) else type(made).__name__
        rule, fix = "it must return an nn.Module", "Return the network itself."
        raise ConfigError("model.name", f"{name} returned {kind}", rule, fix)
    if not any(parameter.requires_grad for parameter in made.parameters()):
        rule = "training changes parameters that require gradients"
        fix = "Make layers in the network's __init__, and freeze only some of them."
        raise ConfigError("model.name", f"{name} returned a network without any", rule, fix)
    return made


def build(
    name: str, sample_shape: tuple[int, ...], classes: int, **options: Any
) -> torch.nn.Module:
    """Return a network for samples of this shape, with new random weights.

    Raises ConfigError for an unknown name or option and for images that are too small.
    """
    assert not is_own(name), name
    check(name, sample_shape, classes, options)
    module, function = MODELS[name].split(":")
    model: torch.nn.Module = getattr(importlib.import_module(module), function)(
        sample_shape, classes, **options
    )
    return model


def _check_value(option: str, value: Any) -> None:
    key, found = f"model.options.{option}", f"got {value!r}"
    if option == "hidden":
        is_list = isinstance(value, list | tuple)
        if not is_list or any(type(width) is not int or width < 1 for width in value):
            rule = "hidden lists the widths of the hidden layers, each at least 1"
            raise ConfigError(key, found, rule, "Write for example [128] or [4096, 4096].")
    elif option == "dropout":
        if type(value) not in (int, float) or not 0 <= value < 1:
            rule = "dropout is a chance, at least 0 and below 1"
            raise ConfigError(key, found, rule, "Use 0 for none, 0.5 for the usual.")
    elif option == "batch_norm":
        if type(value) is not bool:
            raise ConfigError(key, found, "batch_norm is true or false", "Write true or false.")
    else:
        raise AssertionError(f"option {option!r} is listed in OPTIONS but has no rule")


def _nearest(word: str, known: Iterable[str]) -> str:
    known = sorted(known)
    if near := difflib.get_close_matches(word, known, n=1):
        return f"Did you mean {near[0]}?"
    return f"Choose from {', '.join(known)}." if known else "Leave it out."
