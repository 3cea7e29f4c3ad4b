"""`syncline completion`: what shells complete, asked of the shells themselves."""

from __future__ import annotations

import shutil
import subprocess

import pytest
import typer

from syncline.cli.completion import _WORDS, SHELLS, script_of
from syncline.cli.main import app
from syncline.strategies.registry import STRATEGIES

ROOT = typer.main.get_command(app)
ASK_BASH = """
source "$1"
while IFS= read -r COMP_LINE; do
    COMP_POINT=${#COMP_LINE}; _syncline; echo "${COMPREPLY[*]}"
done
"""
ASK_FISH = 'source $argv[1]; while read line; string join " " -- "" (complete -C $line); end'

# Lines up to the cursor, and what may stand there. After = bash wants the end of a word only.
LINES = {
    "syncline tr": "train",
    "syncline measure l": "layers links",
    "syncline train --re": "--report --resume",
    "syncline train --log w": "wandb",
    "syncline train --ranks ": "",
    "syncline train --set strategy.na": "strategy.name=",
    "syncline simulate a.toml --cluster 10": "100gbit 10gbit",
    "syncline train j": "job.toml",
    "syncline run --ranks 2 other.py --re": "",
    "syncline explain run.t": "run.trace",
    "syncline completion z": "zsh",
}


@pytest.fixture
def folder(tmp_path):
    for name in ("job.toml", "job.txt", "other.py", "run.trace"):
        (tmp_path / name).touch()
    for shell in SHELLS:
        (tmp_path / f"script.{shell}").write_text(script_of(shell, ROOT))
    return tmp_path


def ask(folder, shell, program, lines):
    """Return what a shell answers to each line, its words sorted."""
    words = [shell, "-c", program, *(["script"] if shell == "bash" else []), f"script.{shell}"]
    found = subprocess.run(
        words, cwd=folder, input="\n".join(lines) + "\n", capture_output=True, text=True, timeout=50
    )
    assert found.stderr == ""
    return [" ".join(sorted(line.split())) for line in found.stdout.splitlines()]


def test_bash_completes(folder):
    found = dict(zip(LINES, ask(folder, "bash", ASK_BASH, LINES), strict=True))
    assert found == LINES
    values = ["syncline train --set strategy.name=s", "syncline train --set optimizer.nesterov="]
    servers, switch = ask(folder, "bash", ASK_BASH, values)
    assert servers == " ".join(sorted(one for one in STRATEGIES if one.startswith("s")))
    assert switch == "false true"


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
def test_fish_completes(folder):
    found = dict(zip(LINES, ask(folder, "fish", ASK_FISH, LINES), strict=True))
    assert found == LINES


@pytest.mark.parametrize("shell", SHELLS)
def test_every_command_and_option_is_in_the_script(shell):
    script = script_of(shell, ROOT)

    def check(command, verb):
        for option in command.params:
            for name in (*option.opts, *option.secondary_opts):
                assert not name.startswith("--") or option.hidden or name in script
        for name, below in getattr(command, "commands", {}).items():
            assert f"'{verb} {name}'".replace("' ", "'") in script
            check(below, f"{verb} {name}")

    check(ROOT, "")


def test_values_are_known_for_options_that_exist():
    shown = set()

    def collect(command):
        shown.update(one.metavar for one in command.params)
        for below in getattr(command, "commands", {}).values():
            collect(below)

    collect(ROOT)
    assert {*_WORDS} <= shown
