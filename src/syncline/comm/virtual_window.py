"""Windows in virtual time: a call takes the time of its messages there and back, on shared links.

A rank serves calls one after the other on its comm lane, between its own work there. A call takes
as long as its function, and a pass over its values and its answer (`VirtualWorld.serving_s`).
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from syncline.comm.base import Memory
from syncline.comm.many_calls import OneByOne, PendingCalls, Targets
from syncline.comm.peer_waits import id_of_call
from syncline.comm.virtual_bundle import Bundle
from syncline.comm.virtual_trip import Served, Trip
from syncline.comm.window import (
    Call,
    Counted,
    Done,
    Functions,
    Pending,
    bytes_moved,
)
from syncline.errors import PeerGone
from syncline.virtual.clock import Clock, Signal

if TYPE_CHECKING:
    from syncline.comm.virtual_endpoint import Endpoint
    from syncline.comm.virtual_group import VirtualGroup


@dataclass(eq=False)
class Asked:
    """A call or a get that travels, is served and travels back."""

    caller: Endpoint
    owner: Endpoint
    clock: Clock
    done: Signal
    why: Callable[[], str]
    exchange: str = ""
    """The call's id, if it is recorded."""
    moving_s: float = 0.0
    """When its bytes began to move."""
    came_s: float = 0.0
    """When it came to its owner; then, when the owner began to serve it, and had done so."""
    served_s: float = 0.0
    answered_s: float = 0.0
    back_s: float = 0.0
    """When the bytes of the answer began to move."""
    copy_back: Callable[[], None] | None = None
    """Copies what came from another machine to the caller's device, if it has one."""
    result: int | None = None
    got: torch.Tensor | None = None

    def note_sent(self) -> None:
        """Record that it was sent, if a trace is recorded."""
        recorder = self.caller.traffic.recorder
        if recorder is not None:
            recorder.end_part("send", self.exchange, (self.owner.rank,))

    def is_over(self) -> bool:
        return self.done.is_set()

    def wait(self) -> int:
        started_s = self.clock.now_s
        self.done.wait(self.why)
        recorder = self.caller.traffic.recorder
        about = (self.exchange, (self.owner.rank,))
        if recorder is not None and self.result is None:
            recorder.end_part("wait", *about)
        elif recorder is not None:
            recorder.end_part("latency", *about, end_s=self.moving_s)
            recorder.end_part("wire", *about, end_s=self.came_s)
            recorder.end_part("wait", *about, end_s=self.served_s)
            recorder.end_part("serve", *about, end_s=self.answered_s)
            recorder.end_part("latency", *about, end_s=self.back_s)
            recorder.end_part("wire", *about)
        if self.result is None:
            self.caller.waited_in_vain.append((started_s, self.clock.now_s))
            raise PeerGone(self.owner.rank)
        if self.copy_back is not None:
            copy_back, self.copy_back = self.copy_back, None
            copy_back()
        return self.result

    @property
    def values(self) -> torch.Tensor:
        assert self.got is not None
        return self.got

    def release(self) -> None:
        self.got = None


