"""A rank's batches, in the order of use: read in line, or ahead by a thread or by processes.

Where a batch is read does not change it (decision 22). `waited_s` is the time that the compute lane
waits for batches; in line that is the whole time of reading.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType

from syncline.comm.base import Communicator
from syncline.config import Job
from syncline.data import DataSet
from syncline.engine.lane import Lane
from syncline.errors import ConfigError
from syncline.launch.env import LaunchedRank
from syncline.loader_process import LoaderProcess, Reader
from syncline.own_functions import is_own
from syncline.recipe import Batch, Order, load_data
from syncline.same_data import check_same_data, digest_of_data

Place = tuple[int, int]
"""A step and a shard."""


class Input:
    """Loads a job's data, and reads the batches of one rank.

    Processes are forked when it is made, before the rank has threads and connections. Those for
    data of the user's own are forked before it is loaded, and load it themselves: a fork would
    share the positions of open files, and would hang in a parallel operation if the function had
    used one.
    """

    def __init__(self, job: Job, world: LaunchedRank) -> None:
        """`job` is resolved."""
        assert job.data.prefetch != "auto"
        self.waited_s = 0.0
        self.step_waited_s = 0.0
        """Of the last step that has ended."""
        self.steps_waited_s = 0.0
        """Of all steps that have ended but the first, which includes set-up."""
        self._before_s = 0.0
        self.on_wait: Callable[[float, float], None] = lambda started_s, ended_s: None
        """Called when a batch was waited for, with the two moments of `time.perf_counter`."""
        self._prefetch = job.data.prefetch
        self._processes: list[LoaderProcess] = []
        self._thread: ThreadPoolExecutor | None = None
        self._places: Iterator[Place] = iter(())
        self._pending: deque[tuple[Place, Callable[[], Batch]]] = deque()
        dataset = None if is_own(job.data.name) else load_data(job)
        try:
            if world.rank in job.strategy.own.workers(world.machines):
                self._start_readers(job, dataset)
            self.data = dataset or load_data(job)
            self.order = Order(job, self.data)
        except BaseException:
            self.close()
            raise

    def _start_readers(self, job: Job, dataset: DataSet | None) -> None:
        for number in range(job.data.workers):
            load = functools.partial(_reader, job, dataset)
            self._processes.append(LoaderProcess(str(number), load, self._processes))
        self._next_process = itertools.cycle(self._processes)
        if self._prefetch and not self._processes:
            self._thread = ThreadPoolExecutor(1, "syncline-input")

    def __enter__(self) -> Input:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop reading ahead; a read that is under way is not waited for."""
        self._pending.clear()
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
        for process in self._processes:
            process.close()

    def check_data(self, comm: Communicator, lane: Lane) -> None:
        """Refuse data of the user's own that ranks or loader processes do not all have alike.

        Every rank calls it.
        """
        mine = digest_of_data(self.data) if self.data.is_own else ""
        if self.data.is_own:
            check_same_data(self.data.name, mine, comm, lane)
        for number, process in enumerate(self._processes):
            if process.digest() not in (mine, ""):  # none, if it failed: it says so when asked
                raise ConfigError(
                    "data.workers",
                    f"{self.data.name} returned other samples in loader process {number} than on "
                    "the rank",
                    "each process calls the function, and must load the same data",
                    "Seed random numbers in the function (torch, numpy and random are seeded "
                    "before the call), or use data.workers = 0.",
                )

    def begin(self, places: Iterable[Place]) -> None:
        """Read the batches of these places, in this order; begin to read ahead."""
        self._places = iter(places)
        self._read_ahead(self._prefetch)

    def take(self, step: int, shard: int) -> Batch:
        """Return the next batch, which is this shard's; seed the generators for its forward.

        What reading it raised is raised here.
        """
        started_s = time.perf_counter()
        self._read_ahead(self._prefetch + 1)
        place, finish = self._pending.popleft()
        assert place == (step, shard), (place, step, shard)
        batch = finish()
        ended_s = time.perf_counter()
        self.waited_s += ended_s - started_s
        self.on_wait(started_s, ended_s)
        self.order.seed_forward(step, shard)
        return batch

    def end_step(self, *, is_first: bool) -> None:
        """Note what a step has waited."""
        self.step_waited_s = self.waited_s - self._before_s
        self._before_s = self.waited_s
        if not is_first:
            self.steps_waited_s += self.step_waited_s

    def _read_ahead(self, num_batches: int) -> None:
        """Begin to read until this many batches are read or being read."""
        for place in itertools.islice(self._places, num_batches - len(self._pending)):
            self._pending.append((place, self._start(*place)))

    def _start(self, step: int, shard: int) -> Callable[[], Batch]:
        """Begin to read a batch; return the function that waits for it."""
        if self._processes:
            process = next(self._next_process)
            process.ask(step, shard)
            return functools.partial(process.answer, step, shard)
        if self._thread is not None:
            return self._thread.submit(self.order.read, self.data, step, shard).result
        return functools.partial(self.order.read, self.data, step, shard)


def _reader(job: Job, dataset: DataSet | None) -> tuple[Reader, str]:
    """Return what reads a job's batches in a loader process, and the digest of own data."""
    own = dataset is None
    dataset = load_data(job) if dataset is None else dataset
    order = Order(job, dataset)
    return functools.partial(order.read, dataset), digest_of_data(dataset) if own else ""
