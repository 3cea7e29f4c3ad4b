"""Several processes that measure the same job at the same time, in step with each other."""

from __future__ import annotations

import functools
import mmap
import struct
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import typer

from syncline.cli.output import report, say
from syncline.config import Job
from syncline.errors import SynclineError
from syncline.launch.env import read_world
from syncline.launch.local import launch
from syncline.launch.signals import end_promptly, leave
from syncline.resources import explain

if TYPE_CHECKING:
    from syncline.measure.layers import Measured
    from syncline.measure.trials import Times

_POLL_S = 50e-6
_WORD = 8


class Counters:
    """How often each rank has come to a meeting, in memory that forked processes share."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._memory = mmap.mmap(-1, _WORD * (ranks + 1))

    def get(self, index: int) -> int:
        found: int = struct.unpack_from("q", self._memory, _WORD * index)[0]
        return found

    def put(self, index: int, value: int) -> None:
        struct.pack_into("q", self._memory, _WORD * index, value)

    def meet(self, rank: int) -> None:
        """Wait until every rank has come as often as this one. A rank that fails stops all."""
        times = self.get(rank) + 1
        self.put(rank, times)
        while any(self.get(other) < times for other in range(self.ranks)):
            time.sleep(_POLL_S)

    def tell(self, rank: int, value: int) -> int:
        """Return rank 0's value on every rank."""
        if rank == 0:
            self.put(self.ranks, value)
        self.meet(rank)
        found = self.get(self.ranks)
        self.meet(rank)  # nobody writes the next value before all have read this one
        return found


def measure_on_ranks(
    job: Job, samples: Sequence[int] | None, seconds: float, ranks: int
) -> Measured:
    """Measure on so many forks of this process; medians are those of all of them."""
    from syncline.measure.layers import Measured

    counters = Counters(ranks)
    with tempfile.TemporaryDirectory(prefix="syncline-measure-") as folder:
        work = functools.partial(_as_rank, job, samples, seconds, counters, Path(folder))
        outcome = launch(work, ranks, threads=job.run.threads)
        if outcome.exit_code:
            raise typer.Exit(outcome.exit_code)
        return msgspec.json.decode((Path(folder) / "measured").read_bytes(), type=Measured)


def _as_rank(
    job: Job, samples: Sequence[int] | None, seconds: float, counters: Counters, folder: Path
) -> None:
    end_promptly()
    rank = read_world().rank
    try:
        _measure(job, samples, seconds, counters, folder, rank)
    except SynclineError as error:
        if error.exit_code != 2 or rank == 0:  # all ranks read the same input
            report(error)
        leave(error.exit_code)
    except (MemoryError, OSError, RuntimeError) as error:
        why = explain(error)
        if why is None:
            raise
        say(f"rank {rank}: {why}")
        leave(1)


def _measure(
    job: Job,
    samples: Sequence[int] | None,
    seconds: float,
    counters: Counters,
    folder: Path,
    rank: int,
) -> None:
    from syncline.measure.layers import measure_layers
    from syncline.measure.trials import Times, Together

    class InStep(Together):
        def meet(self) -> None:
            counters.meet(rank)

        def agree(self, goes_on: bool) -> bool:
            return bool(counters.tell(rank, goes_on))

    def gather(found: dict[int, Times]) -> None:
        (folder / str(rank)).write_bytes(msgspec.json.encode(list(found.values())))
        counters.meet(rank)
        for other in range(counters.ranks):
            if other != rank:
                text = (folder / str(other)).read_bytes()
                for times in msgspec.json.decode(text, type=list[Times]):
                    found[times.samples].add(times)

    measured = measure_layers(job, samples, seconds, together=InStep(), gather=gather)
    if rank == 0:
        (folder / "measured").write_bytes(msgspec.json.encode(measured))
