"""The comm lane's half of a step: written once, for real and for virtual time.

The compute lane says which buckets are complete (`send_ready`), that the step is entered (`enter`,
or `exchange_inline`), and what it is about to read (`wait`). Everything in between is here: the
order, the strategy's hooks and what they wait for, flags and statistics, parameters that are left
out, updates taken early, the end of lending, and what is recorded. `Timing` and `CommLane` hide
which clock it is.

Note: lending. Peers may read what a rank passes to a collective until they come to a later
collective. If `before_use` gathers into common memory, that gather is the later collective. If
every rank updates everything, it is the sum of the flags, unless that may overtake the bucket's
sum. A gather of private memory lends the strip itself. In the last two cases the engine ends the
lending before a bucket is ready. Otherwise the next backward would overwrite a gradient, or the
user a parameter, that a slow peer still reads. The same holds for flags and statistics if no bucket
is exchanged by the whole step group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from syncline.comm.base import Communicator, Partials
from syncline.comm.hub import PATIENT
from syncline.contract import ParamGroups, Strategy, UpdateSettings
from syncline.engine.agreement import Agreement
from syncline.engine.bucket import Bucket, Event, must_end_lending, send_order
from syncline.engine.early import EarlyUpdates
from syncline.engine.flags import Flags
from syncline.engine.layout import Layout
from syncline.engine.told_settings import restore
from syncline.errors import UsageError
from syncline.perf.recorder import Recorder


class Timing(Protocol):
    """What the engine needs of a clock: time, events, and a record of what this rank does."""

    def now(self) -> float: ...

    def event(self) -> Event: ...

    def note(self, phase: str, bucket: int, step: int) -> None:
        """Note that a hook begins on the comm lane; `bucket` is -1 if it belongs to none."""

    def waited_since(self, started: float) -> float:
        """Return how long the compute lane has waited for ranks that are still there."""


class CommLane(Protocol):
    """The queue of the comm lane: of a thread, or of a process on the virtual clock."""

    def submit(
        self, function: Callable[..., Any], *args: Any, channel: int = ..., urgency: int = ...
    ) -> None: ...

    def until(self, is_done: Callable[[], bool]) -> None: ...

    def drain(self) -> None: ...

    def check(self) -> None: ...


class StepBuffers(Protocol):
    """This rank's buffers, averaged or copied over the step group at the end of each step."""

    @property
    def statistics(self) -> Partials | None: ...

    def end_step(self, comm: Communicator, others_changed: bool) -> Iterable[None]: ...

    def load_counts(self, told: Sequence[float]) -> None: ...


