"""`syncline run`: start the user's own script on several ranks of this machine."""

from __future__ import annotations

import os
import sys
from importlib.machinery import PathFinder
from pathlib import Path

import typer

from syncline.cli.output import debug_option
from syncline.config import printable
from syncline.errors import ConfigError
from syncline.launch.env import read_world
from syncline.launch.local import launch


def run(
    script: str = typer.Argument(
        ..., help="A Python file with your own training loop; with -m, a module."
    ),
    arguments: list[str] | None = typer.Argument(None, help="Passed on to the script as they are."),
    is_module: bool = typer.Option(
        False, "-m", "--module", help="Run a module by its name, as python -m does."
    ),
    ranks: int = typer.Option(..., "--ranks", "-n", help="How many processes to start."),
    threads: int = typer.Option(1, "--threads", help="Intra-op threads of each rank."),
    port: int | None = typer.Option(
        None, "--port", help="Where rank 0 listens.", show_default="a free port"
    ),
    go_on: bool = typer.Option(
        False, "--go-on", help="Let the others finish when a rank dies, without a time limit."
    ),
    debug: bool = debug_option,
) -> None:
    """Start a script on several ranks of this machine.

    [bold]Examples[/bold]

      syncline run --ranks 2 script.py --epochs 3

      syncline run --ranks 2 -m package.module --epochs 3

    Each rank finds its place with syncline.init(). Ctrl-C stops them all. When
    one dies the others are not killed at once: the library tells them, and they
    end by themselves. Arguments after the script are passed on to it.

    With --go-on, for strategies that go on when a rank dies (gossip, elastic, a
    server's workers), the status is 0 if any rank ends well.
    """
    check_ranks("--ranks", ranks)
    if threads < 1:
        raise ConfigError("--threads", f"got {threads}", "a rank has at least one", "Use 1.")
    (_check_module if is_module else _check_file)(script)
    world = read_world()
    if world.size > 1:
        raise ConfigError(
            "syncline run",
            f"started as rank {world.rank} of {world.size} by {world.launcher}",
            "it starts ranks itself",
            f"Let {world.launcher} start the script directly.",
        )
    command = [sys.executable, *(["-m"] if is_module else []), script, *(arguments or [])]
    outcome = launch(command, ranks, threads=threads, port=port, go_on=go_on)
    raise typer.Exit(outcome.exit_code)


def _check_file(script: str) -> None:
    path = Path(script)
    if path.suffix == ".toml":
        raise ConfigError(
            printable(script),
            "this is a job",
            "ranks run a Python file",
            f"Use syncline train {printable(script)}.",
        )
    if not path.is_file():
        found = "this is a folder" if path.is_dir() else "there is no such file"
        raise ConfigError(
            printable(script), found, "ranks run a Python file", "Look at the path of the script."
        )


def _check_module(name: str) -> None:
    """Refuse a module that Python would not find. Nothing of it is loaded here."""
    is_file = Path(name).is_file()
    top, *others = name.split(".")
    # `python -m` looks in the current folder first.
    if not is_file and all(others) and PathFinder.find_spec(top, [os.getcwd(), *sys.path]):
        return
    raise ConfigError(
        printable(name),
        "this is a file" if is_file else "there is no such module",
        "with -m ranks run a module by its name",
        "Leave -m away." if is_file else "Look at its name, at the current folder and PYTHONPATH.",
    )


def check_ranks(key: str, ranks: int) -> None:
    """Refuse fewer than one rank."""
    if ranks < 1:
        raise ConfigError(key, f"got {ranks}", "a world has at least one rank", "Use 1 or more.")
