"""A user's own function by name: how it is found and called, and how it is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from syncline import own_functions
from syncline.errors import ConfigError


def refusal(call, *arguments):
    with pytest.raises(ConfigError) as caught:
        call(*arguments)
    line = str(caught.value)
    assert "\n" not in line
    return line


def test_a_module_is_found_from_the_current_folder_and_called_with_keywords(own):
    module = own("def make(a, b=2): return a, b\nclass Nets:\n    both = staticmethod(make)\n")
    assert own_functions.call("model", f"{module}:make", {"a": 1}, "a pair") == (1, 2)
    assert own_functions.call("model", f"{module}:Nets.both", {"a": 1, "b": 3}, "a pair") == (1, 3)


def test_a_module_in_a_package_is_found(own):
    Path("rooms").mkdir()
    Path("rooms/kitchen.py").write_text("def make(): return 7\n")
    assert own_functions.call("model", "rooms.kitchen:make", {}, "a number") == 7


@pytest.mark.parametrize(
    "name", ["nets.py:make", "nets/small:make", "nets:", ":make", "nets:make()", "a:b:c", "3:make"]
)
def test_what_cannot_be_a_function_is_refused_before_anything_is_imported(name):
    line = refusal(own_functions.check_name, "model.name", name)
    assert line == (
        f"model.name: got {name!r}, but a function of your own is named package.module:function. "
        "Write for example nets.small:make for the function make in the file nets/small.py."
    )


def test_a_module_that_is_not_there_is_named_with_the_folder(own, tmp_path):
    line = refusal(own_functions.find, "data.name", "rooms_that_are_not.kitchen:make")
    assert line == (
        "data.name: got 'rooms_that_are_not.kitchen:make', but there is no module"
        f" rooms_that_are_not in {tmp_path} or among the installed packages."
        " Look at its spelling, or start from the folder that it is in."
    )


def test_a_function_that_is_not_there_gets_the_nearest_one(own):
    module = own("def make_net(): pass\nsize = 3\n")
    line = refusal(own_functions.find, "model.name", f"{module}:make_nte")
    assert line.endswith(f"but module {module} has no function make_nte. Did you mean make_net?")
    line = refusal(own_functions.find, "model.name", f"{module}:size")
    assert line.endswith("but size is of type int, which cannot be called. Name a function.")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import a_module_that_is_not_there\n", "ModuleNotFoundError: No module named"),
        ("def make(:\n", "SyntaxError: invalid syntax"),
        ("x = 1\nraise ValueError('no\\nway')\n", "ValueError: no"),
        ("import sys\nsys.exit('early')\n", "SystemExit: early"),
    ],
)
def test_a_module_that_fails_is_one_line_with_file_and_line(own, text, said):
    module = own(text)
    line = refusal(own_functions.find, "model.name", f"{module}:make")
    assert line.startswith(f"model.name: importing {module} failed with {said}")
    if not said.startswith("Syntax"):
        assert f"({module}.py, line {max(1, text.count(chr(10)))})" in line
    else:
        assert f"({module}.py, line 1)" in line
    assert line.endswith("Mend it; --debug shows the traceback.")


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"widht": 3}, "model.options.widht: got 3, but {} has no such keyword. Did you mean"),
        ({"width": 3}, "model.options.depth: it is not there, but {} needs it. Write"),
        ({"depth": 3, "zzz": 1}, "model.options.zzz: got 1, but {} has no such keyword. It takes"),
    ],
)
def test_a_wrong_keyword_is_named(own, options, line):
    module = own("def make(depth, width=2): return 1\n")
    found = refusal(own_functions.call, "model", f"{module}:make", options, "a model")
    assert found.startswith(line.format(f"{module}:make"))


def test_a_function_that_takes_any_keyword_gets_all(own):
    module = own("def make(**options): return options\n")
    assert own_functions.call("model", f"{module}:make", {"a": 1}, "") == {"a": 1}


def test_a_function_that_fails_is_one_line_with_file_and_line(own):
    module = own("def inner(): return {}['x']\ndef make(): return inner()\n")
    line = refusal(own_functions.call, "data", f"{module}:make", {}, "two splits")
    assert line == (
        f"data.name: {module}:make failed with KeyError: 'x' ({module}.py, line 1), but it must"
        " return two splits. Mend it; --debug shows the traceback."
    )
