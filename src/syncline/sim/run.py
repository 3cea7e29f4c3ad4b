"""Run a strategy on the virtual clock: sizes only, or with real arithmetic on real data."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch.nn import Parameter

from syncline.cluster import Cluster
from syncline.comm.virtual import VirtualWorld
from syncline.engine.bucket import Slot, choose_bucket_bytes
from syncline.errors import PeerGone, RankDied
from syncline.faults import Conditions
from syncline.perf.trace import Recorder, Trace
from syncline.sim.learn import Learning, RankLearner, slots_of
from syncline.sim.rank import Settings, VirtualRank
from syncline.strategies import make_strategy
from syncline.strategies.base import Strategy
from syncline.virtual.clock import Clock
from syncline.virtual.link import Port
from syncline.workload import Workload

ELEMENT_BYTES = 4


@dataclass(frozen=True)
class Outcome:
    """What a simulation found. Times are virtual, but for `wall_s` and `autograd_s`."""

    ranks: int
    machines: int
    shards: int
    steps: int
    step_s: float
    """The median time from the end of a step to the end of the next, of the slowest rank."""
    alone_s: float
    """The base of speed-up: one rank that computes the whole batch, with nobody to talk to."""
    exposed_communication: float
    """Share of time that compute lanes waited for communication."""
    sent_bytes: float
    """Bytes that a machine's link carried outwards in a step, on average."""
    step_ends_s: tuple[float, ...]
    """When the slowest rank ended each step."""
    carried_bytes: dict[Port, float]
    """What each port carried, all in all."""
    wall_s: float
    trace: Trace
    gone: dict[int, int] = dataclasses.field(default_factory=dict)
    """Ranks that died on the way, and how many steps they had taken."""
    losses: tuple[float, ...] = ()
    test_loss: float | None = None
    accuracy: float | None = None
    weights_sha256: str | None = None
    autograd_s: float = 0.0

    @property
    def speed_up(self) -> float:
        return self.alone_s / self.step_s

    @property
    def efficiency(self) -> float:
        return self.speed_up / self.ranks


def simulate(
    workload: Workload,
    cluster: Cluster,
    strategy: str | Callable[[], Strategy] = "synchronous",
    *,
    steps: int = 10,
    shards: int | None = None,
    bucket_bytes: int | None = None,
    overlap: bool = True,
    algorithm: str = "direct",
    conditions: Conditions | None = None,
    learning: Learning | None = None,
    on_step: Callable[[int], None] = lambda step: None,
) -> Outcome:
    """Run all ranks of a cluster through some steps; `workload` is one shard of one step.

    With `learning` the ranks compute on its data, otherwise sizes alone go round. `on_step` hears
    of every step that rank 0 has finished.
    """
    make = strategy if callable(strategy) else functools.partial(make_strategy, strategy)
    conditions = conditions or Conditions()
    conditions.check(cluster.ranks, cluster.machines)
    settings = Settings(
        workload,
        shards or make().num_workers(cluster.ranks),
        steps,
        bucket_bytes or choose_bucket_bytes(workload.size_bytes),
        overlap,
        learning.cuts_parameters if learning is not None else True,
        conditions,
    )
    clock = Clock()
    world = VirtualWorld(clock, cluster, learns=learning is not None, algorithm=algorithm)
    for change in conditions.link_changes:
        rate = cluster.network.rate_bytes_per_s * change.factor
        for way in ("out", "in"):
            clock.at(change.time_s, world.links.set_rate, (way, change.machine), rate)
    started = time.perf_counter()
    ranks = []
    for number in range(cluster.ranks):
        chosen = make()
        chosen.check(cluster.ranks, settings.shards)
        slots, layers = _slots_and_times(workload, learning)
        rank = VirtualRank(
            world,
            number,
            chosen,
            settings,
            slots,
            layers,
            RankLearner(learning) if learning is not None else None,
            Recorder(number, now=lambda: clock.now_s),
        )
        if number == 0:
            rank.on_step = on_step
        ranks.append(rank)
        clock.spawn(f"rank {number}", rank.live)
    with _quiet_collector(learns=learning is not None):
        try:
            clock.run()
        except PeerGone as error:
            how = world.endpoints[error.rank].died
            raise RankDied(
                error.rank,
                f"rank {error.rank} is gone{how}, and the others cannot go on: it held strips.",
            ) from None
    return _outcome(world, settings, ranks, time.perf_counter() - started, learning)


