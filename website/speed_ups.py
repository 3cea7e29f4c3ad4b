"""How much faster four machines are than one, by strategy, in four situations. Simulated."""

from __future__ import annotations

from collections.abc import Iterator

from syncline.cluster import cluster_of
from syncline.cluster_file import find_cluster
from syncline.config import parse_job
from syncline.sim.job import simulate_job
from website.svg import box, line, on_line, picture, text

MACHINES = 4
SITUATIONS = {
    "100 Gbit/s, all alike": ("100gbit", 1.0),
    "10 Gbit/s, all alike": ("10gbit", 1.0),
    "100 Gbit/s, one 5 times slower": ("100gbit", 5.0),
    "10 Gbit/s, one 5 times slower": ("10gbit", 5.0),
}
STRATEGIES = ("all_reduce", "wait_free", "synchronous", "local", "gossip", "elastic", "server")
JOB = """
[model]
name = "resnet-50"
[data]
name = "synthetic"
sample_shape = [3, 224, 224]
classes = 1000
samples = 1024
batch = 128
[optimizer]
lr = 0.1
momentum = 0.9
[strategy]
name = "{strategy}"
{own}
[run]
steps = 10
[cluster]
device = "v100"
slow_ranks = {{ "3" = {slow} }}
"""
OWN = {"local": "[strategy.local]\nperiod = 5"}
LEFT, COLUMN, ROW, TOP = 110, 190, 30, 74
FILL = "#8ecae6"


def find_speed_up(strategy: str, preset: str, slow: float) -> float:
    """Return how many times as many samples a second four machines take as one alone."""
    job = parse_job(JOB.format(strategy=strategy, own=OWN.get(strategy, ""), slow=slow))
    cluster = cluster_of(job.cluster, MACHINES, None, find_cluster(preset))
    job = job.resolved(MACHINES, cluster.by_machine)
    return simulate_job(job, cluster).speed_up


def draw_speed_ups() -> str:
    """Return the picture."""
    height = TOP + ROW * len(STRATEGIES) + 40
    shapes = [text(10, 22, "Speed-up of four machines over one: resnet-50, V100", bold=True)]
    for place, (title, (preset, slow)) in enumerate(SITUATIONS.items()):
        shapes += _column(LEFT + place * COLUMN, title, preset, slow)
    for row, strategy in enumerate(STRATEGIES):
        shapes.append(text(10, TOP + row * ROW + 17, strategy))
    note = "32 images a machine, simulated; local: period 5. The dashed line is 4."
    shapes.append(text(10, height - 12, note, fill="#555555"))
    return picture(LEFT + 4 * COLUMN + 10, height, "Speed-up of four machines, by strategy", shapes)


def _column(x: float, title: str, preset: str, slow: float) -> Iterator[str]:
    speed, _, condition = title.partition(", ")
    yield text(x, 46, speed)
    yield text(x, 62, condition)
    unit = (COLUMN - 60) / MACHINES
    bottom, full = TOP + ROW * len(STRATEGIES), x + MACHINES * unit
    yield line(x, TOP - 4, x, bottom)
    yield line(full, TOP - 4, full, bottom, dash="3 4")
    for row, strategy in enumerate(STRATEGIES):
        found = find_speed_up(strategy, preset, slow)
        y = TOP + row * ROW
        yield box(x, y, found * unit, ROW - 8, FILL, f"{strategy}: {found:.1f}")
        yield on_line(x + found * unit + 5, y + 16, f"{found:.1f}")
