"""The facts that all ranks of a simulation share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from syncline.contract import Plan
from syncline.engine.bucket import Bucket
from syncline.faults import Conditions
from syncline.sim.activations import SplitWork
from syncline.sim.compute import Work
from syncline.sim.input import Loading
from syncline.sizes import Size


@dataclass(frozen=True)
class Setting:
    """The facts that all ranks of a simulation share."""

    plan: Plan
    sizes: tuple[Size, ...]
    """In the order of first use; unused parameters last."""
    times_s: Mapping[int, tuple[float, float]]
    """Forward and backward seconds of one shard, by the parameter whose use they belong to."""
    backward_s: tuple[tuple[str, float], ...]
    """Seconds of backward by layer, for rules that choose buckets by time."""
    split_works: Mapping[int, SplitWork]
    """What split layers exchange, by the number of their weight."""
    steps: int
    overlap: bool
    bucket_bytes: int
    cores: int
    """Cores of a machine."""
    threads: int
    """On which a rank computes."""
    update_bytes_per_s: float
    """Bytes of parameters that a rank's optimizer updates in a second."""
    loading: Loading = field(default_factory=Loading)
    num_told: int = 0
    """How many numbers workers tell ranks that only serve: settings and counters."""
    num_statistics: int = 0
    """Numbers in the running statistics of norm layers."""
    clips: bool = False
    """Whether gradients are clipped."""
    inside_parameters: bool = True
    """Whether the optimizer may update a part of a parameter."""
    evaluate_every: int | None = None
    """After how many steps a run that learns is evaluated; None for once, at its end."""
    conditions: Conditions = field(default_factory=Conditions)

    def works_of(self, bucket: Bucket) -> list[Work]:
        """Return what is computed with a bucket's parameters, in order; split layers each apart."""
        found: list[Work] = []
        for slot in bucket.slots:
            forward_s, backward_s = self.times_s.get(slot.number, (0.0, 0.0))
            split = self.split_works.get(slot.number)
            if found and split is None:
                before_forward_s, before_backward_s, split = found.pop()
                forward_s, backward_s = forward_s + before_forward_s, backward_s + before_backward_s
            found.append((forward_s, backward_s, split))
        return found

    def is_evaluated(self, done: int) -> bool:
        """Say whether the run is evaluated after `done` steps, before its end."""
        every = self.evaluate_every
        return every is not None and done % every == 0 and 0 < done < self.steps

    def evaluator(self, done: int) -> int:
        """Return the rank that evaluates after `done` steps: the first that does not die before."""
        dies, workers = self.conditions.dies, (r for r, mine in enumerate(self.plan.shards) if mine)
        return next((r for r in workers if not any(dies(r, step) for step in range(done))), 0)