@contextlib.contextmanager
def _quiet_collector(*, learns: bool) -> Iterator[None]:
    """Keep Python from looking for garbage among the many small things of a run.

    A run of sizes makes none; where a network runs, what was there before is not looked at.
    """
    was_on = gc.isenabled()
    gc.freeze()
    if not learns:
        gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_on:
            gc.enable()


def _slots_and_times(
    workload: Workload, learning: Learning | None
) -> tuple[list[Slot], list[tuple[float, float]]]:
    """Make one rank's slots in the order of use, and each slot's forward and backward time."""
    if learning is None:
        slots = []
        for number, layer in enumerate(workload.layers):
            size = max(layer.size_bytes // ELEMENT_BYTES, 1)
            parameter = Parameter(torch.empty(size, device="meta"), requires_grad=False)
            slots.append(Slot(layer.name, parameter, number))
        return slots, [(layer.forward_s, layer.backward_s) for layer in workload.layers]
    names: list[str] = []
    times = dict.fromkeys(learning.first, (0.0, 0.0))
    for layer in workload.layers:
        own = [name for name in times if name.rpartition(".")[0] == layer.name]
        new = [name for name in own if name not in names]
        if new:
            times[new[0]] = (layer.forward_s, layer.backward_s)
        names += new
    names += [name for name in times if name not in names]
    return slots_of(learning, names), list(times.values())


def _outcome(
    world: VirtualWorld,
    settings: Settings,
    ranks: list[VirtualRank],
    wall_s: float,
    learning: Learning | None,
) -> Outcome:
    cluster, workload, steps = world.cluster, settings.workload, settings.steps
    # A rank that died has taken fewer steps than the others, one that only serves has taken none.
    ends = [
        max(times[step] for times in (rank.step_ends_s for rank in ranks) if step < len(times))
        for step in range(max(len(rank.step_ends_s) for rank in ranks))
    ]
    gaps = [end - start for start, end in itertools.pairwise(ends)]
    update_s = workload.size_bytes / cluster.update_bytes_per_s
    compute_s = workload.forward_s + workload.backward_s
    alone_s = settings.shards * compute_s + update_s
    total_s = sum(rank.ended_s for rank in ranks)
    carried = world.links.carried
    found: dict[str, object] = {}
    if learning is not None:
        first = next((rank for rank in ranks if rank.whole is not None), ranks[0])
        learner = first.learner
        assert isinstance(learner, RankLearner)
        learner.borrow()
        if first.whole is not None:
            learner.take_over(first, *first.whole)
        test_loss, accuracy = learning.evaluate()
        found = {
            "losses": tuple(learning.losses[step] for step in sorted(learning.losses)),
            "test_loss": test_loss,
            "accuracy": accuracy,
            "weights_sha256": learning.digest(),
            "autograd_s": learning.autograd_s,
        }
    return Outcome(
        gone={
            rank.rank: len(rank.step_ends_s) for rank in ranks if world.endpoints[rank.rank].died
        },
        ranks=cluster.ranks,
        machines=cluster.machines,
        shards=settings.shards,
        steps=steps,
        step_s=statistics.median(gaps) if gaps else ends[0],
        alone_s=max(alone_s, workload.input_s),
        exposed_communication=sum(rank.waited_s for rank in ranks) / total_s if total_s else 0.0,
        sent_bytes=statistics.mean(carried["out", m] for m in range(cluster.machines)) / steps,
        step_ends_s=tuple(ends),
        carried_bytes=carried,
        wall_s=wall_s,
        trace=Trace(tuple(task for rank in ranks for task in rank.recorder.tasks)),
        **found,  # type: ignore[arg-type]
    )
