"""`syncline run`: start the user's own script on several ranks of this machine."""

from __future__ import annotations

import sys
from pathlib import Path

import typer

from syncline.cli.output import debug_option
from syncline.config import printable
from syncline.errors import ConfigError
from syncline.launch.env import read_world
from syncline.launch.local import launch


def run(
    script: str = typer.Argument(..., help="A Python file with your own training loop."),
    arguments: list[str] | None = typer.Argument(None, help="Passed on to the script as they are."),
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

    [bold]Example[/bold]

      syncline run --ranks 2 script.py --epochs 3

    Each rank finds its place with syncline.init(). Ctrl-C stops them all. When
    one dies the others are not killed at once: the library tells them, and they
    end by themselves. Arguments after the script are passed on to it.

    With --go-on, for strategies that go on when a rank dies (gossip, elastic, a
    server's workers), the status is 0 if any rank ends well.
    """
    check_ranks("--ranks", ranks)
    if threads < 1:
        raise ConfigError("--threads", f"got {threads}", "a rank has at least one", "Use 1.")
    path = Path(script)
    if not path.is_file():
        found = "this is a folder" if path.is_dir() else "there is no such file"
        raise ConfigError(
            printable(script), found, "ranks run a Python file", "Look at the path of the script."
        )
    world = read_world()
    if world.size > 1:
        raise ConfigError(
            "syncline run",
            f"started as rank {world.rank} of {world.size} by {world.launcher}",
            "it starts ranks itself",
            f"Let {world.launcher} start the script directly.",
        )
    command = [sys.executable, script, *(arguments or [])]
    outcome = launch(command, ranks, threads=threads, port=port, go_on=go_on)
    raise typer.Exit(outcome.exit_code)


def check_ranks(key: str, ranks: int) -> None:
    """Refuse fewer than one rank."""
    if ranks < 1:
        raise ConfigError(key, f"got {ranks}", "a world has at least one rank", "Use 1 or more.")
