"""`syncline completion`: a script that lets a shell complete commands, options and their values.

The script holds a table, made from the commands themselves and from the names that a job may use.
A key of the table is what stands before the cursor, its value what may stand there:

    ""                                 commands
    "train -"                          options of a command
    "train --set"                      values of an option; an option without an entry takes none
    "--set strategy.name="             values of a setting
    "train @"                          arguments
    "run @rest"                        after the first argument everything belongs to the script

@file, @toml and @none at the end of a value stand for files, job files, and for no suggestion.
"""

from __future__ import annotations

import importlib.resources
import inspect
from collections.abc import Iterator
from typing import Any

import msgspec
import typer

from syncline import data, device, models
from syncline.config import Job, keys
from syncline.config.describe import literals
from syncline.config.words import any_of, did_you_mean
from syncline.errors import ConfigError
from syncline.loggers.names import LOGGERS
from syncline.presets import PRESETS
from syncline.strategies.registry import STRATEGIES

SHELLS = ("bash", "fish", "zsh")

_WORDS = {
    "KEY=VALUE": lambda: [f"{key}=" for key in (*keys(), *_own_keys())],
    "NAME_OR_FILE": lambda: sorted(PRESETS),
    "LOGGER": lambda: sorted(LOGGERS),
    "SHELL": lambda: SHELLS,
}
"""By how an option or argument is shown in the help: its values."""


def completion(
    context: typer.Context,
    shell: str = typer.Argument(..., metavar="SHELL", help="bash, zsh or fish."),
) -> None:
    """Print a script that completes commands, options, settings, strategies and files.

    [bold]bash[/bold], in ~/.bashrc:

      source <(syncline completion bash)

    [bold]zsh[/bold], in ~/.zshrc, after compinit:

      source <(syncline completion zsh)

    [bold]fish[/bold]

      syncline completion fish > ~/.config/fish/completions/syncline.fish
    """
    if shell not in SHELLS:
        fix = did_you_mean(shell, SHELLS) or f"Use {any_of(SHELLS)}."
        raise ConfigError("SHELL", f'got "{shell}"', f"this is {any_of(SHELLS)}", fix)
    print(script_of(shell, context.find_root().command), end="")


def script_of(shell: str, root: Any) -> str:
    """Return the script for a shell; `root` is the command that has all others."""
    folder = importlib.resources.files("syncline.cli") / "shells"
    text = (folder / f"syncline.{shell}").read_text(encoding="utf-8")
    rows = {key: " ".join(words) for key, words in _table(root)}
    if shell == "fish":
        lines = [f"        case '{key}'\n            echo '{row}'" for key, row in rows.items()]
    else:
        lines = [f"    '{key}') echo '{row}' ;;" for key, row in rows.items()]
    assert "'" not in "".join((*rows, *rows.values())), "the table is in single quotes"
    return text.replace("@TABLE@", "\n".join(lines))


def _table(root: Any) -> Iterator[tuple[str, list[str]]]:
    yield from _rows_of(root, "")
    for key, values in _values_of_settings().items():
        yield f"--set {key}=", [f"{key}={value}" for value in values]


def _rows_of(command: Any, verb: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the rows of a command and of those below it."""
    below = getattr(command, "commands", {})
    yield verb, sorted(below)
    options = [one for one in command.params if one.opts[0].startswith("-") and not one.hidden]
    names = [name for one in options for name in (*one.opts, *one.secondary_opts)]
    yield f"{verb} -", sorted({*(name for name in names if name.startswith("--")), "--help"})
    for option in options:
        if not option.is_flag:
            for name in option.opts:
                yield f"{verb} {name}", _words_of(command, option)
    arguments = [one for one in command.params if not one.opts[0].startswith("-")]
    if arguments:
        yield f"{verb} @", _words_of(command, arguments[0])
    if any(one.nargs < 0 for one in arguments):
        yield f"{verb} @rest", ["@file"]
    for name, one in below.items():
        yield from _rows_of(one, f"{verb} {name}".strip())


def _words_of(command: Any, parameter: Any) -> list[str]:
    """Return what may stand for a parameter."""
    shown = parameter.metavar or ""
    annotation = inspect.signature(command.callback).parameters[parameter.name].annotation
    if shown == "JOB.toml":
        return ["@toml"]
    words = [*_WORDS[shown]()] if shown in _WORDS else []
    is_other_argument = not words and not parameter.opts[0].startswith("-")
    is_file = "Path" in str(annotation) or "FILE" in shown or is_other_argument
    return [*words, *(["@file"] if is_file else [])] or ["@none"]


def _own_keys() -> list[str]:
    """Return the settings that belong to one strategy each."""
    return [
        f"strategy.{name}.{field}"
        for name, one in sorted(STRATEGIES.items())
        for field in one.settings.__struct_fields__
    ]


def _values_of_settings() -> dict[str, list[str]]:
    """Return the values of settings that have a few, by key."""
    found = {
        "strategy.name": sorted(STRATEGIES),
        "model.name": models.names(),
        "data.name": data.names(),
        "cluster.preset": sorted(PRESETS),
        "cluster.device": list(device.names()),
    }
    for table in msgspec.structs.fields(Job):
        if isinstance(table.type, type) and issubclass(table.type, msgspec.Struct):
            for field in msgspec.structs.fields(table.type):
                values = _few(msgspec.inspect.type_info(field.type))
                if values:
                    found.setdefault(f"{table.name}.{field.name}", values)
    return found


def _few(info: msgspec.inspect.Type) -> list[str]:
    members = info.types if isinstance(info, msgspec.inspect.UnionType) else (info,)
    is_switch = any(isinstance(one, msgspec.inspect.BoolType) for one in members)
    return [*literals(info), *(("true", "false") if is_switch else ())]
