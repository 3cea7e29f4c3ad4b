"""One rank in virtual time: the two lanes of a replica, with a workload in place of a network.

The strategy's hooks are called at the same moments and in the same order as by `replica.py`; what
they wait for, and how long, is the virtual communicator's business. Forward and backward take the
time that the workload says, bucket by bucket. Whoever learns does the arithmetic of a whole shard
in one go, at the moment when forward reads its last bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from syncline.comm.base import Communicator, Partials, small_sum
from syncline.comm.virtual import VirtualWorld
from syncline.engine.bucket import Bucket, Slot, Step, Update, cut_buckets, cut_strips, place
from syncline.engine.update import Hyper
from syncline.faults import Conditions
from syncline.perf.trace import Recorder, TaskId
from syncline.sim.lane import VirtualLane
from syncline.strategies.base import Strategy
from syncline.virtual.clock import Signal
from syncline.workload import Workload


@dataclass(frozen=True)
class Settings:
    """What all ranks of a simulation have in common."""

    workload: Workload
    shards: int
    steps: int
    bucket_bytes: int
    overlap: bool = True
    cuts_parameters: bool = True
    """Whether the optimizer may update a part of a parameter."""
    conditions: Conditions = field(default_factory=Conditions)


class Learner(Protocol):
    """Does one rank's arithmetic: the same as a real rank's, on the same data."""

    @property
    def statistics(self) -> Partials | None:
        """Running statistics of norm layers, to be averaged over shards."""

    def lay_out(self, rank: VirtualRank, comm: Communicator) -> None:
        """Put the first parameters in place."""

    def update_of(
        self, bucket: Bucket, parameters: torch.Tensor, gradient: torch.Tensor, low: int, high: int
    ) -> Update:
        """Make the optimizer of a strip."""

    def compute(self, rank: VirtualRank, step: int, shard: int) -> None:
        """Run forward and backward of one shard; leave the gradients in the buckets."""

    def flat_buffers(self) -> torch.Tensor:
        """Return a copy of all buffers, flat."""

    def hyper(self, step: int) -> Hyper:
        """Return the optimizer's settings in a step."""

    def flags(self) -> list[float]:
        """Say what `step_entered` sums over ranks: see `Replica`."""

    def clip(self, rank: VirtualRank, comm: Communicator) -> None:
        """Clip the gradient, on the comm lane, where the job asks for it."""

    def step_entered(
        self, rank: VirtualRank, comm: Communicator, step: int, flags: list[float]
    ) -> None:
        """Take over what all ranks said."""


