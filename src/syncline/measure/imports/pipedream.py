"""Profile graphs of PipeDream (Narayanan et al. 2019): a line a layer, then the edges between them.

    node2 -- Conv2d(3, 64, ...) -- forward_compute_time=3.1, backward_compute_time=6.4, ...
            node1 -- node2

Times are milliseconds, activations bytes of a whole batch, parameters bytes. The order of use is
one in which every layer comes after those that it depends on. The layer that depends on none is the
input: its forward is the time to load a batch. There is no communication in such a file.
"""

from __future__ import annotations

import heapq
import re
from dataclasses import dataclass

from syncline.measure.imports.assemble import (
    Imported,
    ImportedLayer,
    assemble,
    float32_parameters,
)
from syncline.measure.imports.source import Cursor, Source

_FIELDS = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")
_PER_S = 1e3


@dataclass
class _Node:
    """A layer, and where its line begins."""

    at: int
    place: int
    """By the number in its name, so that the order does not depend on the order of lines."""
    kind: str
    layer: ImportedLayer
    activation_bytes: int


def is_profile(line: str) -> bool:
    """Tell whether a line is one of a profile."""
    return re.match(r"\s*node\S* -- ", line) is not None


def read_profile(source: Source, samples: int | None) -> Imported:
    """Return the workload of a profile."""
    nodes: dict[str, _Node] = {}
    edges: list[tuple[int, str, str]] = []
    for line in source.lines():
        if line.is_empty:
            continue
        start = line.at
        line.skip_blanks()
        name = line.take(r"node\S*(?= -- )", "a layer's name and --,")
        line.take(" -- ", "--")
        if start + len(name) + 4 == line.at:  # edges are indented
            if name in nodes:
                raise source.error(start, f"got {name} again", "a layer has one line")
            nodes[name] = _read_node(line, start, name, len(nodes))
        else:
            at = line.at
            edges.append((at, name, line.take(r"node\S*[ \t]*$", "a layer's name").strip()))
    if not nodes:
        raise source.error(0, "no line describes a layer", "a profile has a line for each")
    before = _before(source, nodes, edges)
    order = _in_order_of_use(source, nodes, before)
    if samples is not None:
        _add_activations(nodes, before, samples)
    notes = ["the order of use is one that the edges allow"]
    input_s = 0.0
    first = nodes[order[0]]
    if len(order) > 1 and not first.layer.parameters and not first.layer.backward_s:
        order, input_s = order[1:], first.layer.forward_s
        notes.append(f"{first.layer.name}: its {input_s * 1e3:.4g} ms are input, not a layer")
    layers = [nodes[name].layer for name in order]
    return assemble(source, "PipeDream profile", layers, samples, input_s=input_s, notes=notes)


def _read_node(line: Cursor, start: int, name: str, number: int) -> _Node:
    kind = line.take(r".+?(?= -- forward_compute_time=)", "a layer and -- forward_compute_time=")
    line.take(" -- ", "--")
    found: dict[str, float] = {}
    size_at = line.at
    for at, field in enumerate(_FIELDS):
        line.take(f"{', ' if at else ''}{field}=", f"{field}=")
        size_at = line.at
        if field.endswith("time"):
            found[field] = line.seconds(field, _PER_S)
        else:
            found[field] = line.whole(field)
    line.take(r"( -- stage_id=\d+)?[ \t]*$", "the end of the line")
    short = re.split(r"[^A-Za-z0-9_]", kind, maxsplit=1)[0] or "layer"
    parameters = float32_parameters(line.source, size_at, int(found["parameter_size"]))
    layer = ImportedLayer(
        f"{name}.{short}",
        found["forward_compute_time"],
        found["backward_compute_time"],
        parameters,
    )
    digits = name.removeprefix("node")
    place = int(digits) if re.fullmatch("[0-9]{1,15}", digits) else number
    return _Node(start, place, short, layer, int(found["activation_size"]))


def _before(
    source: Source, nodes: dict[str, _Node], edges: list[tuple[int, str, str]]
) -> dict[str, set[str]]:
    """Return which layers each one depends on."""
    before: dict[str, set[str]] = {name: set() for name in nodes}
    for at, first, then in edges:
        for name in (first, then):
            if name not in nodes:
                raise source.error(at, f"got {name}", "edges join layers that have a line")
        before[then].add(first)
    sources = [name for name in nodes if not before[name]]
    if len(sources) > 1:
        found = f"no edge leads to {sources[1]} nor to {sources[0]}"
        raise source.error(nodes[sources[1]].at, found, "one layer alone, the input, has none")
    return before


def _in_order_of_use(
    source: Source, nodes: dict[str, _Node], before: dict[str, set[str]]
) -> list[str]:
    """Return the layers so that each comes after those it depends on, else by number."""
    after: dict[str, list[str]] = {name: [] for name in nodes}
    missing = {name: len(needed) for name, needed in before.items()}
    for name, needed in before.items():
        for one in needed:
            after[one].append(name)
    ready = [(nodes[name].place, name) for name, count in missing.items() if not count]
    heapq.heapify(ready)
    order = []
    while ready:
        _, name = heapq.heappop(ready)
        order.append(name)
        for then in after[name]:
            missing[then] -= 1
            if not missing[then]:
                heapq.heappush(ready, (nodes[then].place, then))
    if len(order) < len(nodes):
        name = _in_a_circle({name for name, count in missing.items() if count}, before)
        raise source.error(nodes[name].at, f"{name} depends on itself", "edges make no circle")
    return order


def _in_a_circle(left: set[str], before: dict[str, set[str]]) -> str:
    """Return a layer of a circle, among layers each of which depends on one of them."""
    name, seen = min(left), set[str]()
    while name not in seen:
        seen.add(name)
        name = min(before[name] & left)
    return name


def _add_activations(nodes: dict[str, _Node], before: dict[str, set[str]], samples: int) -> None:
    for name, node in nodes.items():
        into = sum(nodes[one].activation_bytes for one in before[name])
        node.layer.input_bytes = into // samples
        node.layer.output_bytes = node.activation_bytes // samples
