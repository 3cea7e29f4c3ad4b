"""A user's own function, named in a job as "package.module:function".

The module is found from the current folder, as `python -m` finds it. Everything that can be wrong
with the name, the module, the function and its keywords is one line: a `ConfigError`. No torch
here, and nothing is imported before it is used.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from syncline.errors import ConfigError, SynclineError

_NAME = r"[^\W\d]\w*(\.[^\W\d]\w*)*"
_KEYWORDS = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def is_own(name: str) -> bool:
    """Tell whether a name in a job is that of a user's own function."""
    return ":" in name


def check_name(key: str, name: str) -> None:
    """Refuse a name that no function can have. Imports nothing."""
    module, _, _ = name.partition(":")
    if re.fullmatch(f"{_NAME}:{_NAME}", name) and not module.endswith(".py"):
        return
    raise ConfigError(
        key,
        f"got {name!r}",
        "a function of your own is named package.module:function",
        "Write for example nets.small:make for the function make in the file nets/small.py.",
    )


def find(key: str, name: str) -> Callable[..., Any]:
    """Import the module and return the function."""
    check_name(key, name)
    module_name, _, path = name.partition(":")
    folder = os.getcwd()
    if folder not in sys.path and "" not in sys.path:
        sys.path.insert(0, folder)
    importing, rule = f"importing {module_name}", "the function is in it"
    found: Any
    try:
        found = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise failed(key, importing, error, rule) from error
        raise ConfigError(
            key,
            f"got {name!r}",
            f"there is no module {error.name} in {folder} or among the installed packages",
            "Look at its spelling, or start from the folder that it is in.",
        ) from None
    except (Exception, SystemExit) as error:
        raise failed(key, importing, error, rule) from error
    for part in path.split("."):
        if not hasattr(found, part):
            fix = nearest(part, [one for one in dir(found) if not one.startswith("_")])
            rule = f"module {module_name} has no function {path}"
            raise ConfigError(key, f"got {name!r}", rule, fix or "Look at its spelling.")
        found = getattr(found, part)
    if not callable(found):
        rule = f"{path} is of type {type(found).__name__}, which cannot be called"
        raise ConfigError(key, f"got {name!r}", rule, "Name a function.")
    return found


def call(table: str, name: str, options: Mapping[str, Any], returns: str) -> Any:
    """Call the function that `table`.name names with `table`.options as keywords.

    `returns` says in an error what the function should have returned.
    """
    function = find(f"{table}.name", name)
    check_keywords(f"{table}.options", name, function, options)
    try:
        return function(**options)
    except SynclineError:
        raise
    except (Exception, SystemExit) as error:
        raise failed(f"{table}.name", name, error, f"it must return {returns}") from error


def check_keywords(
    key: str, name: str, function: Callable[..., Any], options: Mapping[str, Any]
) -> None:
    """Refuse keywords that the function does not take, and missing ones that it needs."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return  # some functions written in C do not say what they take
    takes_any = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
    known = [one.name for one in parameters.values() if one.kind in _KEYWORDS]
    for option, value in options.items():
        if option not in known and not takes_any:
            fix = nearest(option, known) or (f"It takes {', '.join(known)}." if known else "")
            rule = f"{name} has no such keyword"
            raise ConfigError(f"{key}.{option}", f"got {value!r}", rule, fix or "Remove it.")
    for one in parameters.values():
        if one.default is not one.empty or one.name in options:
            continue
        if one.kind is inspect.Parameter.POSITIONAL_ONLY:
            rule = f"options are passed as keywords, and {name} does not take this one so"
            raise ConfigError(f"{key}.{one.name}", "it is not there", rule, "Remove the / from it.")
        if one.kind in _KEYWORDS:
            fix = f"Write {key} = {{ {one.name} = ... }}."
            raise ConfigError(f"{key}.{one.name}", "it is not there", f"{name} needs it", fix)


def failed(key: str, what: str, error: BaseException, rule: str) -> ConfigError:
    """Return the error that says in one line how and where a user's code failed."""
    reason = (str(error).strip().splitlines() or [""])[0]
    said = f"{type(error).__name__}: {reason}" if reason else type(error).__name__
    where = _place_of(error)
    return ConfigError(
        key,
        f"{what} failed with {said}" + (f" ({where})" if where else ""),
        rule,
        "Mend it; --debug shows the traceback.",
    )


def _place_of(error: BaseException) -> str:
    """Return file and line where the error arose: in the current folder, if it went through it."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{_shown(error.filename)}, line {error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    inside = [frame for frame in frames if frame.filename.startswith(os.getcwd() + os.sep)]
    users = [frame for frame in inside if f"{os.sep}site-packages{os.sep}" not in frame.filename]
    if not users:
        return ""
    return f"{_shown(users[-1].filename)}, line {users[-1].lineno}"


def _shown(file: str) -> str:
    return os.path.relpath(file) if file.startswith(os.getcwd() + os.sep) else file


def nearest(word: str, known: Iterable[str]) -> str:
    """Ask for the known word with the most similar spelling; "" if none is similar."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"Did you mean {near[0]}?" if near else ""