class VirtualRank:
    """What a strategy sees of a replica, and the compute lane that drives it."""

    def __init__(
        self,
        world: VirtualWorld,
        number: int,
        strategy: Strategy,
        settings: Settings,
        slots: list[Slot],
        layers: Sequence[tuple[float, float]],
        learner: Learner | None,
        recorder: Recorder,
    ) -> None:
        self.rank = number
        self.world = world
        self.strategy = strategy
        self.settings = settings
        self.slots = slots
        self.learner = learner
        self.recorder = recorder
        self.buckets: list[Bucket] = []
        self.comm = world.communicator(number)
        self.step_ends_s: list[float] = []
        self.waited_s = 0.0
        self.ended_s = 0.0
        self.whole: tuple[list[torch.Tensor], torch.Tensor] | None = None
        """What stands for the run as a whole, where the ranks part: buckets and buffers."""
        self._loaded_s = 0.0
        self.on_step: Callable[[int], None] = lambda step: None
        self._layers = layers
        self._clock = world.clock
        self._me = world.endpoints[number]
        self._lane = VirtualLane(world.clock, f"comm lane of rank {number}")
        self._ready: dict[int, Signal] = {}
        self._before: dict[str, TaskId] = {}
        """The last task of each lane."""
        share = strategy.share(self.comm, settings.shards)
        self.group, self.my_shards, self.summed = share.group, share.mine, share.summed
        self.spread, self.leaves = share.spread, share.leaves
        self.num_slots = self.spread.num_slots

    # What strategies use.

    def update_of(
        self, bucket: Bucket, parameters: torch.Tensor, gradient: torch.Tensor, low: int, high: int
    ) -> Update:
        """Make the user's optimizer for elements `low` to `high` of memory laid out as a bucket."""
        inner = None
        if self.learner is not None:
            inner = self.learner.update_of(bucket, parameters, gradient, low, high)
        size_bytes = (high - low) * bucket.dtype.itemsize
        return _TimedUpdate(self, inner, size_bytes / self.world.cluster.update_bytes_per_s)

    def flat_buffers(self) -> torch.Tensor:
        """Return a copy of all buffers, flat."""
        if self.learner is None:
            return torch.empty(0, dtype=torch.float64, device=self.world.device)
        return self.learner.flat_buffers()

    def cut(self, bucket: Bucket, comm: Communicator, num_owners: int) -> tuple[int, ...]:
        """Cut a bucket into strips that the optimizer can update one by one."""
        key = (comm.ranks, num_owners, bucket.index)
        cuts = self.world.cuts.get(key)
        if cuts is None:
            inside = self.settings.cuts_parameters
            cuts = cut_strips(bucket, comm.size, inside_parameters=inside, num_owners=num_owners)
            self.world.cuts[key] = cuts
        return cuts

    def _lay_out(self) -> None:
        """Put parameters and gradients into the group's memory, as a real replica does."""
        comm, allocate = self.group, self.comm.allocate
        self.buckets = cut_buckets(self.slots, self.settings.bucket_bytes)
        for bucket in self.buckets:
            size = (bucket.num_elements, bucket.dtype)
            memory = comm.allocate_common(*size) if comm is self.comm else allocate(*size)
            slots = [allocate(*size) for _ in range(self.num_slots)]
            place(bucket, memory, slots, self.cut(bucket, comm, comm.size), self.spread)
        num_flags = len(self.slots) + 1 + len(self.summed)
        self._flags = small_sum(comm, num_flags, torch.float32)
        if self.learner is not None:
            self.learner.lay_out(self, comm)
        for bucket in self.buckets:
            low, high = bucket.parameters.cuts[comm.position : comm.position + 2]
            mine = (bucket.parameters.memory.mine, bucket.gradient.slots[0].mine)
            bucket.update = self.update_of(bucket, *mine, low, high)

    # The compute lane.

    def live(self) -> None:
        """Take all steps, as one process of the clock."""
        settings, conditions = self.settings, self.settings.conditions
        self._lane.submit(self._lay_out)
        self._lane.submit(self.strategy.start, self, self.comm)
        self._lane.submit(self.strategy.admit)
        self._lane.drain()
        self._times = times_of(self.buckets, self._layers)
        for bucket in self.buckets:
            self._ready[bucket.index] = Signal(self._clock)
            self._ready[bucket.index].set()
        for step in range(settings.steps if self.my_shards else 0):
            if conditions.dies(self.rank, step):
                self._lane.stop()
                self.world.die(self._me, f" (died at step {step})")
                return
            self._load(step)
            pause_s = conditions.pause_s(self.rank, step)
            if pause_s:
                self._spend("pause", -1, step, pause_s)
            self._compute(step, conditions.factor(self.rank, step))
            self._step(step)
            self.step_ends_s.append(self._clock.now_s)
            self.on_step(step + 1)
        for bucket in self.buckets:
            self._await(bucket, settings.steps)
        self.ended_s = self._clock.now_s
        if self.learner is not None and self.strategy.is_apart:
            self._lane.submit(self._gather)
            self._lane.drain()

    def _gather(self) -> None:
        strategy: Any = self.strategy
        living = [one.rank for one in self.world.endpoints if not one.died]
        self.whole = strategy.gather(is_wanted=self.rank == min(living))

    def _load(self, step: int) -> None:
        """Wait for the step's input, which is loaded while the step before it runs."""
        input_s = self.settings.workload.input_s
        if input_s:
            started = self._clock.now_s
            self._loaded_s = max(started, self._loaded_s + input_s)
            if self._loaded_s > started:
                self._spend("input", -1, step, self._loaded_s - started)

    def _compute(self, step: int, factor: float) -> None:
        """Run forward and backward of every shard; send buckets as the last one finishes them."""
        first, last = self.my_shards[0], self.my_shards[-1]
        for shard in self.my_shards:
            for bucket, (forward_s, _) in zip(self.buckets, self._times, strict=True):
                if shard == first:
                    self._await(bucket, step)
                self._spend("forward", bucket.index, step, forward_s * factor)
            if self.learner is not None:
                self.learner.compute(self, step, shard)
            for bucket, (_, backward_s) in zip(
                reversed(self.buckets), reversed(self._times), strict=True
            ):
                self._spend("backward", bucket.index, step, backward_s * factor)
                if shard == last and self.settings.overlap:
                    self._send(bucket, step)

    def _send(self, bucket: Bucket, step: int) -> None:
        cause = self._last("backward", bucket.index)
        self._lane.submit(self._run_gradient_ready, bucket, step, cause)

    def _step(self, step: int) -> None:
        if not self.settings.overlap:
            for bucket in reversed(self.buckets):
                self._send(bucket, step)
        cause = self._last("backward", 0)
        if self.learner is not None:
            self._lane.submit(self.learner.clip, self, self.group)
        flags = self.learner.flags() if self.learner is not None else []
        hyper = self.learner.hyper(step) if self.learner is not None else []
        self._lane.submit(self._run_step_entered, step, flags, cause)
        for bucket in self.buckets:
            self._ready[bucket.index] = Signal(self._clock)
            self._lane.submit(self._run_before_use, bucket, step, hyper)
        if not self.settings.overlap:
            started = self._clock.now_s
            self._lane.drain()
            self.waited_s += self._clock.now_s - started

    def _spend(self, kind: str, bucket: int, step: int, seconds: float) -> None:
        started = self._clock.now_s
        if seconds:
            self._clock.sleep(seconds)
        self._record("compute", kind, bucket, step, started, self._last("wait", bucket))

    def _await(self, bucket: Bucket, step: int) -> None:
        ready = self._ready[bucket.index]
        if not ready.is_set:
            started = self._clock.now_s
            ready.wait(
                lambda: f"rank {self.rank}, step {step}, forward: waits for bucket {bucket.index}"
            )
            self.waited_s += self._clock.now_s - started
            after = self._last("gather", bucket.index)
            self._record("compute", "wait", bucket.index, step, started, after)

    # The comm lane.

    def _begin(self, phase: str, bucket: int, step: int, cause: TaskId | None) -> float:
        place = f"bucket {bucket} of " if bucket >= 0 else ""
        self._me.doing = f"rank {self.rank}, {phase} of {place}step {step}"
        self._me.cause, self._me.waited_for = cause, None
        return self._clock.now_s

    def _run_gradient_ready(self, bucket: Bucket, step: int, cause: TaskId | None) -> None:
        started = self._begin("reduce", bucket.index, step, cause)
        self.strategy.gradient_ready(bucket)
        self._record("comm", "reduce", bucket.index, step, started, cause, self._me.waited_for)

    def _run_step_entered(self, step: int, flags: list[float], cause: TaskId | None) -> None:
        started = self._begin("step", -1, step, cause)
        learner = self.learner
        if learner is not None:
            self._flags.slots[0].mine.copy_(torch.tensor(flags))
        statistics = learner.statistics if learner is not None else None
        self.strategy.step_entered(Step(step, self._flags, statistics))
        if learner is not None:
            learner.step_entered(self, self.group, step, self._flags.result.tolist())
        self._record("comm", "step", -1, step, started, cause, self._me.waited_for)

    def _run_before_use(self, bucket: Bucket, step: int, hyper: Hyper) -> None:
        cause = self._last("step", -1)
        started = self._begin("update", bucket.index, step, cause)
        bucket.update.hyper = hyper
        self.strategy.before_use(bucket)
        bucket.step += 1
        before = self._last("reduce", bucket.index)
        waited_for = self._me.waited_for
        self._record("comm", "gather", bucket.index, step, started, before, cause, waited_for)
        self._ready[bucket.index].set()

    def _record(
        self, lane: str, kind: str, bucket: int, step: int, started: float, *after: TaskId | None
    ) -> None:
        before = self._before.get(lane)
        known = dict.fromkeys(task for task in (before, *after) if task is not None)
        number = self.recorder.add(lane, kind, bucket, step, started, tuple(known))
        self._before[lane] = (self.rank, number)

    def _last(self, kind: str, bucket: int) -> TaskId | None:
        """Return this rank's last task of a kind and bucket."""
        number = self.recorder.last.get((kind, bucket))
        return None if number is None else (self.rank, number)


