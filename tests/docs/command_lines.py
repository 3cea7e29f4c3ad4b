"""Parse commands with the real command lines, without running what they name."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import typer.main
from torch.distributed.run import get_args_parser

from pages import ROOT, Command
from syncline.cli.main import app

NUMBERS = {"N": "2", "K": "2", "W": "1"}
"""What stands in a page for a number."""
TARGETS = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)


class Wrong(Exception):
    """A command that its program would refuse."""


class _Parsed(Exception):
    """Ends a program once it has parsed its options."""


def words_of(command: Command) -> list[str]:
    """Return the words of a command, without what a page leaves out (`...`)."""
    words: list[str] = []
    for word in shlex.split(command.text):
        if word != "...":
            words.append(NUMBERS.get(word, word))
        elif words and words[-1].startswith("--"):
            words.pop()
    return words


def parse(command: Command, files: set[str]) -> None:
    """Raise `Wrong` if the command could not be started. `files` are those that a reader has."""
    words = words_of(command)
    if words[0] == "PYTHONPATH=tests":
        del words[0]
    program, *rest = words
    match program:
        case "syncline":
            _parse_syncline(rest, command.inline)
        case "python" if rest[0] == "-m" and len(rest) > 1:
            _parse_module(rest[1], rest[2:])
        case "python" if rest[0] == "-m":
            _need(command.inline, "python -m takes a module")
        case "python":
            _need(rest[0] in files, f"there is no {rest[0]}")
        case "torchrun":
            _parse_torchrun(rest)
        case "make":
            _need(all(word in TARGETS for word in rest), f"no such target: {rest}")
        case "export":
            for inner in re.findall(r"\$\((.*)\)", command.text):
                parse(Command(command.page, command.line, inner), files)
        case "source":
            _need(rest == [".venv/bin/activate"], f"no such file: {rest}")
        case _:
            raise Wrong(f"{program} is no program that the pages may use")


def _need(holds: bool, message: str) -> None:
    if not holds:
        raise Wrong(message)


def _parse_syncline(words: list[str], is_mention: bool) -> None:
    """A mention in a sentence may leave arguments out."""
    command: Any = typer.main.get_command(app)
    context = None
    try:
        while hasattr(command, "resolve_command") and words and not words[0].startswith("-"):
            context = type(command).make_context(command, "syncline", [], context, **LENIENT)
            _, command, rest = command.resolve_command(context, words)
            _need(command is not None, f"no such command: {words[0]}")
            words = rest
        for option in command.params:
            option.callback = None  # --install-completion would write to the home folder
        command.make_context("syncline", list(words), parent=context)
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        is_short = not words or "Missing" in error.format_message()
        ends = any(one.is_eager and {*one.opts} & {*words} for one in command.params)
        if not (is_short and (is_mention or ends)):
            raise Wrong(error.format_message()) from None


LENIENT: dict[str, Any] = {"resilient_parsing": True}


def _parse_module(name: str, words: list[str]) -> None:
    if name == "syncline":
        return _parse_syncline(words, is_mention=False)
    home = "lab.__main__" if name == "lab" else name
    _need(home.partition(".")[0] in ("benchmarks", "lab", "website"), f"no module {name}")
    path = ROOT / Path(*home.split(".")).with_suffix(".py")
    _need(path.exists(), f"there is no module {name}")
    if "argparse" not in path.read_text() and "benchmarks.command" not in path.read_text():
        return None
    module = importlib.import_module(home)
    begin = module._read if name == "lab" else module.main
    with _stopped_after_parsing(name, words) as said:
        try:
            begin()
        except _Parsed:
            return None
        except SystemExit:
            raise Wrong(said.getvalue().strip().splitlines()[-1]) from None
    raise Wrong(f"{name} ended before it parsed its options")


@contextlib.contextmanager
def _stopped_after_parsing(name: str, words: list[str]) -> Iterator[io.StringIO]:
    parse_args = argparse.ArgumentParser.parse_args

    def parse_and_stop(self: Any, *given: Any, **more: Any) -> Any:
        parse_args(self, *given, **more)
        raise _Parsed

    said = io.StringIO()
    with (
        mock.patch.object(argparse.ArgumentParser, "parse_args", parse_and_stop),
        mock.patch.object(sys, "argv", [name, *words]),
        contextlib.redirect_stderr(said),
    ):
        yield said


def _parse_torchrun(words: list[str]) -> None:
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        try:
            found = get_args_parser().parse_args(words)
        except SystemExit:
            raise Wrong(said.getvalue().strip().splitlines()[-1]) from None
    if found.module and found.training_script == "syncline":
        _parse_syncline(found.training_script_args, is_mention=False)
