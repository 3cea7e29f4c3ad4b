"""One virtual rank, as the others see it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from syncline.comm.traffic import Traffic
from syncline.virtual.clock import Clock, Signal
from syncline.virtual.turns import Turns

if TYPE_CHECKING:
    from syncline.cluster import Link
    from syncline.comm.virtual_bundle import Calls
    from syncline.comm.virtual_window import Asked
    from syncline.virtual.processors import Cores


class Booked:
    """A comm lane on which bundled calls are served: each of its turns is known when it comes."""

    def __init__(self, clock: Clock, calls: Calls, rank: int) -> None:
        self._clock = clock
        self._calls = calls
        self._rank = rank

    def book(self, seconds: float) -> float:
        """Take the next turn for a single call; return when it ends."""
        until_s = self._calls.until_s
        end_s = max(float(until_s[self._rank]), self._clock.now_s) + seconds
        until_s[self._rank] = end_s
        return end_s

    def spend(self, seconds: float) -> None:
        """Let time pass inside a process, in its turn, or in the turn that is being measured."""
        if self._clock.is_measuring:
            self._clock.sleep(seconds)
        else:
            self._calls.spend(self._rank, seconds)

    def end(self) -> None:
        """Do nothing: every turn ends by itself."""


@dataclass(eq=False)
class Endpoint:
    """One virtual rank: its traffic, what it does and waits for, and the calls it has to serve."""

    rank: int
    turns: Turns | Booked
    """Work on the comm lane, the rank's own and what it serves: one thing at a time."""
    cores: Cores
    traffic: Traffic = field(default_factory=Traffic)
    channel: int = 0
    """The channel of the hook that runs. Collectives of one channel keep their order."""
    hook: tuple[str, int, int] | None = None
    """The phase, bucket and step of the hook that runs; bucket -1 for none."""
    sent_s: float = 0.0
    """When the last message of this rank's window calls has left it."""
    died: str = ""
    waited_in_vain: list[tuple[float, float]] = field(default_factory=list)
    """When this rank waited for a rank that then died: start and end, in order."""
    asked: dict[Asked, None] = field(default_factory=dict)
    """Calls and gets of other ranks that this rank has not answered yet."""
    queue: deque[tuple[Asked, Callable[[], int], Callable[[int], None]]] = field(
        default_factory=deque
    )
    """Calls that this rank serves, one after the other."""
    is_serving: bool = False
    changed: Signal | None = None
    """Set when the next call has been served."""

    def take_core(self, core_s: float) -> None:
        """Let the comm lane use a core for so long."""
        self.cores.take(self.rank, core_s)

    @property
    def doing(self) -> str:
        """What the rank does, for error messages."""
        if self.hook is None:
            return ""
        phase, bucket, step = self.hook
        place = f"bucket {bucket} of " if bucket >= 0 else ""
        return f"rank {self.rank}, {phase} of {place}step {step}"

    def serve(self, asked: Asked, run: Callable[[], int], end: Callable[[int], None]) -> None:
        """Run a call after those before it, on the comm lane; then give `end` its result.

        Calls are served between the rank's own work there, and while a hook waits for others. If
        calls are bundled, it is run when it comes, to see how long it takes.
        """
        clock = asked.clock
        asked.came_s = clock.now_s
        if isinstance(self.turns, Booked):
            if not self.died:
                result, seconds = clock.measure(run)
                asked.answered_s = self.turns.book(seconds)
                asked.served_s = asked.answered_s - seconds
                if self.traffic.recorder is not None and asked.caller is not self:
                    times_s = (asked.served_s, asked.answered_s)
                    self.traffic.recorder.add_served(asked.exchange, asked.caller.rank, *times_s)
                clock.at(asked.answered_s, end, result)
            return
        self.queue.append((asked, run, end))
        if not self.is_serving and not self.died:
            self.is_serving = True
            clock.spawn(f"rank {self.rank} serving", self._serve_all, self.turns)

    def _serve_all(self, turns: Turns) -> None:
        while self.queue and not self.died:
            with turns.turn():
                asked, run, end = self.queue.popleft()
                recorder = None if asked.caller is self else self.traffic.recorder
                asked.served_s = asked.clock.now_s
                if recorder is not None:
                    recorder.open()
                result = run()
                asked.answered_s = asked.clock.now_s
                if recorder is not None:
                    recorder.close_served(asked.exchange, asked.caller.rank)
                end(result)
        self.is_serving = False

    def copy(self, copies: Link | None, num_bytes: int, num_copies: int = 1) -> None:
        """Copy bytes between the rank's device and its host on the comm lane, if they are two."""
        if copies is None or not num_bytes:
            return
        self.turns.spend(num_copies * copies.latency_s + copies.moving_s(num_bytes))
        if self.traffic.recorder is not None:
            self.traffic.recorder.end_copy()

    def notify(self, clock: Clock) -> None:
        """Wake processes that wait in `until`, to check their condition again."""
        changed, self.changed = self.changed, Signal(clock)
        if changed is not None:
            changed.set()
