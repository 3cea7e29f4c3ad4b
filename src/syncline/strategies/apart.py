"""Strategies whose ranks hold parameters of their own and do not wait for each other."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import torch

from syncline.comm.alone import Alone
from syncline.comm.base import Communicator
from syncline.comm.meeting import Meeting
from syncline.comm.window import Functions, Window
from syncline.engine.bucket import Bucket, Step
from syncline.errors import PeerGone
from syncline.strategies.base import Spreadable, Strategy
from syncline.strategy_settings import OwnSettings


class Apart(Strategy):
    """Each rank computes its own gradient; what is exchanged is the business of subclasses.

    Parts that every such strategy has: a group of one, and meetings, at which the values that
    stand for the run as a whole are put together.
    """

    is_apart = True
    settings: OwnSettings

    def check(self, world_size: int, shards: int) -> None:
        self.settings.check(world_size)
        super().check(world_size, shards)

    def may_lose(self, world_size: int) -> range:
        return range(world_size)

    def group(self, comm: Communicator) -> Communicator:
        self._alone = comm if comm.size == 1 else Alone(comm.ranks[comm.position])
        return self._alone

    def state_group(self, comm: Communicator) -> Communicator:
        return self._alone

    def start(self, replica: Spreadable, comm: Communicator) -> None:
        self.comm = comm
        self.buckets = replica.buckets
        self.meeting = Meeting(comm)
        self._farewell = Meeting(comm, "farewell")
        self._replica = replica
        self._windows: list[Window] = []
        self._gathering = (0, 0)
        self._snapshot: dict[str, torch.Tensor] = {}
        self._buffers = replica.flat_buffers()
        self._statistics = comm.window(self._buffers.numel(), torch.float64, {})
        self.open(replica)

    def admit(self) -> None:
        self.comm.barrier()

    def open(self, replica: Spreadable) -> None:
        """Make windows and state. Every rank calls it."""

    def window(self, bucket: Bucket, num_elements: int, functions: Functions) -> Window:
        """Make a bucket's window, whose traffic is counted."""
        window = self.comm.window(num_elements, bucket.dtype, functions)
        self._windows.append(window)
        return window

    @property
    def traffic(self) -> tuple[int, int]:
        """How many exchanges this rank's steps began with other ranks, and their bytes."""
        now, apart = self._traffic(), self._gathering
        return now[0] - apart[0], now[1] - apart[1]

    def describe(self) -> list[str]:
        chosen = msgspec.structs.asdict(self.settings)
        words = ", ".join(f"{name} {value}" for name, value in chosen.items())
        return [f"{type(self).__name__.lower()}: {words}"]

    def report(self) -> dict[str, Any]:
        exchanges, num_bytes = self.traffic
        return {"exchanges": exchanges, "exchanged_bytes": num_bytes}

    def _traffic(self) -> tuple[int, int]:
        windows = self._windows
        return sum(one.num_calls for one in windows), sum(one.sent_bytes for one in windows)

    def gradient_ready(self, bucket: Bucket) -> None:
        self._alone.reduce_scatter(bucket.gradient)

    def step_entered(self, step: Step) -> None:
        self._alone.all_reduce(step.flags)
        if step.statistics is not None:
            self._alone.all_reduce(step.statistics)

    def is_due(self, step: int) -> bool:
        """Say whether there is an exchange in a step."""
        return (step + 1) % self.settings.period == 0

    def hides(self, early: bool | str) -> bool:
        """Say whether answers may come a step later: "auto", where there is a wire to hide."""
        return self.comm.num_machines > 1 if early == "auto" else bool(early) and self.comm.size > 1

    def workers(self) -> set[int]:
        """Return the positions of the ranks that compute."""
        num_workers = self.num_workers(self.comm.size)
        return {at for at, rank in enumerate(self.comm.ranks) if rank < num_workers}

    def meet(self) -> None:
        self.meeting.meet()

    def serve_workers(self) -> None:
        """Return when every rank that computes has left; meet them when they want the whole."""
        while self.meeting.until_called(self.workers()):
            self.gather(is_wanted=False)

    def missing(self) -> list[int]:
        return self.meeting.missing()

    def stay(self) -> None:
        """Serve until the others leave, or stay as well; meet them when they want the whole."""
        if self.comm.ranks[self.comm.position] in self.may_lose(self.comm.size):
            return
        self._farewell.tell(1)
        others = set(range(self.comm.size)) - {self.comm.position}
        while self.meeting.until_called(others, but=self._has_ended):
            self.gather(is_wanted=False)

    def _has_ended(self, rank: int) -> bool:
        return self._farewell.reached[rank] > 0

    def takes_no_steps(self, rank: int) -> bool:
        """Say whether a rank waits for this one at a meeting, or has ended and stays for others."""
        return self.meeting.is_called_by(rank) or self._has_ended(rank)

    def in_turn(self) -> list[int]:
        """Return all positions, this rank's first: so that not all ranks ask the same one first."""
        size, mine = self.comm.size, self.comm.position
        return [(mine + turn) % size for turn in range(size)]

    def gather(self, *, is_wanted: bool) -> tuple[list[torch.Tensor], torch.Tensor] | None:
        """Wait for all ranks that are there, and put together what they have.

        Buffers are the mean over the ranks that compute, or were when the last of them left.
        """
        before = self.traffic
        self.settle()
        self.expose()
        self.publish(self._statistics, self._replica.flat_buffers())
        self.meeting.meet()
        whole, workers = None, self.workers()
        if is_wanted or self.comm.position not in workers:
            self._buffers = self.mean(self._statistics, self._buffers, workers)
        if is_wanted:
            whole = [self.collect(bucket) for bucket in self.buckets], self._buffers
        # By now all that others sent before this meeting has come.
        self._snapshot = self.own_state()
        self.meeting.meet()
        now = self._traffic()
        self._gathering = now[0] - before[0], now[1] - before[1]
        return whole

    def publish(self, window: Window, values: torch.Tensor) -> None:
        """Publish, however long a reader sleeps: the next meeting waits for it as well."""
        window.until(
            lambda: window.publish(values), lambda: "somebody still reads what it published before"
        )

    def own_state(self) -> dict[str, torch.Tensor]:
        """Return a copy of what this rank keeps besides parameters and optimizer state."""
        return {}

    def state(self) -> dict[str, torch.Tensor]:
        """Return the rank's own state as it was at the last meeting."""
        return self._snapshot

    def mean(
        self, window: Window, like: torch.Tensor, positions: set[int] | None = None
    ) -> torch.Tensor:
        """Return the mean of what the ranks that are there, or some of them, have published.

        `spread` is then their mean square distance to it. If none of them is there: `like`.
        """
        total, count, squares = torch.zeros_like(like, dtype=torch.float64), 0, 0.0
        for position in self.meeting.living():
            if positions is not None and position not in positions:
                continue
            with contextlib.suppress(PeerGone):
                pending = window.get(position)
                pending.wait()
                total += pending.values
                squares += pending.values.double().square().sum().item()
                count += 1
                pending.release()
        if not count:
            return like
        total.div_(count)
        self.spread = max(0.0, squares / count - total.square().sum().item())
        return total.to(like.dtype)

    def settle(self) -> None:
        """Wait until what this rank has sent is there: others may read it after the meeting."""

    def expose(self) -> None:
        """Let others have what their `collect` needs."""

    def collect(self, bucket: Bucket) -> torch.Tensor:
        """Return a bucket's values that stand for the run as a whole."""
        raise NotImplementedError
