"""Tables of layers: Id, Name, Forward, Backward, Comm, Size, one line a layer.

The layer traces published with Shi et al. 2018 (arXiv 1805.03812) are such tables. Their columns
are from memory: no file of theirs was at hand. A header names other orders of the columns; without
one, lines have the six columns in this order. Times are in microseconds unless the caller says
otherwise, sizes in bytes. Comm, the layer's exchange as it was measured there, is checked and left
out: a simulation finds its own. A first line for data, without backward and size, is input.
"""

from __future__ import annotations

import re

from syncline.measure.imports.assemble import (
    Imported,
    ImportedLayer,
    assemble,
    float32_parameters,
)
from syncline.measure.imports.source import Cursor, Source

COLUMNS = ("id", "name", "forward", "backward", "comm", "size")
NEEDED = ("name", "forward", "backward", "size")
INPUTS = ("data", "input")


def is_layer_table(line: str) -> bool:
    """Tell whether a file's first line looks like one of a table."""
    words = line.split()
    number = re.compile(r"[-+.\d]")
    is_row = len(words) == 6 and all(number.match(words[at]) for at in (0, 2, 3, 4, 5))
    return is_row or _is_header(line)


def _is_header(line: str) -> bool:
    """Tell whether a line names columns; a comment does if it names all that are needed."""
    words = {*line.lower().lstrip("# ").split()}
    return {*NEEDED} <= words if line.lstrip().startswith("#") else "name" in words


def read_layer_table(source: Source, samples: int | None, per_s: float) -> Imported:
    """Read a table; `per_s` is how many units of its times a second has."""
    columns: tuple[str, ...] = COLUMNS
    layers: list[ImportedLayer] = []
    known: set[str] = set()
    input_s, notes = 0.0, ["the column Comm is left out: a simulation finds its own exchanges"]
    is_first = True
    for line in source.lines():
        if line.is_empty:
            continue
        line.skip_blanks()
        if is_first and _is_header(line.rest):
            columns, is_first = _read_header(line), False
            continue
        if line.rest.startswith("#"):
            continue
        is_first = False
        layer, comm_s = _read_row(line, columns, known, per_s)
        if not layers and not input_s and layer.name.lower() in INPUTS and not layer.parameters:
            if layer.backward_s or comm_s:
                raise line.error("input has neither backward nor an exchange", line.stop)
            input_s = layer.forward_s
            notes.append(f"{layer.name}: its {input_s * 1e3:.4g} ms are input, not a layer")
            continue
        layers.append(layer)
    return assemble(source, "layer table", layers, samples, input_s=input_s, notes=notes)


def _read_header(line: Cursor) -> tuple[str, ...]:
    """Return the columns that a header names."""
    if line.rest.startswith("#"):
        line.at += 1
    columns: list[str] = []
    while not line.is_empty:
        line.skip_blanks()
        start = line.at
        column = line.take(r"\S+", "a column's name").lower()
        if column not in COLUMNS or column in columns:
            raise line.error(f"the columns are {', '.join(COLUMNS)}, each once", start)
        columns.append(column)
    missing = [column for column in NEEDED if column not in columns]
    if missing:
        raise line.error(f"there must be a column {missing[0]}", line.stop)
    return tuple(columns)


def _read_row(
    line: Cursor, columns: tuple[str, ...], known: set[str], per_s: float
) -> tuple[ImportedLayer, float]:
    """Return a row's layer, and the seconds of its exchange."""
    name, size_bytes, size_at = "", 0, line.at
    seconds = {"forward": 0.0, "backward": 0.0, "comm": 0.0}
    for column in columns:
        line.skip_blanks()
        start = line.at
        if column == "name":
            name = line.take(r"\S+", "the layer's name")
            if name in known:
                raise line.error("each layer has a name of its own", start)
            known.add(name)
        elif column == "id":
            line.whole("an Id")
        elif column == "size":
            size_at, size_bytes = start, line.whole("a Size in bytes")
        else:
            seconds[column] = line.seconds(f"a time in the column {column}", per_s)
        if not re.match(r"\s|$", line.rest):
            raise line.error(f"the column {column} holds a number and nothing else", start)
    if not line.is_empty:
        line.skip_blanks()
        raise line.error(f"a line has {len(columns)} columns")
    parameters = float32_parameters(line.source, size_at, size_bytes)
    return ImportedLayer(name, seconds["forward"], seconds["backward"], parameters), seconds["comm"]
