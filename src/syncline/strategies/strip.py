"""The server's strips: what a rank holds of a bucket's parameters, and how it uses the others'."""

from __future__ import annotations

from collections.abc import Set
from typing import TYPE_CHECKING

import torch

from syncline.comm.base import Memory
from syncline.comm.window import Call, Pending, Window
from syncline.engine.bucket import Bucket, Update
from syncline.engine.update import Hyper
from syncline.strategies.base import Spreadable
from syncline.strategies.terms import Terms, TermsTold

if TYPE_CHECKING:
    from syncline.strategies.server import Server


class Strip:
    """A rank's strip of one bucket, and the way to the other strips."""

    window: Window

    def __init__(self, server: Server, replica: Spreadable, bucket: Bucket) -> None:
        comm = server.comm
        self._server = server
        self._mine = bucket.parameters.memory
        self._free = bucket.gradient.slots[0]
        self._cuts = server.strips_of(replica, bucket)
        low, high = self._cuts[comm.position : comm.position + 2]
        # Laid out as the bucket, for the optimizer; pages outside the strip are never touched.
        values = torch.empty_like(self._mine.mine)
        gradient = torch.empty_like(self._mine.mine)
        self._values, self._gradient = values[low:high], gradient[low:high]
        self._values.copy_(self._mine.mine[low:high])
        self._local: Update = bucket.update
        self.update = bucket.update = replica.update_of(bucket, values, gradient, low, high)
        self._version = 0
        self._pulled = [0] * comm.size
        self._computed_on = [0] * comm.size
        """The versions, by owner, that the gradient pushed last was computed on, or the next is."""
        self._without: Set[int] | None = None
        """Who has had no gradient since the last push."""
        self._terms = TermsTold()
        self._sum: Memory | None = None
        self._inbox = self._mine
        self._is_early = server.hides(server.settings.early)
        if server.settings.period > 1 or self._is_early:
            self._sum = comm.allocate(bucket.num_elements, bucket.dtype)
        if self._is_early:
            self._inbox = comm.allocate(bucket.num_elements, bucket.dtype)
        self._asked: dict[int, Pending] = {}
        functions = {
            "tell": self._terms.hear_part,
            "push": self._serve_push,
            "read": self._serve_read,
        }
        self.window = server.window(bucket, 0, functions)

    def gather(self, bucket: Bucket, without: Set[int]) -> None:
        """Add up gradients between pushes; what the last one brought comes first."""
        self._without = without if self._without is None else self._without & without
        if self._is_early:
            self._pull()
        if self._sum is not None:
            self._sum.mine.add_(bucket.gradient.slots[0].mine)

    def step_alone(self, hyper: Hyper, without: Set[int]) -> None:
        """Go on with the worker's own copy until the next push."""
        self._local.hyper = hyper
        self._local.leave_out(without)
        self._local.run()

    def push(self, bucket: Bucket, hyper: Hyper) -> None:
        """Push the gradient to every strip, to be pulled when it has been used."""
        assert self._without is not None
        gradient = self._sum or bucket.gradient.slots[0]
        absent = [slot.number for slot in bucket.slots if slot.number in self._without]
        terms = Terms.encode(hyper, absent)
        for position, low, high in self._places():
            values, out = gradient.part(low, high), self._inbox.part(low, high)
            note = self._terms.note(self.window, position, terms)
            self._asked[position] = self.window.call(position, "push", values, out, note)
        self._without = None
        if not self._is_early:
            self._pull()

    def settle(self) -> None:
        """Wait until what was pushed last is in the strips; it is pulled when its turn comes."""
        for pending in self._asked.values():
            pending.wait()

    def _pull(self) -> None:
        """Take over what the last push brought."""
        if not self._asked:
            return
        for position, pending in self._asked.items():
            version = pending.wait()
            self._server.staleness[version - 1 - self._computed_on[position]] += 1
            # The next gradient is computed already, on what was pulled before, if this is early.
            self._computed_on[position] = self._pulled[position] if self._is_early else version
            self._pulled[position] = version
        self._asked = {}
        if self._sum is not None:
            self._sum.mine.zero_()
        if self._is_early:
            self._mine.mine.copy_(self._inbox.mine)

    def read(self) -> torch.Tensor:
        """Return all strips; the gradient's memory is free for it between two steps."""
        for position, low, high in self._places():
            self.window.call(position, "read", None, self._free.part(low, high)).wait()
        return self._free.mine.clone()

    def is_held_by(self, position: int) -> bool:
        """Say whether a position holds anything of this bucket."""
        return self._cuts[position] < self._cuts[position + 1]

    def _places(self) -> list[tuple[int, int, int]]:
        ends = [(at, *self._cuts[at : at + 2]) for at in self._server.in_turn()]
        return [(at, low, high) for at, low, high in ends if low < high]

    def _serve_push(self, call: Call) -> int:
        assert call.values is not None
        assert call.out is not None
        terms = self._terms.hear(call)
        self._gradient.copy_(call.values)
        self.update.hyper = terms.settings(self.update.hyper)
        self.update.leave_out(set(terms.without))
        self.update.run()
        self._version += 1
        call.out.copy_(self._values)
        return self._version

    def _serve_read(self, call: Call) -> int:
        assert call.out is not None
        call.out.copy_(self._values)
        return self._version
