"""Collects the tasks of one rank while it runs, for a trace."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable

import greenlet
from greenlet import getcurrent as _current

from syncline.perf.trace import Part, Task, TaskId

_WITHOUT_BYTES = frozenset(("work", "wait", "latency", "messages", "inside", "lane", "serve"))
"""Parts in which nothing is handed to peers: the bytes belong to the next part."""


class _Open:
    """A task of the comm lane that has begun: its parts so far, and when the last of them ended."""

    __slots__ = ("at_s", "num_bytes", "parts", "start_s")

    def __init__(self, start_s: float) -> None:
        self.start_s = self.at_s = start_s
        self.parts: list[Part] = []
        self.num_bytes = 0
        """Handed to peers since the last part ended."""


class Recorder:
    """Collects the tasks of one rank.

    Counting and appending are atomic, so both lanes may write.

    A task of the comm lane begins with `open` and ends with `close`. In between, `end_part` says
    what the time since the last part was spent on. Parts belong to the task that the current
    greenlet has opened last: each hook runs in one, and so does serving, which may come in the
    middle of a hook. Where no task is open, parts are not recorded.

    The compute lane of a real run reports moments, not tasks: `begin_forward`, `reach` for each
    bucket, `begin_backward`, `leave` for each bucket, `end_backward`. Each moment ends the current
    task, and each task comes after the previous one.
    """

    def __init__(self, rank: int, now: Callable[[], float] = time.perf_counter) -> None:
        self.rank = rank
        self.now = now
        self.tasks: list[Task] = []
        self.last: dict[tuple[str, int], int] = {}
        """The number of the last task of a kind and bucket."""
        self.last_step: int | None = None
        """The number of the run's last step: what comes after it, such as the wait for its update,
        belongs to it."""
        self.step = 0
        """The step that this rank computes."""
        self.last_served = ""
        """The id of the call that this rank has served last."""
        self._last_hooks: dict[int, TaskId] = {}
        """The last task of each channel of the comm lane."""
        self._counts: dict[str, int] = {}
        self._open: dict[greenlet.greenlet, list[_Open]] = {}
        self._numbers = itertools.count()
        self._is_forward = False
        self._bucket = -1
        self._since_s: float | None = None
        """When the compute lane's current task began; None if that is not known."""
        self._previous: tuple[TaskId, ...] = ()
        self._waited_for: tuple[TaskId, ...] = ()
        """Tasks of the comm lane that the compute lane has waited for since its last task."""

    def add(
        self,
        lane: str,
        kind: str,
        bucket: int,
        step: int,
        start_s: float,
        after: tuple[TaskId, ...] = (),
        *,
        end_s: float | None = None,
        parts: tuple[Part, ...] = (),
    ) -> int:
        """Record a task that ends now, or at `end_s`; return its number."""
        end_s = self.now() if end_s is None else end_s
        number = next(self._numbers)
        if self.last_step is not None:
            step = min(step, self.last_step)
        self.tasks.append(
            Task(self.rank, number, lane, kind, bucket, step, start_s, end_s, after, parts)
        )
        self.last[kind, bucket] = number
        return number

    def after(self, *tasks: tuple[str, int]) -> tuple[TaskId, ...]:
        """Return this rank's last task of each kind and bucket that has one."""
        last, rank = self.last, self.rank
        return tuple([(rank, last[task]) for task in tasks if task in last])

    def after_all(self, kind: str) -> tuple[TaskId, ...]:
        """Return this rank's last task of a kind for each bucket."""
        return self.after(*[task for task in list(self.last) if task[0] == kind])

    # Tasks of the comm lane, in parts.

    def open(self) -> float:
        """Begin a task on the comm lane; return the time."""
        opened, current = _Open(self.now()), _current()
        outer = self._open.get(current)
        if outer is None:
            self._open[current] = [opened]
        else:
            outer.append(opened)
        return opened.start_s

    def end_part(
        self,
        kind: str,
        exchange: str = "",
        peers: tuple[int, ...] = (),
        end_s: float | None = None,
    ) -> None:
        """Say what the time since the last part was spent on; until now, or until `end_s`."""
        opened = self._open.get(_current())
        if opened is None:
            return
        task, end_s = opened[-1], self.now() if end_s is None else end_s
        if kind in _WITHOUT_BYTES:
            if end_s > task.at_s:
                task.parts.append(Part(kind, end_s, 0, exchange, peers))
                task.at_s = end_s
            return
        if end_s < task.at_s:
            end_s = task.at_s
        task.parts.append(Part(kind, end_s, task.num_bytes, exchange, peers))
        task.num_bytes, task.at_s = 0, end_s

    def end_exchange(
        self,
        exchange: str,
        met_s: float,
        fixed: Iterable[tuple[str, float]],
        copied_s: tuple[float, float] = (0.0, 0.0),
    ) -> None:
        """End an exchange: its ranks had met at `met_s`, and its bytes moved after fixed parts.

        `copied_s` is the time of copies from a device before that, and of those back to it.
        """
        out_s, back_s = copied_s
        self.end_part("wait", exchange, end_s=met_s)
        now_s, end_s = self.now(), met_s + out_s
        if out_s:
            self.end_copy(exchange, end_s)
        for kind, seconds in fixed:
            end_s = min(now_s, end_s + seconds)
            self.end_part(kind, exchange, end_s=end_s)
        self.end_part("wire", exchange, end_s=now_s - back_s if back_s else None)
        if back_s:
            self.end_copy(exchange)

    def end_copy(self, exchange: str = "", end_s: float | None = None) -> None:
        """End a copy between a device and its host: nothing is handed to peers in it."""
        opened = self._open.get(_current())
        if opened is None:
            return
        task, end_s = opened[-1], self.now() if end_s is None else end_s
        if end_s > task.at_s:
            task.parts.append(Part("copy", end_s, 0, exchange, ()))
            task.at_s = end_s

    def end_wait_for_calls(self, before: str) -> None:
        """End a wait that a call has ended, unless the last one is still `before`."""
        self.end_part("wait", "" if self.last_served == before else self.last_served)

    def add_bytes(self, num_bytes: int) -> None:
        """Count bytes that are handed to peers for the part that is under way."""
        opened = self._open.get(_current())
        if opened is not None:
            opened[-1].num_bytes += num_bytes

    def next_id(self, name: str) -> str:
        """Return an id for the next exchange of this name: equal on ranks that count alike."""
        number = self._counts[name] = self._counts.get(name, -1) + 1
        return f"{name}:{number}"

    def close(self, kind: str, bucket: int, step: int, after: tuple[TaskId, ...] = ()) -> int:
        """End the task that was opened last; since its last part it ran the hook's own code."""
        self.end_part("work")
        return self._close(kind, bucket, step, after)

    def _close(self, kind: str, bucket: int, step: int, after: tuple[TaskId, ...] = ()) -> int:
        current = _current()
        opened = self._open[current]
        task = opened.pop()
        if not opened:
            del self._open[current]
        if task.num_bytes:  # handed over without waiting for anything
            task.parts.append(Part("send", task.at_s, task.num_bytes))
        parts = tuple(task.parts)
        return self.add(
            "comm", kind, bucket, step, task.start_s, after, end_s=task.at_s, parts=parts
        )

    def close_hook(
        self, channel: int, kind: str, bucket: int, step: int, *after: tuple[str, int]
    ) -> None:
        """End the task of a hook, which began after its channel's last and after these."""
        known = self.after(*after, ("backward", -1))
        before = self._last_hooks.get(channel)
        if before is not None:
            known = (before, *[task for task in known if task != before])
        number = self.close(kind, bucket, step, known)
        self._last_hooks[channel] = (self.rank, number)

    def close_served(self, exchange: str, caller: int) -> None:
        """End the task of a call that this rank has served."""
        self.end_part("work")
        self.end_part("answer", exchange, (caller,))
        self.last_served = exchange
        self._close("serve", -1, self.step)

    def add_served(self, exchange: str, caller: int, start_s: float, end_s: float) -> None:
        """Record a call whose times are known, which this rank serves."""
        parts = (Part("work", end_s), Part("answer", end_s, 0, exchange, (caller,)))
        self.add("comm", "serve", -1, self.step, start_s, end_s=end_s, parts=parts)
        self.last_served = exchange

    # Moments of the compute lane.

    def begin_forward(self, *, has_buckets: bool) -> None:
        """Note that forward begins; without buckets it is one task."""
        self.end_backward()
        self._is_forward = True
        self._bucket = -1
        self._since_s = None if has_buckets else self.now()

    def reach(self, bucket: int, step: int) -> None:
        """Note that forward uses a bucket. Using an earlier bucket again begins no new task."""
        if self._is_forward and (self._since_s is None or bucket > self._bucket):
            if bucket > self._bucket:
                self.pause()
                self._bucket, self.step = bucket, step
            self._since_s = self.now()

    def pause(self) -> None:
        """Note that the compute lane is about to wait, which does not count as forward."""
        if self._is_forward and self._since_s is not None:
            self.follow("forward", self._bucket, self.step, self._since_s)
            self._since_s = None

    def pause_for_exchange(self) -> None:
        """Note that the compute lane is about to wait for activations, in the middle of a layer."""
        if self._since_s is not None:
            part = ("forward", self._bucket) if self._is_forward else ("split", -1)
            self.follow(*part, self.step, self._since_s)
            self._since_s = self.now()

    def waited(self, bucket: int, step: int, start_s: float, kind: str = "gather") -> None:
        """Record that the compute lane has waited for a bucket's task of a kind; -1 for all."""
        before = self.after((kind, bucket)) if bucket >= 0 else self.after_all(kind)
        self.follow("wait", bucket, step, start_s)
        self._waited_for += before
        # The time before this wait belongs to no bucket's backward: drop it.
        if self._since_s is not None:
            self._since_s = self.now()

    def begin_backward(self) -> None:
        """Note that forward is over and backward begins."""
        self.pause()
        self._is_forward = False
        self._since_s = self.now()
        self._bucket = -1

    def leave(self, bucket: int, step: int) -> None:
        """Note that backward has finished a bucket."""
        if not self._is_forward and self._since_s is not None:
            self.follow("backward", bucket, step, self._since_s)
            self._since_s = self.now()
            self._bucket = bucket
            self.last.pop(("backward", -1), None)  # that of a step before there were buckets

    def end_backward(self) -> None:
        """Note that backward is over. Its time since the last bucket belongs to none.

        Without buckets that is all of it. No hook waits for what comes after the last bucket.
        """
        if not self._is_forward and self._since_s is not None:
            self.follow("backward", -1, self.step, self._since_s)
            if self._bucket >= 0:
                del self.last["backward", -1]
        self._is_forward = False
        self._since_s = None

    def follow(self, kind: str, bucket: int, step: int, start_s: float) -> None:
        """Record a task of the compute lane, after the lane's previous task."""
        after = tuple(dict.fromkeys((*self._previous, *self._waited_for)))
        number = self.add("compute", kind, bucket, step, start_s, after)
        self._previous, self._waited_for = ((self.rank, number),), ()
