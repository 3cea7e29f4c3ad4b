"""Windows in virtual time: a call takes the time of its messages there and back, on shared links.

A rank serves calls one after the other on its comm lane, between its own work there. A call takes
as long as its function, and a pass over its values and its answer (`VirtualWorld.serving_s`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from syncline.comm.base import Memory
from syncline.comm.window import Call, Done, Functions, Pending, bytes_moved
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
    result: int | None = None
    got: torch.Tensor | None = None

    def is_over(self) -> bool:
        return self.done.is_set()

    def wait(self) -> int:
        started_s = self.clock.now_s
        self.done.wait(self.why)
        if self.result is None:
            self.caller.waited_in_vain.append((started_s, self.clock.now_s))
            raise PeerGone(self.owner.rank)
        return self.result

    @property
    def values(self) -> torch.Tensor:
        assert self.got is not None
        return self.got

    def release(self) -> None:
        self.got = None


class VirtualWindow:
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
        self._world = group.world
        self._me = me
        self._number = number
        self._published_bytes = published_bytes
        self.functions = functions
        self.published: torch.Tensor | None = None
        self.version = 0
        self.num_calls = self.sent_bytes = 0
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

        ranks = self._me.rank, asked.owner.rank
        # On one machine the caller reads the owner's memory; the owner has nothing to do.
        is_inside = self._world.is_inside(*ranks)
        serving_s = 0.0 if is_inside else self._world.serving_s(*ranks, self._published_bytes)

        def serve() -> None:
            # The answer is what is published when the request is served.
            values, version = owner.published, owner.version
            assert values is not None
            if serving_s:
                self._world.clock.sleep(serving_s)

            def arrive() -> None:
                asked.got = values
                self._answer(asked, version)

            self._send_back(asked, values.numel() * values.itemsize, arrive)

        def arrive_there() -> None:
            self._world.serve(asked.owner, serve)

        self._world.carry(*ranks, 0, arrive_there if serving_s else serve)
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

        def serve() -> None:
            call = Call.of(rank, values, out, note)
            # Not under no_grad: the function may take virtual time, and the mode would then apply
            # to the processes that run meanwhile. The memory it works on needs no gradient.
            result = owner.functions[function](call)
            if serving_s:
                self._world.clock.sleep(serving_s)
            owner._me.notify(self._world.clock)
            if is_mine:
                self._answer(asked, result)
            else:
                self._send_back(asked, back, lambda: self._answer(asked, result))

        def arrive() -> None:
            self._world.serve(asked.owner, serve)

        if is_mine:
            arrive()
        else:
            self._count(function, bytes_moved(values, out))
            self._world.carry(rank, asked.owner.rank, to_there, arrive)
        return asked

    def _count(self, what: str, num_bytes: int) -> None:
        """Count a call or a get to another rank."""
        self.num_calls += 1
        self.sent_bytes += num_bytes
        self._me.traffic.add(self._me.channel, what, num_bytes)

    def _end(self, position: int) -> VirtualWindow:
        return self._group.windows[self._number, self._group.ranks[position]]

    def _ask(self, position: int, what: str) -> Asked:
        owner = self._world.endpoints[self._group.ranks[position]]
        doing = self._me.doing
        why = lambda: f"{doing}: {what} waits for rank {owner.rank}{owner.died}"  # noqa: E731
        clock = self._world.clock
        asked = Asked(self._me, owner, clock, Signal(clock), why)
        if owner.died:
            asked.done.set()
        else:
            owner.asked[asked] = None
        return asked

    def _send_back(self, asked: Asked, num_bytes: int, done: Callable[[], None]) -> None:
        if not asked.owner.died:
            ranks = asked.owner.rank, self._me.rank
            self._world.carry(*ranks, num_bytes, done, is_answer=True)

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
        while not is_true():
            if self._me.changed is None:
                self._me.changed = Signal(clock)
            woken_s = clock.now_s
            self._me.changed.wait(why)
        if woken_s is not None and self._world.last_death_s == clock.now_s:
            # It became true because a rank died: since it was looked at last, only for that one.
            self._me.waited_in_vain.append((woken_s, clock.now_s))

    def gone(self) -> frozenset[int]:
        died = (bool(self._world.endpoints[rank].died) for rank in self._group.ranks)
        return frozenset(at for at, is_gone in enumerate(died) if is_gone)
