"""The engine's `Timing` on the virtual clock, and optimizers whose updates take virtual time."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Set
from typing import Any

from syncline.comm.virtual import VirtualWorld
from syncline.comm.virtual_endpoint import Endpoint
from syncline.contract import ParamGroups, UpdateSettings
from syncline.engine.bucket import Slot, StripOptimizer
from syncline.perf.trace import Recorder, TaskId
from syncline.virtual.clock import Signal

_CAUSES = {"reduce": ("backward", None), "step": ("backward", 0), "update": ("step", -1)}
"""By phase: the kind and bucket of the task after which it can run; None for its own bucket."""


class VirtualTiming:
    """Virtual time: the clock, its signals, and the endpoint that shows what a rank does."""

    def __init__(self, world: VirtualWorld, rank: int, recorder: Recorder) -> None:
        self._clock = world.clock
        self._me = world.endpoints[rank]
        self._recorder = recorder

    def now(self) -> float:
        return self._clock.now_s

    def event(self) -> Signal:
        return Signal(self._clock, f"rank {self._me.rank}, ")

    def note(self, phase: str, bucket: int, step: int) -> None:
        me = self._me
        me.hook = (phase, bucket, step)
        me.waited_for = None
        kind, first = _CAUSES[phase]
        number = self._recorder.last.get((kind, bucket if first is None else first))
        me.cause = None if number is None else (me.rank, number)

    def waited_since(self, started: float) -> float:
        lost = self._me.waited_in_vain
        in_vain_s = sum(end - max(start, started) for start, end in lost if end > started)
        return self._clock.now_s - started - in_vain_s

    def waited_for(self) -> tuple[TaskId, ...]:
        return () if self._me.waited_for is None else (self._me.waited_for,)


class TimedOptimizer:
    """An optimizer whose update takes virtual time, and changes numbers if the run learns."""

    def __init__(self, me: Endpoint, inner: StripOptimizer | None, seconds: float) -> None:
        """The optimizer runs on the comm lane of `me`."""
        self._me = me
        self._inner = inner
        self._seconds = seconds
        self.settings: ParamGroups = [] if inner is None else inner.settings
        self.lock = threading.Lock() if inner is None else inner.lock

    def run(self, update: UpdateSettings) -> None:
        if self._inner is not None:
            self._inner.run(update)
        if self._seconds:
            self._me.turns.spend(self._seconds)

    def keep(self, without: frozenset[int]) -> None:
        raise NotImplementedError("updates are not taken early in virtual time")

    def undo(self) -> None:
        raise NotImplementedError("updates are not taken early in virtual time")

    def forget_kept(self) -> None:
        raise NotImplementedError("updates are not taken early in virtual time")

    def held_of(
        self, slot: Slot, *, before_load: bool = False
    ) -> Iterator[tuple[int, int, dict[str, Any]]]:
        if self._inner is None:
            return iter(())
        return self._inner.held_of(slot, before_load=before_load)

    def load_state(self, whole: Mapping[str, dict[str, Any]], spread: Set[str]) -> None:
        if self._inner is not None:
            self._inner.load_state(whole, spread)
