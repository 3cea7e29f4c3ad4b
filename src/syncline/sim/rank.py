"""One rank in virtual time: a workload's compute lane, which drives the engine's comm lane.

Forward and backward take the workload's times, bucket by bucket; `engine/steps.py` does everything
else in a step, as in a real run. A run that learns does the arithmetic of a whole shard at once, at
the moment when forward reads its last bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from syncline.comm.virtual import VirtualWorld
from syncline.contract import (
    Held,
    ParamGroups,
    Saved,
    Strategy,
    Whole,
    WholeValues,
)
from syncline.engine.bucket import Bucket, Slot, StripOptimizer, spans_of
from syncline.engine.early import EarlyUpdates
from syncline.engine.flags import Flags
from syncline.engine.layout import Layout, cut, lay_out
from syncline.engine.memory import make_buckets, open_shard, shapes_of
from syncline.engine.share import Share
from syncline.engine.steps import Steps
from syncline.perf.graph import COMPUTE
from syncline.perf.pace import RankSteps
from syncline.perf.recorder import Recorder
from syncline.sim.alike import largest_strip
from syncline.sim.compute import Compute
from syncline.sim.course import Course, Source, Turn
from syncline.sim.evaluation import RankEvaluation, Watch
from syncline.sim.input import VirtualInput
from syncline.sim.lane import VirtualLane
from syncline.sim.learner import Learner
from syncline.sim.setting import Setting
from syncline.sim.sizes_only import SizesOnly
from syncline.sim.timing import TimedOptimizer, VirtualTiming


class VirtualRank:
    """What a strategy sees of a model (`contract.Model`), and the compute lane that drives it."""

    layout: Layout
    steps: Steps

    def __init__(
        self,
        world: VirtualWorld,
        number: int,
        strategy: Strategy,
        setting: Setting,
        slots: Sequence[Slot],
        learner: Learner | None,
        recorder: Recorder | None,
        course: Course,
        watch: Watch | None = None,
    ) -> None:
        """`slots` are by number. Tasks are recorded if there is a recorder."""
        self.rank = number
        self.world = world
        self.strategy = strategy
        self.setting = setting
        self.slots = slots
        self.learner = learner
        self.recorder = recorder
        self.buckets: Sequence[Bucket] = ()
        self.optimizers: list[TimedOptimizer] = []
        self.total_steps: int | None = setting.steps
        self.comm = world.communicator(number)
        self.began_s = 0.0
        """When this rank began its first step."""
        self.step_ends_s: list[float] = []
        self.ended_s = 0.0
        self.whole: WholeValues | None = None
        """The parameters that represent the run, if ranks hold different ones."""
        self.gathered_s = 0.0
        """When they were gathered: what ranks had sent by then has arrived."""
        self.evaluation = RankEvaluation(self, watch)
        self._course = course
        self._last_bytes: int | None = None
        """Bytes sent in steps, once all are taken."""
        self.on_step: Callable[[int], None] = lambda step: None
        self.share = Share(setting.plan, self.comm)
        self._sizes_only: SizesOnly | None = None
        self.input_waited_s = 0.0
        """How long the compute lane waited for input, from the second step on."""
        self._input = VirtualInput(setting.loading)
        self._clock = world.clock
        self._me = world.endpoints[number]
        if recorder is not None:
            recorder.last_step = setting.steps - 1
            self.comm.traffic.recorder = recorder
        self._timing = VirtualTiming(world, number)
        self._lane = VirtualLane(world.clock, self._me)
        self.compute = Compute(self._spend, self.share.activations, self._lane, recorder)

    # What strategies use.

    def optimizer_of(
        self, bucket: Bucket, parameters: torch.Tensor, gradient: torch.Tensor, low: int, high: int
    ) -> StripOptimizer:
        """Return the user's optimizer for elements `low` to `high` of memory like a bucket's."""
        inner = None
        if self.learner is not None:
            inner = self.learner.optimizer_of(bucket, parameters, gradient, low, high)
        size_bytes = (high - low) * bucket.dtype.itemsize
        seconds = size_bytes / self.setting.update_bytes_per_s
        found = TimedOptimizer(self._me, inner, seconds, size_bytes)
        self.optimizers.append(found)
        return found

    def flat_buffers(self) -> torch.Tensor:
        """Return a copy of all buffers, flat."""
        if self.learner is None:
            return torch.empty(0, dtype=torch.float64, device=self.world.device)
        return self.learner.flat_buffers()

    def cut(self, bucket: Bucket, owns: Sequence[bool]) -> tuple[int, ...]:
        """Cut a bucket into strips that the optimizer can update one by one."""
        inside = self.setting.inside_parameters
        return cut(spans_of(bucket), bucket.num_elements, tuple(owns), inside_parameters=inside)

    # Building, once.

    def _build(self) -> None:
        """Make the buckets and the `Steps` that drives them, as a real replica does."""
        setting, plan, step = self.setting, self.setting.plan, self.share.step
        self.layout = lay_out(
            setting.sizes,
            plan,
            shapes_of(plan, self.share),
            overlap=setting.overlap,
            bucket_bytes=setting.bucket_bytes,
            cores=setting.cores,
            inside_parameters=setting.inside_parameters,
            backward_s=setting.backward_s,
            place=self.share.place,
        )
        self.buckets = make_buckets(
            self.layout, plan, self.share, self.comm, self.slots, self._timing.event
        )
        num_told = setting.num_told if self.share.is_served else 0
        self.flags = Flags(step.comm, len(self.slots), len(step.shards), num_told)
        if self.learner is not None:
            self.learner.lay_out(self)
        elif setting.num_statistics or setting.clips:
            numbers = (setting.num_statistics, setting.clips)
            self._sizes_only = SizesOnly(step, self.slots, *numbers)
        for bucket in self.buckets:
            mine = (bucket.parameters.memory.mine, bucket.summed)
            owned = largest_strip(bucket) if self.world.one_for_all else bucket.owned
            bucket.optimizer = self.optimizer_of(bucket, *mine, *owned)
        idle = frozenset(size.number for size in setting.sizes if not size.is_used)
        early = EarlyUpdates("in virtual time", self._timing.now)
        self.steps = Steps(
            self.strategy,
            step.comm,
            self._lane,
            self._timing,
            self.layout,
            self.buckets,
            self.flags,
            self.learner or self._sizes_only,
            early,
            idle,
        )
        self.steps.recorder = self.recorder
        self._works = [setting.works_of(bucket) for bucket in self.buckets]
        self._is_idle = [bucket.slots[0].number in idle for bucket in self.buckets]

    def _start(self) -> None:
        self._whole: Whole | None = self.strategy.start(self, self.comm, Saved())
        if self._whole is not None:
            self._whole.open()

    # The compute lane.

    def take_steps(self) -> None:
        """Take all steps of this rank. Runs as one process of the clock."""
        setting, conditions = self.setting, self.setting.conditions
        with self.comm.traffic.apart():
            self._lane.submit(self._build)
            self._lane.submit(self._start)
            self._lane.drain()
        self.began_s = self._clock.now_s
        if not self.share.mine and self.share.is_served:
            for step in range(setting.steps):
                self._serve_step(step)
                if setting.is_evaluated(step + 1):
                    self.evaluation.note_bytes(step + 1)
        elif not self.share.mine:
            self.evaluation.serve()
        turns = self._course.turns(self.rank) if self.share.mine else iter(())
        for turn in turns:
            step, self.total_steps = turn.number, turn.total
            if conditions.dies(self.rank, step):
                del turns, turn  # what this rank does not compute is for others
                self._lane.stop()
                self.world.die(self._me, f" (died at step {step})")
                return
            pause_s = conditions.pause_s(self.rank, step)
            if pause_s:
                self._spend("pause", -1, step, pause_s)
            self._compute(turn, conditions.factor(self.rank, step))
            self._step(step, turn.sources)
            self.step_ends_s.append(self._clock.now_s)
            self.on_step(step + 1)
            self.evaluation.end_step(step + 1, len(turn.sources))
        self.wait_for_all()
        self.ended_s, self._last_bytes = self._clock.now_s, self.step_bytes
        if self.learner is not None and self._whole is not None:
            self.whole = self.gather(setting.steps)
            self.gathered_s = self._clock.now_s

    @property
    def is_alive(self) -> bool:
        return not self._me.died

    @property
    def has_own(self) -> bool:
        """Whether this rank's parameters do not represent the run."""
        return self._whole is not None

    @property
    def step_bytes(self) -> int:
        """Bytes that this rank has sent in steps until now."""
        return self.comm.traffic.step_bytes if self._last_bytes is None else self._last_bytes

    def held(self, bucket: int) -> Iterator[Held]:
        """Yield what this rank holds now of a bucket's values that represent the run."""
        assert self._whole is not None
        return self._whole.held(self.buckets[bucket])

    @property
    def waited_s(self) -> float:
        """How long the compute lane has waited for parameters and activations."""
        return self.steps.waited_s + self.compute.waited_s

    def pace(self, samples: int) -> RankSteps:
        """Return when this rank's steps ended; `samples` are those of a shard."""
        is_whole = self._last_bytes is not None
        mine = samples * len(self.share.mine)
        return RankSteps(self.began_s, self.step_ends_s, mine, is_whole)

    def report(self) -> dict[str, Any]:
        """Return the strategy's figures for the run's summary, as plain data."""
        return {} if self._whole is None else self._whole.report()

    def wait_for_all(self) -> None:
        for bucket in self.buckets:
            if bucket.is_in_flight:
                self.steps.wait(bucket)

    def gather(self, done: int) -> WholeValues | None:
        """Gather the parameters that represent the run, on the rank that evaluates them."""
        found: list[WholeValues | None] = []

        def gather() -> None:
            assert self._whole is not None
            found.append(self._whole.gather(is_wanted=self.rank == self.setting.evaluator(done)))

        with self.comm.traffic.apart():
            self._lane.submit(gather)
            self._lane.drain()
        return found[0]

    def _wait_for_input(self, step: int) -> None:
        """Wait until the next shard's batch is loaded."""
        if self.setting.loading.input_s:
            wait_s = self._input.take(self._clock.now_s)
            if wait_s:
                self.input_waited_s += wait_s if step else 0.0
                self._spend("input", -1, step, wait_s)

    def _compute(self, turn: Turn, factor: float) -> None:
        """Run forward and backward of every shard; send buckets as the last shard finishes them."""
        mine, step = self.share.mine, turn.number
        for shard, source in zip(mine, turn.sources, strict=True):
            self._wait_for_input(step)
            open_shard(self.buckets, shard)
            for bucket, works in zip(self.buckets, self._works, strict=True):
                if bucket.is_in_flight:
                    self.steps.wait(bucket)
                self.compute.forward(bucket.index, step, works, factor)
            self.evaluation.forward_has_read()
            if self.learner is not None:
                self.learner.compute(self, shard, source)
            for bucket, works, is_idle in zip(
                reversed(self.buckets), reversed(self._works), reversed(self._is_idle), strict=True
            ):
                self.compute.backward(bucket.index, step, works, factor)
                if shard == mine[-1] and not is_idle:
                    bucket.untaken = 0
                    if self.layout.overlap:
                        self.steps.send_ready(_no_settings)

    def _step(self, step: int, sources: Sequence[Source]) -> None:
        learner = self.learner
        for bucket in self.buckets:
            bucket.untaken = 0
        flags, settings = None, _no_settings()
        if self.setting.clips:
            self._clip()
        if learner is not None:
            of_run = sources[0][0] if sources else step
            settings = learner.settings(of_run)
            flags = learner.flags(of_run, sources)
        if self.layout.overlap:
            self.steps.send_ready(_no_settings)
            self.steps.enter(step, flags, settings)
        else:
            self.steps.exchange_inline(step, flags, settings)

    def _clip(self) -> None:
        """Clip the gradients as a real rank does: send all buckets, then wait."""
        self.steps.send_ready(_no_settings)
        started = self.steps.end_backward()
        if self.learner is not None:
            self._lane.submit(self.learner.clip, self)
        elif self._sizes_only is not None:
            self._lane.submit(self._sizes_only.clip)
        self._lane.drain()
        self.steps.end_clip(started)

    def _serve_step(self, step: int) -> None:
        """Take part in a step of the other ranks, on a rank that computes nothing."""
        self._step(step, ())
        for bucket in self.buckets:
            self.steps.wait(bucket)

    def _spend(self, kind: str, bucket: int, step: int, seconds: float) -> None:
        started = self._clock.now_s
        if kind in COMPUTE:
            self.world.cores.compute(self.rank, seconds)
        elif seconds:
            self._clock.sleep(seconds)
        if self.recorder is not None:
            self.recorder.follow(kind, bucket, step, started)


def _no_settings() -> ParamGroups:
    """Return no settings: nothing is computed with them."""
    return []