def times_of(
    buckets: Sequence[Bucket], layers: Sequence[tuple[float, float]]
) -> list[tuple[float, float]]:
    """Add up the layers' times by bucket; `layers[k]` belongs to the slot with number k."""
    return [
        (
            sum(layers[slot.number][0] for slot in bucket.slots),
            sum(layers[slot.number][1] for slot in bucket.slots),
        )
        for bucket in buckets
    ]


class _TimedUpdate:
    """An update that takes time, and does something if somebody learns."""

    def __init__(self, rank: VirtualRank, inner: Update | None, seconds: float) -> None:
        self._clock = rank.world.clock
        self._inner = inner
        self._seconds = seconds
        self.hyper: list[dict[str, Any]] = [] if inner is None else inner.hyper
        self.without: Set[int] = frozenset()

    def run(self) -> None:
        if self._inner is not None:
            self._inner.hyper = self.hyper
            self._inner.run()
        if self._seconds:
            self._clock.sleep(self._seconds)

    def keep(self) -> None:
        raise NotImplementedError("updates are not taken early in virtual time")

    undo = keep

    def leave_out(self, numbers: Set[int]) -> None:
        self.without = numbers
        if self._inner is not None:
            self._inner.leave_out(numbers)

    def held_of(self, slot: Slot) -> Iterator[tuple[int, int, dict[str, Any]]]:
        return self._inner.held_of(slot) if self._inner is not None else iter(())

    def load_state(self, slot: Slot, state: dict[str, Any]) -> None:
        if self._inner is not None:
            self._inner.load_state(slot, state)
