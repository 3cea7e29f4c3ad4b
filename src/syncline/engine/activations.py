"""Exchanges activations among the ranks of a group, beside all other work of the comm lane.

Members of a group are in the order of their ranks, whatever carries the bytes, and sums are added
up in that order: the bits do not depend on machines or networks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from syncline.comm.base import Blocks, Communicator
from syncline.engine.lane import Lane
from syncline.perf.recorder import Recorder


class Activations:
    """One rank's exchanges with the other members of its group."""

    def __init__(self, comm: Communicator, lane: Lane) -> None:
        self._comm = comm
        self._lane = lane
        self._positions = sorted(range(comm.size), key=comm.ranks.__getitem__)
        """By member: its position in the communicator."""
        self._members = sorted(range(comm.size), key=self._positions.__getitem__)
        """By position: the member there."""
        self.size = comm.size
        self.place = self._positions.index(comm.position)
        """This rank's number among the members."""
        self.waited_s = 0.0
        """How long the compute lane has waited for activations."""
        self.recorder: Recorder | None = None

    def begin_gather(
        self, mine: torch.Tensor, sizes: Sequence[int], label: int
    ) -> Callable[[], torch.Tensor]:
        """Begin to gather the rows of all members; the function returned waits for them.

        `sizes` says how many each has.
        """
        found = mine.new_empty((sum(sizes), *mine.shape[1:]))
        parts = found.split(list(sizes))
        parts[self.place].copy_(mine)
        row_bytes = mine.itemsize * (mine.shape[1:].numel() if mine.dim() > 1 else 1)
        gives = [size * row_bytes for size in sizes]
        finish = self.exchange([mine] * self.size, parts, gives, [1] * self.size, label)

        def wait() -> torch.Tensor:
            finish()
            return found

        return wait

    def begin_sum(
        self,
        term: Callable[[int], torch.Tensor],
        gives: Sequence[int],
        takes: Sequence[int],
        label: int,
    ) -> Callable[[], torch.Tensor]:
        """Begin to send each member its term; the function returned gives this rank's sum.

        That is the sum of the terms that all members have for this rank. `term` computes the one
        for a member; this rank's own is computed while the others are sent.
        """
        terms = {at: term(at) for at in range(self.size) if at != self.place}
        like = next(iter(terms.values()))
        shape = (takes[self.place], *like.shape[1:])
        theirs = [like.new_empty(shape) for _ in range(self.size)]
        sends = [terms.get(at, theirs[at]) for at in range(self.size)]
        finish = self.exchange(sends, theirs, gives, takes, label)
        theirs[self.place] = term(self.place)

        def add_up() -> torch.Tensor:
            finish()
            total = theirs[0] + theirs[1]
            for other in theirs[2:]:
                total += other
            return total

        return add_up

    def exchange(
        self,
        sends: Sequence[torch.Tensor],
        receives: Sequence[torch.Tensor],
        gives: Sequence[int],
        takes: Sequence[int],
        label: int,
    ) -> Callable[[], None]:
        """Begin to send each member its block; the function returned waits until all have come.

        All are by member; what is this rank's own is not touched. Member i sends member j
        gives[i] * takes[j] bytes. `label` tells what is exchanged, so that members notice if they
        exchange different things.
        """
        by_position = self._members
        blocks = Blocks(
            tuple(gives[member] for member in by_position),
            tuple(takes[member] for member in by_position),
            label,
        )
        wait = self._lane.begin_aside(
            self._run,
            [sends[member] for member in by_position],
            [receives[member] for member in by_position],
            blocks,
        )

        def finish() -> None:
            if self.recorder is not None:
                self.recorder.pause_for_exchange()
            started_s = time.perf_counter()
            wait()
            self.waited_s += time.perf_counter() - started_s
            if self.recorder is not None:
                self.recorder.waited(-1, self.recorder.step, started_s, "activations")

        return finish

    def _run(
        self, sends: Sequence[torch.Tensor], receives: Sequence[torch.Tensor], blocks: Blocks
    ) -> None:
        """Exchange blocks, on the comm lane."""
        with self._comm.traffic.task("activations", after="activations"):
            self._comm.all_to_all(sends, receives, blocks)
