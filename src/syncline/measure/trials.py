"""Runs a job's steps again and again, with and without hooks, at several numbers of samples.

Everything is the job's own: model, data, loss, optimizer, threads. In each round every number of
samples has its turn, in shuffled order, so that what disturbs the machine disturbs all alike. The
learning rate is 0: the arithmetic is that of training, and the weights stay what they are.
"""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable, Sequence
from itertools import pairwise

import msgspec
import numpy as np
import torch
from torch import nn

from syncline.config import Job, printable
from syncline.data import DataSet
from syncline.errors import ConfigError, SynclineError
from syncline.freed_memory import keep_freed_memory
from syncline.linear_layers import copy_to_meta
from syncline.loader import epoch_order
from syncline.losses import Loss, loss_of
from syncline.measure.count import Counted, count
from syncline.measure.moments import LayerClock, backward_of, forward_of, hook_costs
from syncline.recipe import Batch, batch_of, build_model, build_optimizer, load_data
from syncline.samples import seed_generators
from syncline.seeds import seed_for

LEAST_ROUNDS, MOST_ROUNDS = 5, 1000
_WARM_UP = 2
"""Steps that are not counted, of each number of samples."""


class Times(msgspec.Struct):
    """What was measured for one number of samples: a list entry for each round."""

    samples: int
    forward_s: list[float] = []
    """Of a plain loop without hooks."""
    backward_s: list[float] = []
    update_s: list[float] = []
    read_s: list[float] = []
    layers_forward_s: list[list[float]] = []
    """With hooks, in rounds of their own; what hooks cost is taken off."""
    layers_backward_s: list[list[float]] = []

    def add(self, other: Times) -> None:
        """Add what another rank measured at the same time."""
        for name in self.__struct_fields__[1:]:
            getattr(self, name).extend(getattr(other, name))


class Together:
    """How ranks that compute at the same time keep step; one alone has nobody to wait for."""

    def meet(self) -> None:
        """Wait until every rank is here."""

    def agree(self, goes_on: bool) -> bool:
        """Return what rank 0 says. Every rank calls it."""
        return goes_on


