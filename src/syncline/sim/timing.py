"""The engine's `Timing` on the virtual clock, and optimizers whose updates take virtual time."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Set
from typing import Any

from syncline.comm.virtual import VirtualWorld
from syncline.comm.virtual_endpoint import Endpoint
from syncline.contract import ParamGroups, UpdateSettings
from syncline.engine.bucket import Slot, StripOptimizer
from syncline.virtual.clock import Signal


class VirtualTiming:
    """Virtual time: the clock, its signals, and the endpoint that shows what a rank does."""

    def __init__(self, world: VirtualWorld, rank: int) -> None:
        self._clock = world.clock
        self._me = world.endpoints[rank]

    def now(self) -> float:
        return self._clock.now_s

    def event(self) -> Signal:
        return Signal(self._clock, f"rank {self._me.rank}, ")

    def note(self, phase: str, bucket: int, step: int) -> None:
        self._me.hook = (phase, bucket, step)

    def waited_since(self, started: float) -> float:
        lost = self._me.waited_in_vain
        in_vain_s = sum(end - max(start, started) for start, end in lost if end > started)
        return self._clock.now_s - started - in_vain_s


class TimedOptimizer:
    """An optimizer whose update takes virtual time, and changes numbers if the run learns."""

    def __init__(
        self, me: Endpoint, inner: StripOptimizer | None, seconds: float, size_bytes: int = 0
    ) -> None:
        """The optimizer runs on the comm lane of `me`."""
        self._me = me
        self._inner = inner
        self._seconds = seconds
        self.size_bytes = size_bytes
        """Of the parameters that it updates."""
        self.is_used = False
        """Whether it has run: before that, an optimizer has no state."""
        self.settings: ParamGroups = [] if inner is None else inner.settings
        self.lock = threading.Lock() if inner is None else inner.lock

    def run(self, update: UpdateSettings) -> None:
        self.is_used = True
        if self._inner is not None:
            self._inner.run(update)
        if self._seconds:
            self._me.take_core(self._seconds)
            self._me.turns.spend(self._seconds)
        recorder = self._me.traffic.recorder
        if recorder is not None:
            recorder.end_part("lane", end_s=recorder.now() - self._seconds)
            recorder.end_part("update")

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