class Steps:
    """Drives a strategy through the steps of one rank."""

    def __init__(
        self,
        strategy: Strategy,
        comm: Communicator,
        lane: CommLane,
        timing: Timing,
        layout: Layout,
        buckets: Sequence[Bucket],
        flags: Flags,
        buffers: StepBuffers | None,
        early: EarlyUpdates,
        without: frozenset[int],
        agreement: Agreement | None = None,
    ) -> None:
        """`comm` is the step group's. `without` are the parameters without a gradient so far."""
        self._strategy = strategy
        self._comm = comm
        self._lane = lane
        self._timing = timing
        self._now = timing.now
        self._note = timing.note
        self._buckets = buckets
        self._send_order = send_order(layout, buckets)
        self._step_channel = layout.step_channel
        self._flags = flags
        self._buffers = buffers
        self._early = early
        self._agreement = agreement
        self._must_adopt = False
        """Whether parameters were changed outside the optimizer before this step, on any rank."""
        self._gathers = all(bucket.family.updates == "strips" for bucket in buckets)
        self._ends_flag_lending = must_end_lending(comm, buckets)
        self._without = without
        self._is_early_invalid = False
        self._told_settings: list[float] = []
        """The numbers of the workers' optimizer settings; empty if all ranks compute."""
        self._next_send = 0
        self._entered_step = -1
        self._sums_come_first = False
        """Whether flags are written alone on the lane, so that what follows waits for all sums."""
        self.recorder: Recorder | None = None
        self.waited_s = 0.0
        """Time the compute lane has spent waiting for the comm lane: exposed communication."""

    # Called on the compute lane.

    @property
    def has_sent(self) -> bool:
        """Whether any bucket of this step has been given to the comm lane."""
        return self._next_send > 0

    def send_ready(self, settings: Callable[[], ParamGroups]) -> None:
        """Give complete buckets to the comm lane, in one fixed order, up to an incomplete one.

        `settings` returns the optimizer's settings for an early update.
        """
        order = self._send_order
        while self._next_send < len(order):
            bucket = order[self._next_send]
            if bucket.untaken:
                return
            self._next_send += 1
            bucket.is_reduced = False
            self._lane.submit(self._run_gradient_ready, bucket, channel=bucket.channel)
            if self._early.takes(bucket):
                self._lane.submit(
                    self.run_early,
                    bucket,
                    settings(),
                    channel=bucket.gather_channel,
                    urgency=PATIENT + bucket.index,
                )

    def enter(self, number: int, flags: Sequence[float] | None, settings: ParamGroups) -> None:
        """Leave the rest of the step to the comm lane: `wait` before parameters are read.

        `flags` is None if only sizes are simulated: the sum is exchanged, but not read.
        """
        started = self.end_backward()
        # Written on the lane: by then every peer has read the last step's flags.
        if flags is not None:
            self._lane.submit(self._flags.write, flags, channel=self._step_channel)
        self._submit_step(number, settings, has_flags=flags is not None)
        # If the lane failed before the events were cleared, nothing sets them again: raise here.
        self._lane.check()
        if self.recorder is not None:
            if self._now() > started:  # in virtual time it takes none
                self.recorder.follow("submit", -1, number, started)
            self.recorder.step = number + 1

    def exchange_inline(
        self, number: int, flags: Sequence[float] | None, settings: ParamGroups
    ) -> None:
        """Take the whole step here and now; every gradient is complete."""
        started = self.end_backward()
        if self._gathers and flags is not None:
            # No gradient was sent yet, so the reduce that comes first can announce the small sums.
            self._lane.submit(self._run_announce, flags)
            self.send_ready(lambda: settings)
        else:
            # The flags' sum is the step's last collective: peers may read flags until the next one.
            self.send_ready(lambda: settings)
            if flags is not None:
                self._lane.submit(self._flags.write, flags)
                self._sums_come_first = True
        self._submit_step(number, settings, has_flags=flags is not None)
        self._lane.drain()
        self.waited_s += self._timing.waited_since(started)
        if self.recorder is not None:
            self.recorder.waited(-1, number, started)
            self.recorder.step = number + 1
        for bucket in self._buckets:
            bucket.is_in_flight = False

    def end_backward(self) -> float:
        """Note that backward is over; return the time."""
        if self.recorder is not None:
            self.recorder.end_backward()
        return self._now()

    def end_clip(self, started: float) -> None:
        self.waited_s += self._timing.waited_since(started)
        if self.recorder is not None:
            self.recorder.waited(-1, self.recorder.step, started, "clip")

    def _submit_step(self, number: int, settings: ParamGroups, *, has_flags: bool) -> None:
        lane = self._lane
        assert self._next_send == len(self._send_order), "a bucket of this step was not sent"
        lane.submit(
            self._run_step_entered,
            number,
            self._early.invalid_because,
            has_flags,
            channel=self._step_channel,
        )
        for bucket in self._buckets:
            bucket.ready.clear()
            bucket.is_in_flight = True
            lane.submit(
                self._run_before_use,
                bucket,
                number,
                settings,
                channel=bucket.gather_channel,
                urgency=1 + bucket.index,  # the bucket that forward reads first goes first
            )
        self._next_send = 0

    def wait(self, bucket: Bucket) -> None:
        """Wait until a bucket may be read."""
        ready, recorder = bucket.ready, self.recorder
        if not ready.is_set():
            if recorder is not None:
                recorder.pause()
            started = self._now()
            ready.wait_for(lambda: f"step {bucket.step + 1}: forward waits for {bucket.index}")
            self.waited_s += self._timing.waited_since(started)
            if recorder is not None:
                recorder.waited(bucket.index, bucket.step, started)
        self._lane.check()
        bucket.is_in_flight = False

    def discard(self) -> None:
        """Forget what was sent: this step's gradients were dropped."""
        self._next_send = 0

    def wake(self) -> None:
        """Set every event, so that a waiting compute lane sees the failure."""
        for bucket in self._buckets:
            bucket.ready.set()

    # Called on the comm lane.

    def _run_announce(self, flags: Sequence[float]) -> None:
        self._flags.write(flags)
        self._comm.announce(self._flags.partials)
        if self._buffers is not None and self._buffers.statistics is not None:
            self._comm.announce(self._buffers.statistics)

    def _run_gradient_ready(self, bucket: Bucket) -> None:
        index, step = bucket.index, bucket.step
        self._note("reduce", index, step)
        if self.recorder is not None:
            self.recorder.open()
        self._strategy.gradient_ready(bucket)
        bucket.is_reduced = True
        if self.recorder is not None:
            self.recorder.close_hook(bucket.channel, "reduce", index, step, ("backward", index))

    def _run_step_entered(self, number: int, invalid_because: str | None, has_flags: bool) -> None:
        self._note("step", -1, number)
        if self.recorder is not None:
            self.recorder.open()
        buffers = self._buffers
        # Statistics first: a rank that has come to the flags' sum has read its peers' statistics.
        if buffers is not None and buffers.statistics is not None:
            self._comm.all_reduce(buffers.statistics)
        self._comm.all_reduce(self._flags.partials)
        if self._ends_flag_lending:
            self._comm.end_lending()
        self._strategy.step_entered(number)
        if has_flags:
            self._act_on_flags(invalid_because)
        self._entered_step = number
        if self.recorder is not None:
            sums = [("reduce", one.index) for one in self._send_order if self._sums_come_first]
            last = ("backward", self._send_order[-1].index)
            self.recorder.close_hook(
                self._step_channel, "step", -1, number, last, ("clip", -1), *sums
            )

    def _act_on_flags(self, invalid_because: str | None) -> None:
        """Act on what all ranks of the step group have told."""
        told = self._flags.read()
        if not told.is_alike:
            raise UsageError(
                "since the last step some ranks have set other learning rates or other settings of "
                "the optimizer than others, have loaded optimizer state that others have not, have "
                "changed buffers (a forward in training mode updates the statistics of norm "
                "layers), or have drawn another order of data from a sampler. Do the same on every "
                "rank: a schedule that follows a loss must get the same loss on every rank."
            )
        self._must_adopt = told.has_changed_parameters
        if self._agreement is not None and (self._must_adopt or self._agreement.is_due):
            self._agreement.compare(self._buckets)
        self._is_early_invalid = told.is_early_invalid or told.without != self._without
        if self._is_early_invalid:
            others = "another rank had to undo its own"
            more = "other parameters got gradients"
            self._early.stop(invalid_because or (others if told.is_early_invalid else more))
        self._without = told.without
        self._told_settings = told.settings
        self._early.decide(told.step_s)
        if self._buffers is not None:
            if told.settings:
                self._buffers.load_counts(told.settings)
            for _ in self._buffers.end_step(self._comm, told.has_changed_buffers):
                pass

    def _run_before_use(self, bucket: Bucket, number: int, settings: ParamGroups) -> None:
        if not bucket.is_reduced or self._entered_step < number:
            self._lane.until(lambda: bucket.is_reduced and self._entered_step >= number)
        if self._is_early_invalid:
            self._early.undo(bucket)
        if self._must_adopt and (bucket.is_private or bucket.is_loaded):
            bucket.adopt()
        if bucket.is_early:
            if bucket.ends_lending:
                bucket.comm.end_lending()
            bucket.optimizer.forget_kept()
            bucket.is_early = False
        else:
            if self._told_settings:
                settings = restore(settings, self._told_settings)
            self._update(bucket, settings, ("reduce", bucket.index), ("step", -1))
        if bucket.has_copy:
            bucket.in_use.memory.mine.copy_(bucket.parameters.memory.mine)
        bucket.step += 1
        bucket.ready.set()

    def run_early(self, bucket: Bucket, settings: ParamGroups) -> None:
        """Update a bucket before `optimizer.step()` is called."""
        self._lane.until(lambda: bucket.is_reduced)
        bucket.optimizer.keep(self._without)
        bucket.is_early = True
        self._update(bucket, settings, ("reduce", bucket.index))

    def _update(self, bucket: Bucket, settings: ParamGroups, *after: tuple[str, int]) -> None:
        index, step = bucket.index, bucket.step
        self._note("update", index, step)
        if self.recorder is not None:
            self.recorder.open()
        self._strategy.before_use(bucket, UpdateSettings(settings, self._without))
        if bucket.ends_lending and not bucket.is_early:  # part of the task that a trace has
            bucket.comm.end_lending()
        if self.recorder is not None:
            self.recorder.close_hook(bucket.gather_channel, "gather", index, step, *after)
