"""Asynchronous SGD with a parameter server: push gradients, pull parameters, wait for nobody.

Dean et al. 2012 (Downpour); the form of Zhang et al.'s code (papers.md 2.2). The parameters lie in
strips on all ranks, or on some that do nothing else. The user's optimizer runs where the strip is,
once for every push, and the answer to a push is the strip after it. Between pushes, with a
`period` above 1, a worker goes on with the user's optimizer on its own copy; what it pushes then is
the sum of its gradients since the last push.

Staleness of a push: how many other updates a strip has seen since the worker pulled it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Set
from typing import Any

import msgspec
import torch

from syncline.bucket import Bucket, Step, Update
from syncline.comm.base import Communicator, Memory
from syncline.comm.meeting import Meeting
from syncline.comm.window import Call, Pending, Window
from syncline.errors import ConfigError
from syncline.strategies.apart import Apart
from syncline.strategies.base import Spreadable
from syncline.strategy_settings import ServerSettings
from syncline.update import Hyper


class _Note(msgspec.Struct, array_like=True):
    """What goes along with a push: the step's settings, and who has no gradient."""

    hyper: list[dict[str, float]]
    without: list[int]


class Server(Apart):
    """Workers and servers; every rank is both unless some do nothing but serve."""

    settings: ServerSettings

    def __init__(self, settings: ServerSettings | None = None, seed: int = 0) -> None:
        self.settings = settings or ServerSettings()
        self.staleness: Counter[int] = Counter()
        """How often a push of this rank had which staleness."""

    def check(self, world_size: int, shards: int) -> None:
        if self.settings.servers >= world_size:
            raise ConfigError(
                "strategy.server.servers",
                f"got {self.settings.servers} with {world_size} ranks",
                "somebody has to work",
                f"Use at most {world_size - 1}, or 0 for strips on all ranks.",
            )
        super().check(world_size, shards)

    def num_workers(self, world_size: int) -> int:
        return self.settings.num_workers(world_size)

    def may_lose(self, world_size: int) -> range:
        """Workers; not those that hold strips, and without dedicated servers all of them do."""
        return range(self.num_workers(world_size) if self.settings.servers else 0)

    def open(self, replica: Spreadable) -> None:
        self._progress = Meeting(self.comm, "step")
        self._strips = [_Strip(self, replica, bucket) for bucket in self.buckets]

    def strips_of(self, replica: Spreadable, bucket: Bucket) -> tuple[int, ...]:
        """Cut a bucket into strips for those who serve: all ranks, or the last few."""
        comm, servers = self.comm, self.settings.servers
        if not servers:
            return replica.cut(bucket, comm, comm.size)
        cuts = replica.cut(bucket, comm, servers)[: servers + 1]
        serves = [rank >= self.num_workers(comm.size) for rank in comm.ranks]
        return tuple(cuts[sum(serves[:position])] for position in range(comm.size + 1))

    def step_entered(self, step: Step) -> None:
        super().step_entered(step)
        ahead = self.settings.max_staleness
        if ahead != "none":
            self._progress.tell(step.number + 1)
            workers = range(self.num_workers(self.comm.size))
            self._progress.until(step.number + 1 - ahead, workers)

    def state_group(self, comm: Communicator) -> Communicator:
        return comm

    def before_use(self, bucket: Bucket) -> None:
        strip = self._strips[bucket.index]
        # Taken before anything is waited for: calls that are served meanwhile bring their own.
        hyper, without = bucket.update.hyper, bucket.update.without
        strip.gather(bucket)
        if self.is_due(bucket.step):
            strip.push(bucket, hyper, without)
        else:
            strip.step_alone(hyper, without)

    def report(self) -> dict[str, Any]:
        pushes = sum(self.staleness.values())
        mean = sum(k * times for k, times in self.staleness.items()) / max(1, pushes)
        histogram = {str(k): self.staleness[k] for k in sorted(self.staleness)}
        return {**super().report(), "staleness": histogram, "mean_staleness": mean}

    def settle(self) -> None:
        for strip in self._strips:
            strip.settle()

    def collect(self, bucket: Bucket) -> torch.Tensor:
        """Return the parameters as the servers have them."""
        return self._strips[bucket.index].read()


class _Strip:
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
        self._sum: Memory | None = None
        self._inbox = self._mine
        self._is_early = server.hides(server.settings.early)
        if server.settings.period > 1 or self._is_early:
            self._sum = comm.allocate(bucket.num_elements, bucket.dtype)
        if self._is_early:
            self._inbox = comm.allocate(bucket.num_elements, bucket.dtype)
        self._asked: dict[int, Pending] = {}
        functions = {"push": self._serve_push, "read": self._serve_read}
        self.window = server.window(bucket, 0, functions)

    def gather(self, bucket: Bucket) -> None:
        """Add up gradients between pushes; what the last one brought comes first."""
        if self._is_early:
            self._pull()
        if self._sum is not None:
            self._sum.mine.add_(bucket.gradient.slots[0].mine)

    def step_alone(self, hyper: Hyper, without: Set[int]) -> None:
        """Go on with the worker's own copy until the next push."""
        self._local.hyper = hyper
        self._local.leave_out(without)
        self._local.run()

    def push(self, bucket: Bucket, hyper: Hyper, without: Set[int]) -> None:
        """Push the gradient to every strip, to be pulled when it has been used."""
        gradient = self._sum or bucket.gradient.slots[0]
        numbers = [_numbers(group) for group in hyper]
        absent = [slot.number for slot in bucket.slots if slot.number in without]
        note = msgspec.json.encode(_Note(numbers, absent))
        for position, low, high in self._places():
            values, out = gradient.part(low, high), self._inbox.part(low, high)
            self._asked[position] = self.window.call(position, "push", values, out, note)
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
            self._server.staleness[version - 1 - self._pulled[position]] += 1
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

    def _places(self) -> list[tuple[int, int, int]]:
        ends = [(at, *self._cuts[at : at + 2]) for at in self._server.in_turn()]
        return [(at, low, high) for at, low, high in ends if low < high]

    def _serve_push(self, call: Call) -> int:
        assert call.values is not None
        assert call.out is not None
        note = msgspec.json.decode(call.note, type=_Note)
        self._gradient.copy_(call.values)
        self.update.hyper = [
            {**settings, **told}
            for settings, told in zip(self.update.hyper, note.hyper, strict=True)
        ]
        self.update.leave_out(set(note.without))
        self.update.run()
        self._version += 1
        call.out.copy_(self._values)
        return self._version

    def _serve_read(self, call: Call) -> int:
        assert call.out is not None
        call.out.copy_(self._values)
        return self._version


def _numbers(group: dict[str, object]) -> dict[str, float]:
    """Return the settings that a schedule may change: numbers, not switches."""
    return {
        key: value
        for key, value in group.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
