"""The server's strips: the part of a bucket that a rank serves, and its calls to the others."""

from __future__ import annotations

from collections.abc import Set
from typing import TYPE_CHECKING

import torch

from syncline.comm.base import Memory
from syncline.comm.window import Call, Pending, Window
from syncline.contract import Model, UpdateSettings
from syncline.engine.bucket import Bucket
from syncline.strategies.replicas import OwnReplicas, begins_early, own_first
from syncline.strategies.terms import Terms, TermsTold

if TYPE_CHECKING:
    from syncline.strategies.server import Server


class Strip:
    """A rank's strip of one bucket, and its pushes and pulls to all strips of the bucket."""

    window: Window

    def __init__(
        self,
        server: Server,
        replicas: OwnReplicas,
        model: Model,
        bucket: Bucket,
        cuts: tuple[int, ...],
    ) -> None:
        """`cuts` says which elements each position holds. Every rank calls it."""
        comm = server.comm
        self._server = server
        self._mine = bucket.parameters.memory
        self._free = bucket.gradient.sums[0]
        self._cuts = cuts
        low, high = self._cuts[comm.position : comm.position + 2]
        # Laid out like the bucket, for the optimizer; pages outside the strip are never allocated.
        values = torch.empty_like(self._mine.mine)
        gradient = torch.empty_like(self._mine.mine)
        self._values, self._gradient = values[low:high], gradient[low:high]
        self._values.copy_(self._mine.mine[low:high])
        self._local = bucket.optimizer
        bucket.optimizer = model.optimizer_of(bucket, values, gradient, low, high)
        self._optimizer = bucket.optimizer
        self._version = 0
        self._pulled = [0] * comm.size
        self._computed_on = [0] * comm.size
        """By owner: the version on which the last pushed gradient was computed, or the next one."""
        self._without: Set[int] | None = None
        """Parameters without a gradient since the last push."""
        self._terms = TermsTold()
        self._sum: Memory | None = None
        self._inbox = self._mine
        self._is_early = begins_early(server.settings.early, comm)
        if server.settings.period > 1 or self._is_early:
            self._sum = comm.allocate(bucket.num_elements, bucket.dtype)
        if self._is_early:
            self._inbox = comm.allocate(bucket.num_elements, bucket.dtype)
        self._asked: dict[int, Pending] = {}
        functions = {
            "tell": self._terms.serve_part,
            "push": self._serve_push,
            "read": self._serve_read,
        }
        self.window = replicas.window(bucket, 0, functions)

    def accumulate(self, bucket: Bucket, without: Set[int]) -> None:
        """Add up gradients between pushes; if early, first take over the last push's answer."""
        self._without = without if self._without is None else self._without & without
        if self._is_early:
            self._pull()
        if self._sum is not None:
            self._sum.mine.add_(bucket.gradient.sums[0].mine)

    def step_alone(self, update: UpdateSettings) -> None:
        """Take a step on the worker's own copy, between two pushes."""
        self._local.run(update)

    def push(self, bucket: Bucket, update: UpdateSettings) -> None:
        """Push the gradient to every strip; the answers are the updated strips."""
        assert self._without is not None
        gradient = self._sum or bucket.gradient.sums[0]
        absent = [slot.number for slot in bucket.slots if slot.number in self._without]
        terms = Terms.encode(update.groups, absent)
        for position, low, high in self._places():
            values, out = gradient.part(low, high), self._inbox.part(low, high)
            note = self._terms.note(self.window, position, terms)
            self._asked[position] = self.window.call(position, "push", values, out, note)
        self._without = None
        if not self._is_early:
            self._pull()

    def settle(self) -> None:
        """Wait until the owners have applied the last push. This does not take over the answers."""
        for pending in self._asked.values():
            pending.wait()

    def _pull(self) -> None:
        """Take over the strips that answer the last push."""
        if not self._asked:
            return
        for position, pending in self._asked.items():
            version = pending.wait()
            self._server.staleness[version - 1 - self._computed_on[position]] += 1
            # If early, the next gradient was already computed, on the version pulled before.
            self._computed_on[position] = self._pulled[position] if self._is_early else version
            self._pulled[position] = version
        self._asked = {}
        if self._sum is not None:
            self._sum.mine.zero_()
        if self._is_early:
            self._mine.mine.copy_(self._inbox.mine)

    def read(self) -> torch.Tensor:
        """Return all strips, read into the gradient's memory, which is free between steps."""
        for position, low, high in self._places():
            self.window.call(position, "read", None, self._free.part(low, high)).wait()
        return self._free.mine.clone()

    def is_held_by(self, position: int) -> bool:
        """Say whether a position holds a strip of this bucket."""
        return self._cuts[position] < self._cuts[position + 1]

    def _places(self) -> list[tuple[int, int, int]]:
        ends = [(at, *self._cuts[at : at + 2]) for at in own_first(self._server.comm)]
        return [(at, low, high) for at, low, high in ends if low < high]

    def _serve_push(self, call: Call) -> int:
        assert call.values is not None
        assert call.out is not None
        terms = self._terms.terms_of(call)
        self._gradient.copy_(call.values)
        groups = terms.settings(self._optimizer.settings)
        self._optimizer.run(UpdateSettings(groups, frozenset(terms.without)))
        self._version += 1
        call.out.copy_(self._values)
        return self._version

    def _serve_read(self, call: Call) -> int:
        assert call.out is not None
        call.out.copy_(self._values)
        return self._version
