"""Waiting before use: forward waits for a bucket only when it is about to read it.

A use is noticed in two ways: by a forward pre-hook on every module that owns parameters, and by the
class of a parameter that is in flight (`parameters.py`), for uses that no module hook sees. Before
the buckets are built, the same hooks record the order of first use.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn
from torch.nn import Parameter

from syncline.engine.bucket import Bucket, Slot
from syncline.engine.buffers_in_flight import BuffersInFlight
from syncline.engine.compiled import compiled_in
from syncline.engine.early import EarlyUpdates
from syncline.engine.first_use import FirstUse, owners_of
from syncline.engine.parameters import InFlight, UsedUp, Watched, become, waiters
from syncline.engine.spent import Spent
from syncline.engine.steps import Steps
from syncline.perf.recorder import Recorder


class ThreadEvent(threading.Event):
    """An event between two threads."""

    def wait_for(self, why: Callable[[], str]) -> None:
        """Wait until it is set."""
        self.wait()


class Waiting:
    """Makes uses of one model's parameters wait."""

    def __init__(
        self,
        model: nn.Module,
        slots: Sequence[Slot],
        early: EarlyUpdates,
        spent: Spent,
        buffers: BuffersInFlight,
    ) -> None:
        self._model = model
        self._slots = slots
        self._early = early
        self._spent = spent
        self._buffers = buffers
        self._parameters = [slot.parameter for slot in slots]
        self._steps: Steps | None = None
        self._buckets: Sequence[Bucket] = ()
        self.recorder: Recorder | None = None
        for slot in slots:
            waiters.set(slot.parameter, self._wait_for, slot.number)
        self._handles = list(self._hook_modules())
        self.first_use = FirstUse(self._parameters)

    def begin(self, steps: Steps, buckets: Sequence[Bucket]) -> None:
        """Begin to wait for buckets, once they are built."""
        self._steps, self._buckets = steps, buckets

    def take_off(self) -> None:
        """Remove the hooks from the modules."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _wait_for(self, number: int) -> None:
        """Wait, on the compute lane, until a parameter may be used."""
        slot = self._slots[number]
        if slot.bucket is None:
            self.first_use.touch(number)
        elif slot.bucket.is_in_flight:
            self.wait(slot.bucket)
        else:
            become(slot.parameter, self._readable)

    @property
    def _readable(self) -> type[Parameter]:
        """The class of a parameter whose value has come."""
        return UsedUp if self._spent.is_on else Watched

    def _hook_modules(self) -> Iterator[Any]:
        # Hooks inside a compiled module would be compiled: `CompiledForward` waits there.
        compiled = {id(one) for module in compiled_in(self._model) for one in module.modules()}
        for module, numbers in owners_of(self._model, self._parameters):
            keeps_buffers = any(True for _ in module.buffers(recurse=False))
            if (numbers or keeps_buffers) and id(module) not in compiled:
                yield module.register_forward_pre_hook(self._make_pre_hook(numbers))

    def _make_pre_hook(self, numbers: list[int]) -> Callable[..., None]:
        buckets: list[Bucket] | None = None

        def before_forward(module: nn.Module, args: Any) -> None:
            nonlocal buckets
            if buckets is None:
                if self._steps is None:
                    self.first_use.touch_all(numbers)
                    return
                mine = dict.fromkeys(self._slots[number].bucket for number in numbers)
                # A module with only buffers waits for the step's first bucket: the buffers are up
                # to date before that bucket is.
                buckets = [bucket for bucket in mine if bucket] or list(self._buckets[:1])
            for bucket in buckets:
                if bucket.is_in_flight:
                    self.wait(bucket)
                if self.recorder is not None:
                    self.recorder.reach(bucket.index, bucket.step)

        return before_forward

    def wait(self, bucket: Bucket) -> None:
        """Wait, on the compute lane, until a bucket may be read."""
        assert self._steps is not None
        self._steps.wait(bucket)
        if self.recorder is not None:
            self.recorder.reach(bucket.index, bucket.step)
        readable = self._readable
        for slot in bucket.slots:
            if type(slot.parameter) is InFlight:
                become(slot.parameter, readable)
        self._buffers.arrive()  # they are set before any bucket is ready
        is_needed = bucket.is_private or (self._early.why_not is None and not bucket.is_loaded)
        if bucket.has_copy and not is_needed:
            bucket.give_back()

    def give_back_loaded(self) -> None:
        """Let forward read the common memory again, after a load and a step without overlap."""
        for bucket in self._buckets:
            if bucket.is_loaded:
                bucket.give_back()

    def synchronize(self) -> None:
        """Wait until every parameter and buffer is up to date."""
        for bucket in self._buckets:
            if bucket.is_in_flight:
                self.wait(bucket)

    def leave(self) -> None:
        """Make the next use of every parameter and buffer wait for its new value."""
        for parameter in self._parameters:
            become(parameter, InFlight)
        self._buffers.leave(lambda: self.wait(self._buckets[0]))
