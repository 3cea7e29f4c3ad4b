"""Windows in virtual time: a call takes the time of its messages there and back, on shared links.

A rank serves calls one after the other, each for as long as its function takes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from syncline.comm.base import Memory
from syncline.comm.many_calls import OneByOne, PendingCalls, Targets
from syncline.comm.virtual_bundle import Bundle, Served, Trip
from syncline.comm.window import (
    Call,
    Counted,
    Done,
    Functions,
    Pending,
    bytes_moved,
)
from syncline.errors import PeerGone
from syncline.virtual.clock import Signal

if TYPE_CHECKING:
    from syncline.comm.virtual import Endpoint
    from syncline.comm.virtual_group import VirtualGroup


@dataclass(eq=False)
class Asked:
    """A call or a get that travels, is served and travels back."""

    owner: Endpoint
    done: Signal
    why: Callable[[], str]
    result: int | None = None
    got: torch.Tensor | None = None

    def is_over(self) -> bool:
        return self.done.is_set()

    def wait(self) -> int:
        self.done.wait(self.why)
        if self.result is None:
            raise PeerGone(self.owner.rank)
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
        self._published_bytes = published_bytes
        self.functions = functions
        self.published: torch.Tensor | None = None
        self.version = 0
        self.num_calls = self.sent_bytes = 0
        self._trips: dict[tuple[str, int], Trip] = {}
        """By function and the id of the targets, which a trip keeps."""
        group.windows[number, me.rank] = self

    def publish(self, values: torch.Tensor) -> bool:
        # A clone, since another rank may still read the previous version.
        self.published = values.clone() if values.device.type != "meta" else values
        self.version += 1
        return True

    def get(self, position: int) -> Pending:
        owner = self._end(position)
        if owner is self:
            return Done(self.version, self.published)
        asked = self._ask(position, "a get")
        if asked.is_over():
            return asked
        self._count("get", self._published_bytes)

        def serve() -> None:
            # The answer is what is published when the request arrives.
            values, version = owner.published, owner.version
            assert values is not None

            def arrive() -> None:
                asked.got = values
                self._answer(asked, version)

            self._send_back(asked, values.numel() * values.itemsize, arrive)

        self._world.carry(self._me.rank, asked.owner.rank, 0, serve)
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

        def run() -> int:
            # Not under no_grad: the function may take virtual time, and the mode would then apply
            # to the processes that run meanwhile. The memory it works on needs no gradient.
            return owner.functions[function](Call.of(rank, values, out, note))

        def end(result: int) -> None:
            owner._me.notify(self._world.clock)
            if is_mine:
                self._answer(asked, result)
            else:
                self._send_back(asked, bytes_moved(out), lambda: self._answer(asked, result))

        def arrive() -> None:
            self._world.serve(asked.owner, run, end)

        if is_mine:
            arrive()
        else:
            self._count(function, bytes_moved(values, out))
            self._world.carry(rank, asked.owner.rank, bytes_moved(values), arrive)
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
        if not (self._world.bundles_calls and is_counted):
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
                self._count(function, 2 * trip.sizes[at])
        me = self._me

        def why() -> str:
            return f"{me.doing}: {function} waits for the owners of {len(trip.ranks)} strips"

        bundle = Bundle(self._world.clock, why)

        def call_of(target: int) -> Call:
            strip = targets.strips[target]
            where = (strip.start, strip.stop)
            return Call.of(self.rank, values.part(*where), out.part(*where), note(strip.number))

        trip.call(bundle, call_of)
        return bundle

    def served(self, function: str) -> Served:
        """Return what this window's ranks have served of a function."""
        known = self._group.served
        key = (self._number, function)
        if key not in known:
            known[key] = Served(len(self._world.endpoints))
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

    def _end(self, position: int) -> VirtualWindow:
        return self._group.windows[self._number, self._group.ranks[position]]

    def _ask(self, position: int, what: str) -> Asked:
        owner = self._world.endpoints[self._group.ranks[position]]
        me = self._me
        why = lambda: f"{me.doing}: {what} waits for rank {owner.rank}{owner.died}"  # noqa: E731
        asked = Asked(owner, Signal(self._world.clock), why)
        if owner.died:
            asked.done.set()
        else:
            owner.asked[asked] = None
        return asked

    def _send_back(self, asked: Asked, num_bytes: int, done: Callable[[], None]) -> None:
        if not asked.owner.died:
            self._world.carry(asked.owner.rank, self._me.rank, num_bytes, done)

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
        while not is_true():
            if self._me.changed is None:
                self._me.changed = Signal(self._world.clock)
            self._me.changed.wait(why)

    def gone(self) -> frozenset[int]:
        gone = self._world.gone
        if not gone:
            return frozenset()
        return frozenset(at for at, rank in enumerate(self.ranks) if rank in gone)
