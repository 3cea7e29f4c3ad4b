"""`syncline`: the verbs, and the one place where errors become a line and an exit status.

0 is success, 2 a mistake in what was given (job, options, checkpoint), 130 Ctrl-C, 1 all else.
"""

from __future__ import annotations

import importlib.metadata
import sys
import traceback
from typing import NoReturn

import typer

from syncline.cli import compare as compare_command
from syncline.cli import completion as completion_command
from syncline.cli import doctor as doctor_command
from syncline.cli import explain as explain_command
from syncline.cli import key, measure, run, simulate, train, validate, verify
from syncline.cli import report as report_command
from syncline.cli.output import is_debug, report, say
from syncline.errors import SynclineError
from syncline.resources import explain

app = typer.Typer(
    name="syncline",
    add_completion=False,  # `syncline completion` knows settings, strategies and job files as well
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("train", context_settings={"max_content_width": 100})(train.train)
app.command(
    "run",
    # Options after the script's name belong to the script: its --ranks is not ours.
    context_settings={"allow_interspersed_args": False, "ignore_unknown_options": False},
)(run.run)
app.command("simulate", context_settings={"max_content_width": 100})(simulate.simulate)
app.command("explain", context_settings={"max_content_width": 100})(explain_command.explain)
app.command("report", context_settings={"max_content_width": 100})(report_command.report)
app.command("compare", context_settings={"max_content_width": 100})(compare_command.compare)
app.add_typer(measure.app, name="measure")
app.command("validate", context_settings={"max_content_width": 100})(validate.validate)
app.command("verify", context_settings={"max_content_width": 100})(verify.verify)
app.command("key")(key.key)
app.command("doctor")(doctor_command.doctor)
app.command("completion")(completion_command.completion)


def _show_version(wanted: bool) -> None:
    if wanted:
        try:
            print(importlib.metadata.version("syncline"))
        except importlib.metadata.PackageNotFoundError:
            print("not installed: running from its sources")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def syncline(
    context: typer.Context,
    version: bool = typer.Option(
        False, "--version", callback=_show_version, is_eager=True, help="Print the version."
    ),
) -> None:
    """Train a PyTorch model on many ranks; the same bits on any number of them.

    [bold]First steps[/bold]: train what a job file describes, or start your own
    script on two ranks.

      syncline train examples/digits.toml --ranks 2

      syncline run --ranks 2 script.py --lr 0.1

    Then ask whether all numbers of ranks have the same bits:

      syncline verify script.py

    [bold]Words[/bold]: a rank is one worker process. A shard is a fixed part of a
    step's batch. Shards, not ranks, fix the arithmetic: with strategy.shards = 8
    one, two or eight ranks give the same weights bit for bit.

    `syncline train --help` explains job files and run folders.
    """
    if context.invoked_subcommand is None:
        print(context.get_help())


def main() -> NoReturn:
    """Run the command line and exit."""
    sys.exit(_run())


def _run() -> int:
    try:
        status = app(prog_name="syncline", standalone_mode=False)
        sys.stdout.flush()
    except SynclineError as error:
        return report(error)
    except (typer.Abort, KeyboardInterrupt):
        return 130
    except BrokenPipeError:
        # The reader of our output has ended (`| head`). Without this Python complains at exit.
        sys.stdout = None
        return 1
    except Exception as error:
        why = explain(error)
        if why is not None:
            # The machine refuses something: descriptors, memory, space for what is printed.
            if is_debug():
                traceback.print_exc()
            say(why)
            try:
                sys.stdout.flush()
            except OSError:
                sys.stdout = None  # or Python would complain at exit
            return 1
        if not hasattr(error, "format_message"):
            raise
        # A mistake in the options themselves, found by typer.
        context = getattr(error, "ctx", None)
        where = context.command_path if context is not None else "syncline"
        message = error.format_message()
        stop = "" if message.endswith((".", "?")) else "."
        say(f"{message}{stop} See `{where} --help`.")
        return 2
    return status if isinstance(status, int) else 0
