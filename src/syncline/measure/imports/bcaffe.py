"""Logs of B-Caffe (Shi and Chu 2018): layers' sizes, backward and exchanges, at the ends of lines.

A dump has a line for each parameter, in the order of use, which ends with

    [number, elements, backward, exchange]  or  [number, elements, backward, exchange, merged]

in microseconds. Weight and bias of a layer repeat the backward of both. A log may hold several
dumps; the last one counts. There is no forward in it: like its authors' script, half of backward is
taken. Exchanges include waiting for other ranks, so they are no workload's; `read_logged_layers`
has them for comparisons.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from syncline.measure.imports.assemble import Imported, ImportedLayer, Parameter, assemble
from syncline.measure.imports.source import Cursor, Source

FORWARD_SHARE = 0.5
"""Forward over backward (B-Caffe, scripts/gmwfbp.py)."""

_NUMBERS = re.compile(r"[-+\d.eE]+\s*,\s*[-+\d.eE]+\s*,\s*[-+\d.eE]+")
"""A line with three numbers in a row belongs to a dump, whatever else is wrong with it."""
_PER_S = 1e6


@dataclass(frozen=True)
class LoggedLayer:
    """A layer of a log, in seconds."""

    elements: tuple[int, ...]
    """Of its parameters: a weight, and a bias if there is one."""
    backward_s: float
    exchange_s: float
    merged_s: float
    """With merged gradients; 0 if they were sent with an earlier layer's, or not measured."""

    @property
    def size_bytes(self) -> int:
        return 4 * sum(self.elements)


@dataclass(frozen=True)
class _Blob:
    """A line of a dump; `at` is where its list begins."""

    at: int
    number: int
    elements: int
    backward_s: float
    exchange_s: float
    merged_s: float


def is_log(line: str) -> bool:
    """Tell whether a line ends with a list of at least four numbers."""
    return re.search(r"\[\s*\d+\s*(,\s*[-+.\deE]+\s*){3,4}\]\s*$", line) is not None


def read_log(source: Source, samples: int | None) -> Imported:
    """Return the workload of a log's last dump."""
    layers = [
        ImportedLayer(
            f"layer{number}",
            FORWARD_SHARE * layer.backward_s,
            layer.backward_s,
            [
                Parameter(name, size)
                for name, size in zip(("weight", "bias"), layer.elements, strict=False)
            ],
        )
        for number, layer in enumerate(read_logged_layers(source))
    ]
    notes = (
        "forward is assumed to take half of backward: the log has none",
        "exchanges are left out: a simulation finds its own",
    )
    return assemble(source, "B-Caffe log", layers, samples, notes=notes)


def read_logged_layers(source: Source) -> tuple[LoggedLayer, ...]:
    """Return the layers of a log's last dump, in the order of use."""
    blobs = _last_dump(source)
    layers: list[list[_Blob]] = []
    for blob in blobs:
        is_bias = layers and len(layers[-1]) == 1 and layers[-1][0].backward_s == blob.backward_s
        if is_bias:
            layers[-1].append(blob)
        else:
            layers.append([blob])
    return tuple(
        LoggedLayer(
            tuple(blob.elements for blob in layer),
            layer[0].backward_s,
            sum(blob.exchange_s for blob in layer),
            sum(blob.merged_s for blob in layer),
        )
        for layer in layers
    )


def _last_dump(source: Source) -> list[_Blob]:
    """Return the last dump; each has all parameters, counted from 0."""
    dumps: list[list[_Blob]] = []
    for line in source.lines():
        blob = _read_line(line)
        if blob is None:
            continue
        if blob.number == 0:
            dumps.append([])
        expected = len(dumps[-1]) if dumps else 0
        if blob.number != expected:
            found, rule = f"got parameter {blob.number}", f"parameter {expected} comes next"
            raise source.error(blob.at, found, rule)
        dumps[-1].append(blob)
    if not dumps:
        raise source.error(0, "no line ends with a list", "each line of a dump does")
    last, most = dumps[-1], max(map(len, dumps))
    if len(last) < most:
        found = f"the dump has {len(last)} parameters"
        raise source.error(last[0].at, found, f"another one has {most}")
    if not any(blob.backward_s for blob in last):
        raise source.error(last[0].at, "all times of the dump are 0", "the last dump has times")
    return last


def _read_line(line: Cursor) -> _Blob | None:
    """Return what a line of a dump says; None for other lines of a log."""
    if _NUMBERS.search(line.rest) is None and not re.search(r"\]\s*\[", line.rest):
        if line.stop == len(line.source.text) and not line.is_empty:
            found, rule = "the file ends in the middle of a line", "the last line of a log is whole"
            raise line.source.error(line.stop, found, rule)
        return None
    begin = line.rest.rfind("[")
    if begin < 0:
        raise line.error("a line of a dump ends with a list in brackets")
    line.at += begin + 1
    line.skip_blanks()
    at = line.at
    number = line.whole("a parameter's number")
    _comma(line)
    elements_at, elements = line.at, line.whole("a number of elements")
    if not elements:
        raise line.error("a parameter has elements", elements_at)
    _comma(line)
    backward_s = line.seconds("a time of backward", _PER_S)
    _comma(line)
    exchange_s, merged_s = line.seconds("a time of an exchange", _PER_S), 0.0
    line.skip_blanks()
    if line.rest.startswith(","):
        _comma(line)
        merged_s = line.seconds("a time of an exchange", _PER_S)
    line.skip_blanks()
    line.take(r"\][ \t]*", "the end of the list, ],")
    if not line.is_empty:
        raise line.error("a line of a dump ends with its list")
    return _Blob(at, number, elements, backward_s, exchange_s, merged_s)


def _comma(line: Cursor) -> None:
    line.skip_blanks()
    line.take(",", "a comma")
    line.skip_blanks()
