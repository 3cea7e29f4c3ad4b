"""Elastic averaging: ranks explore on their own, tied to a common center by springs.

Zhang, Choromanska and LeCun 2015 (arXiv 1412.6651), as in Jin et al. 2016 (arXiv 1611.04581).
Every `period` steps, with a = beta / ranks and both sides using the other's value from before:

    d = a (x - c);  c <- c + d;  x <- step of the user's optimizer from x, then minus d

With a momentum optimizer that is EAMSGD. The center lies in strips, one per rank, on which calls
are served one after the other. The exchange needs the parameters of before the step alone, so it
runs while backward still computes.
"""

from __future__ import annotations

import contextlib

import torch

from syncline.bucket import Bucket, Step, view_of
from syncline.comm.base import Memory
from syncline.comm.window import Call, Pending, Window
from syncline.errors import PeerGone
from syncline.strategies.apart import Apart
from syncline.strategies.base import Spreadable
from syncline.strategy_settings import ElasticSettings


class Elastic(Apart):
    """EASGD, asynchronous or not."""

    keeps_own = True
    settings: ElasticSettings

    def __init__(self, settings: ElasticSettings | None = None, seed: int = 0) -> None:
        self.settings = settings or ElasticSettings()
        self._saved: dict[str, torch.Tensor] = {}

    def load_state(self, state: dict[str, torch.Tensor], whole: dict[str, torch.Tensor]) -> None:
        self._saved = whole  # what stands for the run is the center

    def open(self, replica: Spreadable) -> None:
        self._rate = self.settings.beta / self.comm.size
        self._centers = [self._center_of(replica, bucket) for bucket in self.buckets]

    def _center_of(self, replica: Spreadable, bucket: Bucket) -> _Center:
        comm = self.comm
        cuts = replica.cut(bucket, comm, comm.size)
        memory = bucket.parameters.memory
        moves = comm.allocate(bucket.num_elements, bucket.dtype)
        center = _Center(memory, cuts, moves, self._rate, self.settings.synchronous)
        low, high = cuts[comm.position : comm.position + 2]
        for slot in bucket.slots:
            if slot.name in self._saved:
                view_of(moves.mine, slot).copy_(self._saved[slot.name])
        begins = moves.mine if self._saved else memory.mine
        center.strips[comm.position] = begins[low:high].clone()
        functions = {"pull": center.pull, "read": center.read}
        center.window = self.window(bucket, 0, functions)
        return center

    def is_due(self, step: int) -> bool:
        """Say whether there is an exchange in a step. Alone there is nobody to average with."""
        return super().is_due(step) and self.comm.size > 1

    def gradient_ready(self, bucket: Bucket) -> None:
        super().gradient_ready(bucket)
        if self.is_due(bucket.step) and not self.settings.synchronous:
            self._ask(bucket)

    def step_entered(self, step: Step) -> None:
        super().step_entered(step)
        if self.settings.synchronous and self.is_due(step.number):
            self.meeting.meet()  # the centers have moved for the last exchange

    def before_use(self, bucket: Bucket) -> None:
        if not self.is_due(bucket.step):
            bucket.update_strip()
            return
        if self.settings.synchronous:
            self._ask(bucket)
        moves = self._answers(bucket)
        bucket.update_strip()
        bucket.parameters.memory.mine.sub_(moves)

    def discard(self, bucket: Bucket) -> None:
        """Move as the center has moved, which holds without a step too."""
        if self._centers[bucket.index].asked:
            bucket.parameters.memory.mine.sub_(self._answers(bucket))

    def _answers(self, bucket: Bucket) -> torch.Tensor:
        """Wait for what the center's strips say; a strip whose owner is gone says nothing."""
        center = self._centers[bucket.index]
        for number, pending in center.asked.items():
            try:
                pending.wait()
            except PeerGone:
                center.part(center.moves, number).mine.zero_()
        center.asked = {}
        return center.moves.mine

    def _ask(self, bucket: Bucket) -> None:
        """Tell every strip of the center where this rank stands, and ask by how much to move."""
        center = self._centers[bucket.index]
        owners = center.owners()
        for number in self.in_turn():
            if number not in owners:
                continue
            owner = owners[number]
            where = center.part(bucket.parameters.memory, number)
            moves = center.part(center.moves, number)
            note = b"%d %d" % (number, bucket.step)
            center.asked[number] = center.window.call(owner, "pull", where, moves, note)

    def collect(self, bucket: Bucket) -> torch.Tensor:
        """Return the center; alone, the rank's own values."""
        if self.comm.size == 1:
            return bucket.parameters.memory.mine.clone()
        center = self._centers[bucket.index]
        for number in center.owners():
            self._read(center, number)
        return center.moves.mine.clone()

    def _read(self, center: _Center, number: int) -> None:
        """Read a strip from whoever holds it now."""
        strip = center.part(center.moves, number)
        while True:
            owner = center.owners()[number]
            with contextlib.suppress(PeerGone):
                center.window.call(owner, "read", None, strip, b"%d" % number).wait()
                return


class _Center:
    """The strips of one bucket's center that a rank holds, and the way to the others.

    Where a strip's owner is gone the next rank that is there takes it over, and begins with its own
    parameters: they are never far from the center.
    """

    window: Window

    def __init__(
        self,
        parameters: Memory,
        cuts: tuple[int, ...],
        moves: Memory,
        rate: float,
        waits: bool,
    ) -> None:
        self._parameters = parameters
        self._cuts = cuts
        self.moves = moves
        self._rate = rate
        self._waits = waits
        """Whether the center moves only when all ranks have come in a round."""
        self.strips: dict[int, torch.Tensor] = {}
        self._waiting: dict[int, list[torch.Tensor]] = {}
        self._round = -1
        self._num_moves = 0
        self.asked: dict[int, Pending] = {}

    def part(self, memory: Memory, number: int) -> Memory:
        return memory.part(self._cuts[number], self._cuts[number + 1])

    def strip(self, number: int) -> torch.Tensor:
        if number not in self.strips:
            self.strips[number] = self.part(self._parameters, number).mine.clone()
        return self.strips[number]

    def owners(self) -> dict[int, int]:
        """Return, for each strip that holds anything, the position that holds it now."""
        size, gone = len(self._cuts) - 1, self.window.gone()
        owners = {}
        for number in range(size):
            if self._cuts[number] < self._cuts[number + 1]:
                owner = number
                while owner % size in gone:
                    owner += 1
                owners[number] = owner % size
        return owners

    def pull(self, call: Call) -> int:
        """Answer a rank by how much it moves; move as much towards it, when all have come."""
        assert call.values is not None
        assert call.out is not None
        number, step = map(int, call.note.split())
        if step != self._round:  # ranks have met since: everybody's moves of the last are here
            self._round = step
            self._move()
        center = self.strip(number)
        torch.sub(call.values, center, out=call.out).mul_(self._rate)
        if self._waits:
            self._waiting.setdefault(number, []).append(call.out.clone())
        else:
            center.add_(call.out)
        self._num_moves += 1
        return self._num_moves

    def _move(self) -> None:
        """Move the center by what ranks have waited for, if they did."""
        for number, moves in self._waiting.items():
            for move in moves:
                self.strips[number].add_(move)
        self._waiting = {}

    def read(self, call: Call) -> int:
        assert call.out is not None
        self._move()
        call.out.copy_(self.strip(int(call.note)))
        return self._num_moves