class VirtualWindow(OneByOne):
    """One virtual rank's end of a window."""

    def __init__(
        self,
        group: VirtualGroup,
        me: Endpoint,
        number: int,
        published_bytes: int,
        functions: Functions,
    ) -> None:
        self._group = group
        self.world = self._world = group.world
        self.rank = me.rank
        self.ranks = group.ranks
        self._me = me
        self._number = number
        self.published_bytes = published_bytes
        self.functions = functions
        self.published: torch.Tensor | None = None
        self.version = 0
        self.num_calls = self.sent_bytes = 0
        self._num_asked: Counter[int] = Counter()
        """Calls and gets to each rank, while they are recorded."""
        self._trips: dict[tuple[str, int], Trip] = {}
        """By function and the id of the targets, which a trip keeps."""
        group.windows[number, me.rank] = self

    def publish(self, values: torch.Tensor) -> bool:
        # A clone, since another rank may still read the previous version.
        self.published = values.clone() if values.device.type != "meta" else values
        if len(self._group.machines) > 1:
            self._me.copy(self._world.copies, values.nbytes)
        self.version += 1
        return True

    def get(self, position: int) -> Pending:
        owner = self._end(position)
        if owner is self:
            return Done(self.version, self.published)
        asked = self._ask(position, "a get")
        if asked.is_over():
            return asked
        self._count("get", self.published_bytes)

        ranks = self._me.rank, asked.owner.rank
        # On one machine the caller reads the owner's memory; the owner has nothing to do.
        is_inside = self._world.is_inside(*ranks)
        serving_s = 0.0 if is_inside else self._world.serving_s(*ranks, self.published_bytes)

        def run() -> int:
            # The answer is what is published when the request is served.
            asked.got, version = owner.published, owner.version
            if serving_s:
                asked.owner.take_core(serving_s)
                self._world.clock.sleep(serving_s)
            return version

        def end(version: int) -> None:
            self._send_back(asked, asked.values.nbytes, lambda: self._answer(asked, version))

        def arrive() -> None:
            if serving_s:
                asked.owner.serve(asked, run, end)
            else:
                end(run())

        if not is_inside:
            self._copy_back(asked, self.published_bytes)
        asked.moving_s = self._world.carry(*ranks, 0, arrive)
        asked.note_sent()
        return asked

    def call(
        self,
        position: int,
        function: str,
        values: Memory | None = None,
        out: Memory | None = None,
        note: bytes = b"",
    ) -> Pending:
        owner, rank = self._end(position), self._me.rank
        asked = self._ask(position, function)
        if asked.is_over():
            return asked
        is_mine = owner is self
        to_there, back, serving_s = bytes_moved(values), bytes_moved(out), 0.0
        if to_there or back or not is_mine:
            serving_s = self._world.serving_s(rank, asked.owner.rank, to_there + back)
        if self._world.is_inside(rank, asked.owner.rank):
            to_there = back = 0  # the owner reads and writes the caller's memory while it serves

        def run() -> int:
            # Not under no_grad: the function may take virtual time, and the mode would then apply
            # to the processes that run meanwhile. The memory it works on needs no gradient.
            result = owner.functions[function](Call.of(rank, values, out, note))
            if serving_s:
                asked.owner.take_core(serving_s)
                self._world.clock.sleep(serving_s)
            return result

        def end(result: int) -> None:
            owner._me.notify(self._world.clock)
            if is_mine:
                self._answer(asked, result)
            else:
                self._send_back(asked, back, lambda: self._answer(asked, result))

        def arrive() -> None:
            asked.owner.serve(asked, run, end)

        if is_mine:
            arrive()
        else:
            self._count(function, bytes_moved(values, out))
            self._me.copy(self._world.copies, to_there)
            self._copy_back(asked, back)
            asked.moving_s = self._world.carry(rank, asked.owner.rank, to_there, arrive)
            asked.note_sent()
        return asked

    def call_all(
        self,
        function: str,
        targets: Targets,
        values: Memory,
        out: Memory,
        note: Callable[[int], bytes],
    ) -> PendingCalls:
        is_counted = isinstance(self.functions[function], Counted)
        calls = self._world.calls
        if calls is None or not is_counted:
            return super().call_all(function, targets, values, out, note)
        assert values.mine.dtype == out.mine.dtype
        key = (function, id(targets))
        trip = self._trips.get(key)
        if trip is None:
            trip = self._trips[key] = Trip(self, function, targets, values.mine.itemsize)
        if self._me.traffic.log is None:
            self._count(function, 2 * trip.num_bytes, len(trip.others))
        else:
            for at in trip.others:
                self._count(function, 2 * int(trip.sizes[at]))
        me = self._me

        def why() -> str:
            return f"{me.doing}: {function} waits for the owners of {len(trip.owners)} strips"

        def call_of(target: int) -> Call:
            strip = targets.strips[target]
            where = (strip.start, strip.stop)
            mine = Memory(values.mine).part(*where), Memory(out.mine).part(*where)
            return Call.of(self.rank, *mine, note(strip.number))

        bundle = Bundle(self._world.clock, why, me.traffic, call_of)
        if self._world.copies is not None:
            copy = functools.partial(
                me.copy, self._world.copies, trip.copied_bytes, len(trip.across)
            )
            copy()
            bundle.copy_back = copy
        calls.begin(trip, bundle)
        return bundle

    def served(self, function: str) -> Served:
        """Return what this window's ranks have served of a function."""
        known = self._group.served
        key = (self._number, function)
        if key not in known:
            assert self._world.calls is not None
            known[key] = Served(len(self._world.endpoints), self._world.calls.counters())
        return known[key]

    def measure(self, position: int, function: str, call: Call) -> float:
        """Return how long the owner in this position takes to serve a call."""
        owner = self._end(position)
        return self._world.clock.measure(lambda: owner.functions[function](call))[1]

    def _count(self, what: str, num_bytes: int, num_calls: int = 1) -> None:
        """Count a call or a get to another rank, or several at once."""
        self.num_calls += num_calls
        self.sent_bytes += num_bytes
        self._me.traffic.add(self._me.channel, what, num_bytes)

    def _copy_back(self, asked: Asked, num_bytes: int) -> None:
        """Let the caller copy an answer to its device when it takes it, if it has one."""
        if self._world.copies is not None:
            asked.copy_back = functools.partial(self._me.copy, self._world.copies, num_bytes)

    def _end(self, position: int) -> VirtualWindow:
        return self._group.windows[self._number, self._group.ranks[position]]

    def _ask(self, position: int, what: str) -> Asked:
        owner = self._world.endpoints[self._group.ranks[position]]
        me, clock = self._me, self._world.clock
        why = lambda: f"{me.doing}: {what} waits for rank {owner.rank}{owner.died}"  # noqa: E731
        asked = Asked(me, owner, clock, Signal(clock), why)
        if me.traffic.recorder is not None:
            name = f"calls {self._group.name}.{self._number}"
            number = self._num_asked[owner.rank] = self._num_asked[owner.rank] + 1
            asked.exchange = id_of_call(name, me.rank, owner.rank, number)
        if owner.died:
            asked.done.set()
        else:
            owner.asked[asked] = None
        return asked

    def _send_back(self, asked: Asked, num_bytes: int, done: Callable[[], None]) -> None:
        if not asked.owner.died:
            ranks = asked.owner.rank, self._me.rank
            asked.back_s = self._world.carry(*ranks, num_bytes, done, is_answer=True)

    def _answer(self, asked: Asked, result: int) -> None:
        if asked.owner.asked.pop(asked, 0) is None:
            asked.result = result
            asked.done.set()

    def until(
        self,
        is_true: Callable[[], bool],
        why: Callable[[], str],
        late: Callable[[], Sequence[int]] | None = None,
    ) -> None:
        clock, woken_s = self._world.clock, None
        recorder = self._me.traffic.recorder
        before = "" if recorder is None else recorder.last_served
        while not is_true():
            if self._me.changed is None:
                self._me.changed = Signal(clock)
            woken_s = clock.now_s
            self._me.changed.wait(why)
        if woken_s is not None and self._world.last_death_s == clock.now_s:
            # It became true because a rank died: since it was looked at last, only for that one.
            self._me.waited_in_vain.append((woken_s, clock.now_s))
        if recorder is not None:
            recorder.end_wait_for_calls(before)

    def gone(self) -> frozenset[int]:
        gone = self._world.gone
        if not gone:
            return frozenset()
        return frozenset(at for at, rank in enumerate(self.ranks) if rank in gone)
