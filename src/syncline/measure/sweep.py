"""Times collectives of many sizes on real ranks, through the communicator that training uses.

Every rank of the world runs the same `Plan`. Cells (a collective, a size, a group of ranks) are
timed in turn, round after round, so that what else happens on the machine hits all of them alike.
A cell's time in a round is that of several collectives, one after the other, on the slowest rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from syncline.cluster_facts import Measured
from syncline.comm.base import Communicator, Strips, even_cuts, small_sum, tell_all

KINDS = ("reduce_scatter", "all_gather", "all_reduce")
"""What strategies call for buckets; gathers are into memory that ranks of a machine share."""

SIZES = tuple(64 * 4**power for power in range(10))
"""From 64 bytes to 16 MB: flags, and buckets of every size."""

SMALL = 1024
"""Up to this size a collective's processor time is that of its messages."""

BLOCK_S = 0.004
"""A block of small collectives takes about as long: some hundreds of clock readings."""

MOST_TIMES = 200


class Cell(NamedTuple):
    """One collective of one size in a group of equal machines."""

    what: str
    size_bytes: int
    machines: int
    ranks_per_machine: int


@dataclass(frozen=True)
class Plan:
    """What to measure: sizes in bytes, and how many rounds.

    Groups of more than `most_ranks` ranks, which have no core for each, exchange small sizes only:
    their processor time tells what a message costs.
    """

    sizes: Sequence[int] = SIZES
    rounds: int = 15
    most_ranks: int | None = None
    on_round: Callable[[int], None] = lambda number: None


def sweep(comm: Communicator, plan: Plan) -> list[Measured]:
    """Time all cells, on the comm lane. Every rank calls it, and gets the same table."""
    cells = [cell for group in _groups(comm) for cell in _cells(group, plan)]
    num_times = [_num_times(comm, run) for _, _, run in cells]
    rounds = []
    for number in range(plan.rounds):
        mine = [
            _time_block(comm, group, run, times)
            for (_, group, run), times in zip(cells, num_times, strict=True)
        ]
        rounds.append(mine)
        plan.on_round(number + 1)
    told = tell_all(comm, [value for one in rounds for pair in one for value in pair])
    times_s = np.array(told).reshape(comm.size, plan.rounds, len(cells), 2).max(axis=0)
    return [_row(cell, times_s[:, at]) for at, (cell, _, _) in enumerate(cells)]


def copy_rate(size_bytes: int = 1 << 20, rounds: int = 50) -> float:
    """Return the highest rate at which one core copies memory that is in its cache."""
    source, target = torch.ones(size_bytes // 4), torch.zeros(size_bytes // 4)
    times = []
    for _ in range(rounds):
        started_s = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - started_s)
    return size_bytes / min(times)


def _row(cell: Cell, rounds: np.ndarray[tuple[int, int], np.dtype[np.float64]]) -> Measured:
    low_s, median_s, high_s = np.quantile(rounds[:, 0], (0.25, 0.5, 0.75)).tolist()
    return Measured(
        what=cell.what,
        size_bytes=cell.size_bytes,
        machines=cell.machines,
        ranks_per_machine=cell.ranks_per_machine,
        median_s=median_s,
        low_s=low_s,
        high_s=high_s,
        cpu_s=float(np.median(rounds[:, 1])),
    )


Run = Callable[[], None]
Group = Communicator | None
"""None on ranks that are not in it."""


def _groups(comm: Communicator) -> list[tuple[Group, int, int]]:
    """Return groups of equal machines: all ranks, and fewer ones. Every rank calls it.

    With one group alone latency, messages and collectives could not be told apart.
    """
    machines = comm.machines
    per_machine = min(map(len, machines))
    shapes = [(many, per_machine) for many in _some(len(machines)) if many > 1]
    shapes += [(1, ranks) for ranks in _some(per_machine) if ranks > 1]
    found = []
    for many, ranks in shapes:
        members = [rank for machine in machines[:many] for rank in machine[:ranks]]
        group = comm if len(members) == comm.size else comm.subgroup(members)
        found.append((group, many, ranks))
    return found


def _some(count: int) -> list[int]:
    """Return a few numbers up to `count`: 2, half of it and itself."""
    return sorted({min(2, count), max(1, count // 2), count})


def _cells(group: tuple[Group, int, int], plan: Plan) -> list[tuple[Cell, Group, Run | None]]:
    comm, machines, ranks = group
    is_large = plan.most_ranks is not None and machines * ranks > plan.most_ranks
    sizes = [size for size in plan.sizes if size <= SMALL or not is_large]
    return [
        (
            Cell(what, size, machines, ranks),
            comm,
            None if comm is None else _prepare(comm, what, size),
        )
        for what in KINDS
        for size in sizes
    ]


def _prepare(comm: Communicator, what: str, size_bytes: int) -> Run:
    """Return a function that runs a collective of this size, on memory that was touched."""
    elements = size_bytes // 4
    if what == "all_gather":
        memory = comm.allocate_common(elements, torch.float32)
        memory.mine.zero_()
        strips = Strips(memory, even_cuts(elements, comm.size))
        return lambda: comm.all_gather(strips)
    sums = small_sum(comm, elements, torch.float32)
    sums.sums[0].mine.zero_()
    return (
        (lambda: comm.reduce_scatter(sums))
        if what == "reduce_scatter"
        else (lambda: comm.all_reduce(sums))
    )


def _num_times(comm: Communicator, run: Run | None) -> int:
    """Return how often a block runs a collective: the same number on all ranks."""
    once_s = 0.0
    for _ in range(2):
        comm.barrier()
        started_s = time.perf_counter()
        if run is not None:
            run()
        once_s = time.perf_counter() - started_s
    slowest_s = max(one[0] for one in tell_all(comm, [once_s]))
    return max(1, min(MOST_TIMES, int(BLOCK_S / slowest_s)))


def _time_block(
    comm: Communicator, group: Group, run: Run | None, times: int
) -> tuple[float, float]:
    """Return the seconds of one collective, and of the processor; 0 on ranks without it."""
    comm.barrier()
    if run is None or group is None:
        return 0.0, 0.0
    run()
    group.barrier()
    started_s, cpu_s = time.perf_counter(), time.thread_time()
    for _ in range(times):
        run()
    return (time.perf_counter() - started_s) / times, (time.thread_time() - cpu_s) / times
