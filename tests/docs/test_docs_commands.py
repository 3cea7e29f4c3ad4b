"""Every command of the pages: all are parsed by their real command lines, and those of `syncline`
and of tutorial scripts are run, page by page, in the order in which a reader would.

`HAVE` has the files that a page's reader is meant to have, `REDUCED` what is shortened here, and
`UNRUN` what is not run at all, each with the reason. A page says the same next to the command
("not run by the tests"), and the end of pytest's output lists them.
"""

from __future__ import annotations

import functools
import re
import runpy
import shlex
import shutil
import sys
from pathlib import Path

import pytest
from command_lines import Wrong, parse, words_of
from lab.network import why_not
from readers_files import SCRIPT, SHORT

from command import Started, fork_scripts, start_script
from pages import NOT_RUN, ROOT, Command, Page, pages
from worlds import untraced

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

PAGES = {page.name: page for page in pages()}

HAVE: dict[str, str] = {"JOB.toml": SHORT, "script.py": SCRIPT}
"""Files by the names that stand for the reader's own."""

BEFORE: dict[str, tuple[str, ...]] = {
    "README.md": ("syncline train examples/digits.toml --out runs/X",),
    "docs/traces.md": ("syncline simulate examples/digits.toml --ranks 2 --trace run.trace",),
}
"""Commands that a page takes for granted."""

REDUCED: list[tuple[str, str, str]] = [
    (r"measure layers(.*?)( --seconds \d+)?$", r"measure layers\1 --seconds 0.5", "20 s"),
    (r"(measure links.*)", r"\1 --rounds 3 --sizes 64,65536,1048576", "half a minute"),
    (r"(simulate .*--ranks) 64", r"\1 16", "the same with fewer ranks"),
    (
        r"(compare examples.*)--ranks 2,8(.*)--seeds 3",
        r"\1--ranks 2\2--seeds 1 --samples 2560",
        "fewer",
    ),
    (r"(verify examples.*)--ranks 1,2,4", r"\1--ranks 1,2", "the same with fewer ranks"),
]
"""A pattern of a command, what is run instead, and what it would take as it stands."""

UNRUN: list[tuple[str, str]] = [
    (r"syncline validate", "half a minute at its shortest; tests/cli/test_cli_validate.py runs it"),
    (r"syncline compare examples/study-jin", "takes two hours"),
    (r"make ", "sets up an environment, tests or measures everything"),
    (r"source ", "the tests run in the environment"),
    (r"python -m benchmarks\.(?!lsgd)", "measures for minutes to hours, or needs others' logs"),
    (r"torchrun .*--nnodes", "needs several machines; tests/lab and tests/launch emulate them"),
    (r"python -m lab|export SYNCLINE_KEY", "in tests/docs/test_docs_lab.py"),
]
"""A pattern of commands that are only parsed, and the reason."""


def why_not_run(command: Command) -> str | None:
    return next((why for pattern, why in UNRUN if re.match(pattern, command.text)), None)


def files_of(page: Page) -> dict[str, str]:
    """Return the files that the page's reader has: given ones, and those that the page shows."""
    return HAVE | {block.title: block.text for block in page.blocks if block.title}


COMMANDS = [command for page in PAGES.values() for command in page.commands]
MENTIONS = [command for page in PAGES.values() for command in page.mentions]


@pytest.mark.parametrize("name", PAGES)
def test_every_command_parses(name):
    wrong = []
    page = PAGES[name]
    examples = {f"examples/{path.name}" for path in (ROOT / "examples").iterdir()}
    for command in [*page.commands, *page.mentions]:
        try:
            parse(command, {*files_of(page), *examples})
        except Wrong as error:
            wrong.append(f"{command}: {error}")
    assert wrong == []


