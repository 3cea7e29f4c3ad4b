"""Local SGD and DiLoCo: ranks train alone for a round of `period` steps, then move together.

Stich 2018 (arXiv 1805.09767); Douillard et al. 2023 (arXiv 2311.08105). Within a round each rank r
takes steps with the user's optimizer on its own parameters x_r. The last step of a round, or of the
run, ends with one step of SGD with Nesterov momentum on the outer parameters c, which all share:

    g = mean over ranks of (c - x_r);  b <- m b + g;  c <- c - lr (g + m b);  x_r <- c

With lr = 1 and m = 0 the ranks go on from the mean of their parameters. Each rank holds and updates
its own strip of c and b, 1/N of them. The exchange needs no other memory: the x_r are summed and c
is gathered in the memory of the x_r, and g is computed as c minus their mean. The sum goes along a
fixed tree: the same job on the same number of ranks gives the same bits, whatever the timing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from syncline.comm.base import Communicator, Partials, even_cuts
from syncline.comm.tree import Spread
from syncline.contract import Held, Model, Plan, Saved, Strategy, UpdateSettings, Whole, World
from syncline.engine.bucket import Bucket
from syncline.sizes import Size
from syncline.strategies.replicas import MeetingReplicas, plan_own_replicas, run_values
from syncline.strategies.settings import LocalSettings


class Local(Strategy):
    """Each rank steps alone; after each round all ranks take an outer step together."""

    settings: LocalSettings

    def __init__(self, settings: LocalSettings | None = None, seed: int = 0) -> None:
        self.settings = settings or LocalSettings()

    def plan(self, world: World, sizes: Sequence[Size], shards: int) -> Plan:
        return plan_own_replicas(world, shards, self.settings, answers_calls=False)

    def start(self, model: Model, comm: Communicator, saved: Saved) -> Whole:
        self._model = model
        self._outers = [_Outer(comm, bucket, saved) for bucket in model.buckets]
        return MeetingReplicas(
            model, comm, collect=self._collect, held=self._held, own_state=self._own_state
        )

    def gradient_ready(self, bucket: Bucket) -> None:
        bucket.comm.reduce_scatter(bucket.gradient)  # the mean over this rank's own shards

    def before_use(self, bucket: Bucket, update: UpdateSettings) -> None:
        bucket.optimizer.run(update)
        is_last = bucket.step + 1 == self._model.total_steps
        if self.settings.is_due(bucket.step) or is_last:
            self._outers[bucket.index].step(self.settings)

    def _collect(self, bucket: Bucket) -> torch.Tensor:
        return self._outers[bucket.index].collect()

    def _held(self, bucket: Bucket) -> Iterator[Held]:
        yield self._outers[bucket.index].held()

    def _own_state(self) -> dict[str, torch.Tensor]:
        return {outer.key: outer.momentum.clone() for outer in self._outers}


class _Outer:
    """This rank's strip of a bucket's outer parameters and of their momentum."""

    def __init__(self, comm: Communicator, bucket: Bucket, saved: Saved) -> None:
        """Every rank calls it."""
        self._comm = comm
        self._parameters = bucket.parameters.memory.mine
        cuts = even_cuts(bucket.num_elements, comm.size)  # the outer step is elementwise
        spread = Spread.even(comm.size, comm.ranks)
        self._sums = Partials([bucket.parameters.memory], cuts, spread, 1 / comm.size)
        self._place = self._sums.strip(comm.position)
        """Where the strip lies in this rank's parameters."""
        low, high = self._ends = (cuts[comm.position], cuts[comm.position + 1])
        # The outer parameters represented the run.
        self._values = run_values(bucket, saved)[low:high].clone()
        self.momentum = torch.zeros_like(self._values)
        # With other buckets or another number of ranks, a strip covers other parameters.
        self.key = f"momentum/{bucket.slots[0].name}/{bucket.num_elements}/{comm.size}"
        """The name of this strip's momentum in a checkpoint."""
        if self.key in saved.state:
            self.momentum.copy_(saved.state[self.key])

    def step(self, settings: LocalSettings) -> None:
        """Take one outer step, and set this rank's parameters to the outer ones."""
        lr, m = settings.outer_lr, settings.outer_momentum
        self._comm.reduce_scatter(self._sums)
        gradient = self._values - self._place
        self.momentum.mul_(m).add_(gradient)
        self._values.sub_(gradient.add_(self.momentum, alpha=m), alpha=lr)
        self._gather()

    def held(self) -> Held:
        """Return this rank's strip of the outer parameters."""
        low, high = self._ends
        return Held(low, high, self._values)

    def collect(self) -> torch.Tensor:
        """Return all outer parameters. Every rank calls it; its own parameters do not change."""
        own = self._parameters.clone()
        self._gather()
        values = self._parameters.clone()
        self._parameters.copy_(own)
        return values

    def _gather(self) -> None:
        """Put the outer parameters into every rank's parameters."""
        self._place.copy_(self._values)
        self._comm.all_gather(self._sums.gathered)
        self._comm.end_lending()  # peers must have read this strip before the next step writes it
