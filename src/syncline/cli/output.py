"""How the command line prints errors: one line on stderr; `--debug` adds the traceback."""

from __future__ import annotations

import contextlib
import sys
import traceback

import typer

from syncline.config import printable
from syncline.errors import SynclineError

_is_debug = False


def show_tracebacks(wanted: bool) -> bool:
    """Set whether errors are printed with their traceback (`--debug`)."""
    global _is_debug
    _is_debug = wanted
    return wanted


def is_debug() -> bool:
    """Tell whether errors are printed with their traceback."""
    return _is_debug


def say(line: str) -> None:
    """Print one line on stderr, in one write: several ranks may print at once."""
    # The log may be on the disk that is full: the exit status still tells.
    with contextlib.suppress(OSError):
        sys.stderr.write(f"syncline: {printable(line)}\n")
        sys.stderr.flush()


def report(error: SynclineError, who: str = "") -> int:
    """Print one of our own errors; return its exit status."""
    if _is_debug:
        traceback.print_exception(error)
    say(f"{who}{error}")
    return error.exit_code


debug_option = typer.Option(
    False, "--debug", callback=show_tracebacks, is_eager=True, help="Show where an error came from."
)
