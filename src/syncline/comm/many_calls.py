"""Calls of one rank to the owners of many strips, begun together and waited for together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, Protocol

from syncline.comm.base import Memory
from syncline.errors import PeerGone

if TYPE_CHECKING:
    from syncline.comm.window import Pending


class Strip(NamedTuple):
    """Elements of a memory, and the position of the rank that is called with them."""

    number: int
    position: int
    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class Targets:
    """The strips of a memory that a rank sends to their owners at once, in this order.

    Make it once and keep it: windows remember what they have prepared for it.
    """

    strips: tuple[Strip, ...]

    @cached_property
    def positions(self) -> tuple[int, ...]:
        return tuple(strip.position for strip in self.strips)


class PendingCalls(Protocol):
    """Calls that are under way together."""

    def wait(self) -> Sequence[int | None]:
        """Return the function's results, in the order of the strips; None where it is gone."""


class OneByOne:
    """A window's `call_all`, by as many calls."""

    call: Callable[..., Pending]

    def call_all(
        self,
        function: str,
        targets: Targets,
        values: Memory,
        out: Memory,
        note: Callable[[int], bytes],
    ) -> PendingCalls:
        return Several(
            [
                self.call(
                    strip.position,
                    function,
                    values.part(strip.start, strip.stop),
                    out.part(strip.start, strip.stop),
                    note(strip.number),
                )
                for strip in targets.strips
            ]
        )


class Several:
    """Calls that were begun one by one."""

    def __init__(self, pending: Sequence[Pending]) -> None:
        self._pending = pending

    def wait(self) -> Sequence[int | None]:
        return [_result(pending) for pending in self._pending]


def _result(pending: Pending) -> int | None:
    try:
        return pending.wait()
    except PeerGone:
        return None
