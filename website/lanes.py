"""What the two lanes of a rank do in two steps: gradients all-reduced as in DDP, and Syncline.

Both are simulated: six equal layers on four machines, with links on which exchanging all gradients
takes as long as computing them. DDP is `wait_free`, which all-reduces each layer's gradients while
backward computes the next ones.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

from syncline.cluster import cluster_of
from syncline.cluster_file import find_cluster
from syncline.config.settings import ClusterSettings
from syncline.perf.trace import Task
from syncline.sim.run import Outcome, simulate
from syncline.strategies import make_strategy
from syncline.workload import Layer, Workload
from website.svg import box, picture, text

LAYERS, MACHINES = 6, 4
FORWARD_S, BACKWARD_S, WIRE_S = 0.1, 0.2, 0.3
STEPS = (1, 2)
WIDTH, LEFT, HEIGHT = 880, 112, 26
SHOWN_S = 0.86
FILLS = {"forward": "#8ecae6", "backward": "#219ebc", "reduce": "#ffb703", "gather": "#fb8500"}


def draw_lanes() -> str:
    """Return the picture."""
    ddp, ours = _run("wait_free"), _run("synchronous")
    shapes = [
        *_lanes(ddp, 10, "DDP: the all-reduce hides behind backward", {"reduce": "all-reduce"}),
        *_lanes(ours, 150, "Syncline: half of it also hides behind the next forward", {}),
        *_legend(290),
    ]
    title = "A step of DDP and a step of Syncline, lane by lane"
    return picture(WIDTH, 330, title, shapes)


def _run(strategy: str) -> Outcome:
    cluster = cluster_of(ClusterSettings(), MACHINES, None, find_cluster("1gbit"))
    traffic = 2 * (MACHINES - 1) / MACHINES
    size = int(WIRE_S * cluster.network.rate_bytes_per_s / traffic / LAYERS) // 4 * 4
    layers = tuple(
        Layer(f"layer {number}", size, FORWARD_S / LAYERS, BACKWARD_S / LAYERS)
        for number in range(LAYERS)
    )
    return simulate(
        Workload("six layers", layers, samples=1),
        cluster,
        functools.partial(make_strategy, strategy),
        steps=4,
        shards=MACHINES,
        bucket_bytes=None if strategy == "wait_free" else size,
        overlap=None if strategy == "wait_free" else True,
        traces=True,
    )


def _lanes(found: Outcome, y: float, title: str, names: dict[str, str]) -> Iterator[str]:
    assert found.trace is not None
    mine = [one for one in found.trace.tasks if one.rank == 0 and one.step in STEPS]
    start_s = min(one.start_s for one in mine if one.kind == "forward")
    yield text(10, y + 14, title, bold=True)
    compute_s = FORWARD_S + BACKWARD_S
    figures = f"a step takes {found.step_s * 1e3:.0f} ms; its compute {compute_s * 1e3:.0f} ms"
    yield text(WIDTH - 10, y + 14, figures, anchor="end")
    for row, (lane, label) in enumerate((("compute", "compute lane"), ("comm", "comm lane"))):
        top = y + 28 + row * (HEIGHT + 12)
        yield text(10, top + 18, label)
        for task in mine:
            if task.lane == lane and task.kind in FILLS:
                yield from _task(task, start_s, top, names.get(task.kind, task.kind))


def _task(task: Task, start_s: float, top: float, name: str) -> Iterator[str]:
    scale = (WIDTH - LEFT - 10) / SHOWN_S
    begin, end = (LEFT + scale * (when - start_s) for when in (task.start_s, task.end_s))
    end = min(end, WIDTH - 10)
    if begin >= end or (name == "gather" and task.parts[-1].kind == "update"):
        return
    about = f"{name}, layer {task.bucket + 1}, step {task.step}"
    yield box(begin, top, end - begin, HEIGHT, FILLS[task.kind], about)
    if end - begin > 12:
        yield text((begin + end) / 2, top + 18, str(task.bucket + 1), anchor="middle")


def _legend(y: float) -> Iterator[str]:
    words = {
        "forward": "forward",
        "backward": "backward",
        "reduce": "all-reduce, or reduce to owners of strips",
        "gather": "update of strips, gather",
    }
    x = 10.0
    for kind, label in words.items():
        yield box(x, y, 14, 14, FILLS[kind])
        yield text(x + 20, y + 12, label)
        x += 60 + 7 * len(label)
    yield text(10, y + 34, "Numbers are layers. Where a lane is white, it waits.", fill="#555555")