class Trials:
    """One rank's trials of a job."""

    def __init__(
        self,
        job: Job,
        wanted: Sequence[int] | None = None,
        together: Together | None = None,
    ) -> None:
        """`job` is resolved; `wanted` are numbers of samples to measure, None for powers of 2."""
        torch.set_num_threads(job.run.threads)
        keep_freed_memory()  # as in a run
        assert job.strategy.shards is not None
        self.job = job
        self.samples = job.data.batch // job.strategy.shards
        """Those of a shard."""
        self._together = together or Together()
        self._data: DataSet = load_data(job)
        self.sizes = self._sizes(wanted)
        """The numbers of samples to measure: a shard's is among them."""
        self._order = epoch_order(len(self._data.train), job.run.seed, 0).numpy()
        self.model = build_model(job, self._data).train()
        self._loss: Loss = loss_of(job.model.loss)
        self._optimizer = build_optimizer(job.optimizer, self.model)
        for group in self._optimizer.param_groups:
            group["lr"] = 0.0
        self._clip_norm = job.optimizer.clip_norm
        self._next_row = 0

    def _sizes(self, wanted: Sequence[int] | None) -> list[int]:
        powers = [2**k for k in range(self.samples.bit_length()) if 2**k < self.samples]
        found = sorted({*(powers if wanted is None else wanted), self.samples})
        if found[-1] > len(self._data.train):
            raise ConfigError(
                "--samples",
                f"got {found[-1]}",
                f"{self._data.name} has {len(self._data.train)} samples",
                f"Use at most {len(self._data.train)}.",
            )
        return found

    def counted(self) -> Counted:
        """Count the layers' operations; with values, if forward needs them."""
        batch = self._read(self.samples)[0]
        with torch.random.fork_rng():
            try:
                meta = torch.empty_like(batch, device="meta")
                return count(copy_to_meta(self.model), meta)
            except ConfigError:
                return count(copy.deepcopy(self.model), batch)

    def run(
        self,
        sizes: Sequence[int],
        names: Sequence[str],
        seconds: float,
        on_round: Callable[[int, float], None] = lambda rounds, spent_s: None,
    ) -> dict[int, Times]:
        """Measure for so many seconds, but at least some rounds; `names` are those of the layers.

        `on_round` is told how many rounds are done, and the seconds that they took.
        """
        clock = LayerClock(self.model, names)
        found = {size: Times(size) for size in sizes}
        costs = self._prepare(clock, sizes)
        batches = {size: self._read(size) for size in sizes}
        shuffled = random.Random(self.job.run.seed)
        began_s, rounds, goes_on = time.perf_counter(), 0, True
        while goes_on:
            turns = [(size, hooks) for size in sizes for hooks in (False, True)]
            shuffled.shuffle(turns)
            for size, hooks in turns:
                self._together.meet()
                if hooks:
                    self._time_layers(clock, found[size], batches[size], len(names), costs)
                else:  # as in training, a read comes after a step
                    batches[size] = self._time_read(found[size])
                    self._together.meet()
                    self._time_plain(found[size], batches[size])
            rounds += 1
            spent_s = time.perf_counter() - began_s
            on_round(rounds, spent_s)
            is_enough = rounds >= LEAST_ROUNDS and spent_s >= seconds
            goes_on = self._together.agree(not is_enough and rounds < MOST_ROUNDS)
        return found

    def _prepare(self, clock: LayerClock, sizes: Sequence[int]) -> tuple[float, float]:
        """Warm up, and see which layers are used without being called; return what hooks cost."""
        for size in sizes:
            batch = self._read(size)
            for _ in range(_WARM_UP):
                self._step(batch)
        with clock.listening():
            self._step(self._read(sizes[-1]))
        clock.watch_unseen()
        return hook_costs()

    def fails_with(self, size: int) -> str:
        """Return why a step of so many samples fails; "" if it does not."""
        try:
            self._step(self._read(size))
        except SynclineError:
            raise
        except Exception as error:
            return printable((str(error) or type(error).__name__).splitlines()[0])
        return ""

    def _read(self, size: int) -> Batch:
        """Read the next samples, as a shard's are read."""
        rows = np.arange(self._next_row, self._next_row + size) % len(self._order)
        self._next_row += size
        if self._data.is_own:
            seed_generators(seed_for(self.job.run.seed, "samples", self._next_row, 0))
        return batch_of(self._data.train, self._order[rows])

    def _time_read(self, times: Times) -> Batch:
        began_s = time.perf_counter()
        batch = self._read(times.samples)
        times.read_s.append(time.perf_counter() - began_s)
        return batch

    def _step(self, batch: Batch) -> list[float]:
        """Take a step; return the moments between its parts."""
        samples, targets = batch
        self._optimizer.zero_grad()
        moments_s = [time.perf_counter()]
        loss = self._loss(self.model(samples), targets)
        moments_s.append(time.perf_counter())
        loss.backward()
        moments_s.append(time.perf_counter())
        if self._clip_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self._clip_norm)
        self._optimizer.step()
        moments_s.append(time.perf_counter())
        return moments_s

    def _time_plain(self, times: Times, batch: Batch) -> None:
        moments_s = self._step(batch)
        lists = (times.forward_s, times.backward_s, times.update_s)
        for found, (began_s, ended_s) in zip(lists, pairwise(moments_s), strict=True):
            found.append(ended_s - began_s)

    def _time_layers(
        self,
        clock: LayerClock,
        times: Times,
        batch: Batch,
        layers: int,
        costs: tuple[float, float],
    ) -> None:
        with clock.listening():
            began_s, middle_s, ended_s, _ = self._step(batch)
        # A forward that is computed again in backward calls layers once more: that is backward.
        begun = [one for one in clock.begun if one[1] <= middle_s]
        times.layers_forward_s.append(forward_of(begun, began_s, middle_s, layers, costs[0]))
        times.layers_backward_s.append(
            backward_of(clock.ready, middle_s, ended_s, layers, costs[1])
        )
