"""Evaluation in the middle of a run, in virtual time.

If all ranks hold the same parameters, a rank evaluates its own. Otherwise there are two ways. As in
`train`, all ranks meet and gather what represents the run: then fast ranks wait for slow ones. Or
the run is watched: when so many samples are done, the parameters that represent it are put together
from what ranks hold at that moment, and no rank notices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from syncline.contract import WholeValues

if TYPE_CHECKING:
    from syncline.sim.rank import VirtualRank


class Watch:
    """Evaluates a run from outside whenever so many of its steps are done."""

    def __init__(self, ranks: Sequence[VirtualRank], shards: int) -> None:
        """`ranks` are all ranks, once they are made; `shards` are those of a step of the run."""
        self._ranks, self._shards = ranks, shards
        self._done = 0
        """Shards that all ranks together have computed."""

    def note(self, rank: VirtualRank, shards: int) -> None:
        """Note that a rank has taken a step of so many shards; evaluate if it is time."""
        before, self._done = self._done // self._shards, self._done + shards
        now = self._done // self._shards
        if now > before and rank.setting.is_evaluated(now) and rank.learner is not None:
            for one in self._ranks:
                one.evaluation.note_bytes(now)
            rank.learner.evaluate(rank, now, self._look(rank))

    def _look(self, rank: VirtualRank) -> WholeValues:
        """Return what represents the run now: of what living ranks hold, the mean by weight."""
        living = [one for one in self._ranks if one.is_alive]
        values = []
        for index, bucket in enumerate(rank.buckets):
            like = bucket.parameters.memory.mine
            total, weights = torch.zeros_like(like, dtype=torch.float64), torch.zeros(len(like))
            for one in living:
                for held in one.held(index):
                    total[held.low : held.high].add_(held.values, alpha=held.weight)
                    weights[held.low : held.high] += held.weight
            assert bool((weights > 0).all()), "nobody holds some of what represents the run"
            values.append(total.div_(weights).to(like.dtype))
        buffers = [one.flat_buffers() for one in living if one.share.mine]
        return WholeValues(values, torch.stack(buffers).mean(dim=0))


class RankEvaluation:
    """One rank's part in evaluations."""

    def __init__(self, rank: VirtualRank, watch: Watch | None) -> None:
        self._rank, self._watch = rank, watch
        self.sent_bytes_at: dict[int, int] = {}
        """Bytes that this rank had sent in steps, by the number of steps after evaluations."""
        self._waits_for: int | None = None
        """How many steps were taken, if an evaluation waits until all parameters are there."""

    def end_step(self, done: int, shards: int) -> None:
        """Evaluate if it is time: this rank has taken `done` steps, the last one of `shards`."""
        rank = self._rank
        if self._watch is not None and rank.has_own:
            self._watch.note(rank, shards)
        elif rank.setting.is_evaluated(done):
            self._evaluate(done)

    def serve(self) -> None:
        """Take part in all evaluations, on a rank that takes no steps."""
        if self._watch is None:
            for done in filter(self._rank.setting.is_evaluated, range(self._rank.setting.steps)):
                self._evaluate(done)

    def note_bytes(self, done: int) -> None:
        self.sent_bytes_at.setdefault(done, self._rank.step_bytes)

    def _evaluate(self, done: int) -> None:
        """Evaluate as a real run does: if ranks hold different parameters, all of them meet.

        If they hold the same, nothing is waited for: when the next forward has read the last
        bucket, this rank has all of them (`forward_has_read`).
        """
        rank = self._rank
        if rank.learner is None:
            return
        if not rank.has_own:
            self._waits_for = done
            return
        rank.wait_for_all()
        self.note_bytes(done)
        whole = rank.gather(done)
        if whole is not None:
            rank.learner.evaluate(rank, done, whole)

    def forward_has_read(self) -> None:
        """Evaluate this rank's own parameters, if an evaluation waits for them."""
        done, self._waits_for = self._waits_for, None
        rank = self._rank
        if done is not None and rank.learner is not None:
            self.note_bytes(done)
            if rank.rank == rank.setting.evaluator(done):
                rank.learner.evaluate(rank, done, None)
