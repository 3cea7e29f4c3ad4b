"""The graph of a run that goes into the page: of a very long run, its first steps alone."""

from __future__ import annotations

from typing import Any

import msgspec

from syncline.perf.graph import Graph, compile_trace
from syncline.perf.moments import CLASSES
from syncline.perf.trace import Trace
from syncline.report.page.pack import pack

MOST_TASKS = 1_000_000
"""A page with more tasks opens slowly and does not fit into an e-mail."""


def packed(graph: Graph, most: int = MOST_TASKS) -> tuple[dict[str, Any], str]:
    """Return the facts of a graph, and its columns as text; see `pack`."""
    short = shortened(graph, most)
    facts, columns = pack(short)
    return facts | {"classes": CLASSES, "left": graph.header.steps - short.header.steps}, columns


def shortened(graph: Graph, most: int) -> Graph:
    """Return the graph of as many first steps as have `most` tasks together; at least two."""
    if graph.num_tasks <= most:
        return graph
    header = graph.header
    steps = max(2, header.steps * most // graph.num_tasks)
    tasks = tuple(task for task in graph.tasks if task.step < header.first_step + steps)
    return compile_trace(Trace(tasks, msgspec.structs.replace(header, steps=steps)))
