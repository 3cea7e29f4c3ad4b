"""Pieces of error messages: values as TOML writes them, lists in words, similar spellings."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

_SHOWN_CHARACTERS = 60  # a value, its key and the rule then fit into two lines of a terminal
_MOST_SAID = 400
"""Characters of what another library says of an error."""


def toml_value(value: Any) -> str:
    """Return a value as TOML writes it."""
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            # JSON's escapes are TOML's as well; DEL is the one character JSON leaves bare.
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case msgspec.Struct():
            return toml_value(msgspec.structs.asdict(value))
        case list() | tuple():
            return f"[{', '.join(toml_value(item) for item in value)}]"
        case Mapping():
            items = (f"{toml_key(k)} = {toml_value(v)}" for k, v in value.items())
            return f"{{{', '.join(items)}}}"
    return str(value)


def toml_key(name: str) -> str:
    """Return a key as TOML writes it: in quotes where that is needed."""
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else toml_value(name)


def printable(value: object) -> str:
    """Return the text of a value with line breaks and the like escaped: an error is one line."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(value))


def brief(value: object) -> str:
    """Return the text of an error of others on one line, without the middle if it is long."""
    text = printable(value)
    return text if len(text) <= _MOST_SAID else f"{text[: _MOST_SAID - 80]} ... {text[-75:]}"


def shown(value: Any) -> str:
    """Return a value as TOML writes it, on one line and not too long."""
    text = printable(toml_value(value))
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 3] + "..."


def found(key: str, from_sets: set[str]) -> str:
    """Say where a setting comes from: --set, if that named its key or a part of it, or the file."""
    given = any(f"{one}.".startswith(f"{key}.") or key.startswith(f"{one}[") for one in from_sets)
    return "set on the command line" if given else "found in the file"


def did_you_mean(value: Any, known: Iterable[str]) -> str:
    """Ask for the known word with the most similar spelling; "" if none is similar."""
    near = difflib.get_close_matches(str(value).lower(), list(known), n=1)
    return f'Did you mean "{near[0]}"?' if near else ""


def any_of(words: Iterable[str]) -> str:
    """Join as '"a", "b" or "c"'."""
    return listed([f'"{word}"' for word in words])


def listed(items: Sequence[object]) -> str:
    """Join as "1, 2 or 4"."""
    words = [str(item) for item in items]
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))
