"""Data sets by name: numpy arrays by row number, without torch; and users' own, by a function.

`check` makes the cheap checks before a job is launched, `load` returns the samples. A setting
without effect on the chosen data set is refused, not ignored; except `seed`, which every job has.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from syncline.data import digits, fashion_mnist, folder, synthetic
from syncline.data.base import DataSet, Facts, Split
from syncline.errors import ConfigError
from syncline.own_functions import check_name, is_own

__all__ = ["DATA", "DataSet", "Facts", "Source", "Split", "check", "describe", "load", "names"]


@dataclass(frozen=True)
class Source:
    """Where samples come from, and the settings that have an effect on them."""

    load: Callable[..., DataSet]
    check: Callable[..., None]
    describe: Callable[..., Facts]
    """Says what a model needs to know, without reading samples."""
    settings: tuple[str, ...]


DATA: dict[str, Source] = {
    "digits": Source(digits.load, digits.check, digits.describe, ("image_size",)),
    "fashion-mnist": Source(
        fashion_mnist.load,
        fashion_mnist.check,
        fashion_mnist.describe,
        ("path", "image_size"),
    ),
    "folder": Source(folder.load, folder.check, folder.describe, ("path", "image_size")),
    "synthetic": Source(
        synthetic.load,
        synthetic.check,
        synthetic.describe,
        ("sample_shape", "classes", "samples", "seed"),
    ),
}


def names() -> list[str]:
    """List the data sets that can be loaded."""
    return sorted(DATA)


def load(
    name: str,
    *,
    path: str | None = None,
    image_size: int | None = None,
    sample_shape: tuple[int, ...] | None = None,
    classes: int | None = None,
    samples: int | None = None,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
) -> DataSet:
    """Load a data set; what is None takes the data set's default.

    `name` may be that of a user's own function, which is called with `options`.

    Raises ConfigError for an unknown name, a setting that is wrong or has no effect here, and
    files that are missing or damaged.
    """
    given = _given(name, seed, path, image_size, sample_shape, classes, samples, options)
    if is_own(name):
        from syncline.data import own

        return own.load(name, dict(options or {}))
    return DATA[name].load(**given)


def describe(
    name: str,
    *,
    path: str | None = None,
    image_size: int | None = None,
    sample_shape: tuple[int, ...] | None = None,
    classes: int | None = None,
    samples: int | None = None,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
) -> Facts:
    """Return what a model needs to know of a data set, without its files where possible.

    The classes of a folder of images are its folders: None if there is no such folder. A user's own
    function is called, and one of its samples is read.
    """
    given = _given(name, seed, path, image_size, sample_shape, classes, samples, options)
    if is_own(name):
        from syncline.data import own

        found = own.load(name, dict(options or {}))
        return Facts(name, found.sample_shape, found.classes, found.sample_dtype)
    return DATA[name].describe(**given)


def check(
    name: str,
    *,
    path: str | None = None,
    image_size: int | None = None,
    sample_shape: tuple[int, ...] | None = None,
    classes: int | None = None,
    samples: int | None = None,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
    needs_files: bool = True,
) -> None:
    """Raise the ConfigError that `load` would raise, if it can be found without reading samples.

    Without `needs_files` only settings are checked.
    """
    given = _given(name, seed, path, image_size, sample_shape, classes, samples, options)
    if not is_own(name) and needs_files:
        DATA[name].check(**given)


def _given(
    name: str,
    seed: int,
    path: str | None,
    image_size: int | None,
    sample_shape: tuple[int, ...] | None,
    classes: int | None,
    samples: int | None,
    options: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Return the settings to pass on, after the checks that need no files."""
    if is_own(name):
        check_name("data.name", name)
        allowed: tuple[str, ...] = ()
    elif name not in DATA:
        near = difflib.get_close_matches(name, names(), n=1)
        fix = f"Did you mean {near[0]}?" if near else f"Choose from {', '.join(names())}."
        raise ConfigError("data.name", f"got {name!r}", "there is no such data set", fix)
    else:
        allowed = DATA[name].settings
        for option, value in (options or {}).items():
            rule = f"options are for data of your own, and {name} has none"
            raise ConfigError(f"data.options.{option}", f"got {value!r}", rule, "Remove it.")
    counts = {"image_size": image_size, "classes": classes, "samples": samples}
    others = {"path": path, "sample_shape": sample_shape}
    given = {key: value for key, value in (counts | others).items() if value is not None}
    for key, value in given.items():
        found = f"got {value!r}"
        if key not in allowed:
            used = ", ".join(f"data.{other}" for other in allowed if other != "seed")
            fix = f"Remove it; {name} takes {used or 'data.options'}."
            raise ConfigError(f"data.{key}", found, f"it has no effect on {name}", fix)
        if key in counts and not _is_count(value):
            rule = "it is a whole number of at least 1"
            raise ConfigError(f"data.{key}", found, rule, "Use 1 or more, or leave it out.")
        if key == "sample_shape" and not (
            isinstance(value, list | tuple) and value and all(map(_is_count, value))
        ):
            rule = "a shape lists whole numbers of at least 1"
            raise ConfigError(f"data.{key}", found, rule, "Write for example [3, 32, 32] or [429].")
    return given | ({"seed": seed} if "seed" in allowed else {})


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 1