@pytest.mark.parametrize(
    "text",
    [
        "syncline trian x.toml",
        "syncline train x.toml --rank 4",
        "syncline train x.toml --ranks many",
        "syncline measure layers x.toml --second 3",
        "python -m benchmarks.step --nets mlp",
        "python -m benchmarks.nothing",
        "python nothing.py",
        "python -m lab fault try",
        "torchrun --nnode-count 2 script.py",
        "make everything",
        "sudo make test",
    ],
)
def test_a_wrong_command_is_found(text):
    with pytest.raises(Wrong):
        parse(Command("page", 1, text), {"script.py"})


def test_commands_are_found():
    """Patterns that match nothing find no mistakes either."""
    assert len(COMMANDS) > 60
    assert len(MENTIONS) > 60
    for pattern, *_ in [*REDUCED, *UNRUN]:
        assert any(re.search(pattern, command.text) for command in COMMANDS), pattern


@pytest.mark.parametrize("name", PAGES)
def test_a_page_says_what_the_tests_do_not_run(name):
    page = PAGES[name]
    silent = [
        str(command)
        for command in page.commands
        if not re.match("make |source |python -m lab|export ", command.text)
        and why_not_run(command) is not None
        and NOT_RUN not in page.section_of(command.line)
    ]
    assert silent == []


def reduced(command: Command) -> list[str]:
    """Return the words to run: shortened ones, for a command that takes long."""
    text = command.text
    for pattern, instead, _ in REDUCED:
        text = re.sub(pattern, instead, text)
    return words_of(Command(command.page, command.line, text))


def prepare(folder: Path, page: Page) -> None:
    shutil.copytree(ROOT / "examples", folder / "examples")
    (folder / "examples" / "digits.toml").write_text(SHORT)
    for name, text in files_of(page).items():
        (folder / name).write_text(text)


def module(name: str, *arguments: str) -> None:
    """Do what `python -m NAME ARGUMENTS` does."""
    sys.argv = [name, *arguments]
    runpy.run_module(name, run_name="__main__", alter_sys=True)


DISTURBED = "Measure again on a quiet machine"
"""What a measurement says that other tests have disturbed: it is made again, as it asks."""


def run(command: Command, folder: Path, tries: int = 4) -> str:
    """Run a command as a reader would; return what it printed."""
    name, *rest = reduced(command)
    env = untraced("RANK") | {"COLUMNS": "160", "PYTHONPATH": str(folder)}
    if name == "syncline":
        started = Started(*rest, cwd=folder, env=env, traced=False, first=fork_scripts)
    elif rest[0] == "-m":
        started = Started(
            cwd=ROOT, env=env, traced=False, program=functools.partial(module, *rest[1:])
        )
    else:
        assert name == "python", command
        started = start_script(Path(rest[0]), *rest[1:], cwd=folder, env=env)
    out, said = started.communicate(100)
    if DISTURBED in said and tries > 1:
        return run(command, folder, tries - 1)
    assert started.returncode == 0, f"{command}\n{shlex.join(reduced(command))}\n{said}"
    return out


RUN = [name for name, page in PAGES.items() if any(why_not_run(c) is None for c in page.commands)]


@pytest.mark.parametrize("name", RUN)
def test_the_commands_of_a_page_run_one_after_the_other(name, tmp_path):
    page = PAGES[name]
    prepare(tmp_path, page)
    for text in BEFORE.get(name, ()):
        run(Command(name, 0, text), tmp_path)
    printed = "".join(
        run(command, tmp_path) for command in page.commands if why_not_run(command) is None
    )
    if name == "docs/tutorial.md":
        rows = re.findall(r"^\| `\w+` \| ([\d.]+) \| ([\d.]+%) \|$", "\n".join(page.prose), re.M)
        assert len(rows) == 3
        for time_s, accuracy in rows:
            assert re.search(rf"{time_s} .*{accuracy}", printed), (time_s, accuracy)


def test_what_is_not_run_is_listed(record_property):
    lab_is_here = why_not() is None
    for command in COMMANDS:
        why = why_not_run(command)
        if why is not None and not (lab_is_here and command.page == "docs/lab.md"):
            record_property("not run", f"{command} ({why})")
