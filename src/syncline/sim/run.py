"""Runs a strategy on the virtual clock: sizes only, or with real arithmetic on real data."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from syncline.cluster import Cluster, LinkModel
from syncline.comm.shape import by_machine
from syncline.comm.traffic import Sent
from syncline.comm.virtual import VirtualWorld
from syncline.contract import Strategy, World
from syncline.engine.layout import Layout, Wishes, choose
from syncline.engine.share import make_plan
from syncline.errors import ConfigError, PeerGone, RankDied
from syncline.faults import Conditions
from syncline.perf.pace import samples_per_s_of
from syncline.perf.recorder import Recorder
from syncline.perf.trace import Trace
from syncline.result import CurvePoint, RunResult
from syncline.sim.activations import works_of
from syncline.sim.alike import are_alike
from syncline.sim.input import Loading
from syncline.sim.learn import Learning, RankLearner
from syncline.sim.memory import RankMemory, memory_of
from syncline.sim.rank import VirtualRank
from syncline.sim.setting import Setting
from syncline.sim.sizes_only import WithoutNumbers, meta_parameters, slots_of
from syncline.sim.traced import trace_of
from syncline.strategies import make_strategy
from syncline.virtual.clock import Clock
from syncline.virtual.fast_link import FastLinks
from syncline.virtual.link import Port
from syncline.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Outcome(RunResult):
    """The result of a simulation. Times are virtual, except `wall_s` and `autograd_s`.

    `step_s` is the median time from the end of a step to the end of the next, over all ranks.
    """

    machines: int
    batch: int
    """Samples of a step, over all shards; shards, if the workload does not say its samples."""
    alone_s: float
    """The base of speed-up: one rank loads and computes the whole batch, without communication."""
    step_ends_s: tuple[float, ...]
    """When the slowest rank ended each step."""
    carried_bytes: dict[Port, float]
    """How many bytes each port carried in all."""
    wall_s: float
    trace: Trace | None
    """Every task of every rank, if it was asked for."""
    places: Layout
    """How the parameters lie in buckets on rank 0."""
    links: LinkModel
    """The model of links that was used."""
    link_slack: float | None = None
    """Of fast links: the part of all messages that changed before rates were computed again."""
    messages: tuple[list[Sent], ...] = ()
    """What each rank sent in its steps, in order, with `keeps_messages`."""
    losses: tuple[float, ...] = ()
    """Mean training loss of each step, over all ranks."""
    curve: tuple[CurvePoint, ...] = ()
    """What evaluations found, the last one at the end of the run."""
    autograd_s: float = 0.0
    choice: tuple[str, ...] = ()
    """What settings that are "auto" became, and the reasons, in lines."""

    @property
    def speed_up(self) -> float:
        """How many times as many samples a second as one rank alone."""
        return self.samples_per_s * self.alone_s / self.batch

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
    overlap: bool | None = None,
    algorithm: str = "direct",
    conditions: Conditions | None = None,
    learning: Learning | None = None,
    num_settings: int = 0,
    state_copies: int = 0,
    clips: bool = False,
    keeps_messages: bool = False,
    traces: bool = False,
    links: LinkModel = "exact",
    workers: int = 0,
    prefetch: int = 0,
    threads: int = 1,
    on_step: Callable[[int], None] = lambda step: None,
) -> Outcome:
    """Run all ranks of a cluster through some steps; `workload` is one shard of one step.

    With `learning` the ranks compute on its data, otherwise only sizes are simulated; then
    `num_settings` is how many numbers the optimizer's settings have, and `clips` says whether
    gradients are clipped. The optimizer keeps `state_copies` numbers for each parameter. `traces`
    asks for a trace; `on_step` is called after every step of rank 0. `links` chooses the model of
    links that messages share: with "fast" ones many ranks are simulated sooner, not exactly.
    On each rank `workers` processes, or one thread, load up to `prefetch` batches ahead of use.
    Layers compute on so many `threads`; if the cluster says its cores, they share those.
    """
    if cluster.shares_cores and workload.crowding > 1.0:
        alone = 1 / workload.crowding
        workload = workload.scaled(alone, alone)
    make = strategy if callable(strategy) else functools.partial(make_strategy, strategy)
    first = make()
    conditions = conditions or Conditions()
    conditions.check(cluster.ranks, cluster.machines)
    machines = by_machine(range(cluster.ranks), cluster.ranks_per_machine)
    workers_of_run = len(first.settings.workers(machines))
    shards = shards or workers_of_run
    sizes = workload.sizes()
    by_number = sorted(sizes, key=lambda size: size.number)
    plan = make_plan(first, World(machines), by_number, shards)
    is_recorded = learning is not None or traces or keeps_messages
    clock = Clock()
    world = VirtualWorld(
        clock,
        cluster,
        learns=learning is not None,
        algorithm=algorithm,
        has_fast_links=links == "fast",
        one_for_all=not (is_recorded or cluster.shares_cores)
        and are_alike(first, plan, conditions),
        threads=threads,
    )
    if plan.split is not None and learning is not None:
        raise ConfigError(
            "--learn",
            f"got it with layers split over groups of {plan.split.size} ranks",
            "the arithmetic of a virtual rank is done a whole shard at a time, without exchanges",
            "Leave it away, or use as many groups as ranks.",
        )
    total_bytes = sum(size.size_bytes for size in sizes)
    overlap, bucket_bytes = choose(total_bytes, plan, Wishes(overlap, bucket_bytes))
    setting = Setting(
        plan=plan,
        sizes=sizes,
        times_s=workload.times_s(),
        backward_s=plan.times_for(
            lambda: tuple((layer.name, layer.backward_s) for layer in workload.layers)
        ),
        split_works=works_of(plan, sizes, workload.activations()),
        steps=steps,
        overlap=overlap,
        bucket_bytes=bucket_bytes,
        cores=cluster.cores or cluster.ranks_per_machine,
        threads=threads,
        update_bytes_per_s=workload.update_bytes_per_s(cluster.update_bytes_per_s),
        loading=Loading(
            input_s=workload.shard_input_s(shards / workers_of_run),
            workers=workers,
            prefetch=prefetch,
        ),
        num_told=(learning.num_settings if learning is not None else num_settings)
        + workload.num_counters,
        num_statistics=workload.num_statistics,
        clips=learning.clips if learning is not None else clips,
        inside_parameters=learning.inside_parameters if learning is not None else True,
        evaluate_every=learning.job.run.evaluate_every if learning is not None else None,
        conditions=conditions,
    )
    for change in conditions.link_changes:
        rate = cluster.network.rate_bytes_per_s * change.factor
        for way in world.ways:
            clock.at(change.time_s, world.links.set_rate, (way, change.machine), rate)
    started = time.perf_counter()
    ranks = []
    parameters = [] if learning is not None else meta_parameters(by_number)
    for number in range(1 if world.one_for_all else cluster.ranks):
        rank = VirtualRank(
            world,
            number,
            make() if number else first,
            setting,
            learning.slots()
            if learning is not None
            else slots_of(by_number, parameters, plan, number),
            RankLearner(learning) if learning is not None else None,
            Recorder(number, now=lambda: clock.now_s) if traces else None,
        )
        if number == 0:
            rank.on_step = on_step
        if keeps_messages:
            rank.comm.traffic.log = []
        ranks.append(rank)
        clock.spawn(f"rank {number}", rank.take_steps)
    numbers = contextlib.nullcontext() if learning is not None else WithoutNumbers()
    with _quiet_collector(learns=learning is not None), numbers:
        try:
            clock.run()
        except PeerGone as error:
            how = world.endpoints[error.rank].died
            raise RankDied(
                error.rank,
                f"rank {error.rank} is gone{how}, and the others cannot go on: it held strips.",
            ) from None
    wall_s = time.perf_counter() - started
    memory = [one for rank in ranks for one in memory_of(rank, workload, state_copies)]
    ranks *= cluster.ranks if world.one_for_all else 1
    return _outcome(world, workload, shards, setting, ranks, wall_s, learning, memory)


@contextlib.contextmanager
def _quiet_collector(*, learns: bool) -> Iterator[None]:
    """Keep Python's garbage collector from scanning the many small objects of a run.

    The little garbage of a simulation of sizes waits until it has ended: the collector is off. A
    run that learns only excludes the objects that exist already.
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


def _outcome(
    world: VirtualWorld,
    workload: Workload,
    shards: int,
    setting: Setting,
    ranks: list[VirtualRank],
    wall_s: float,
    learning: Learning | None,
    memory: Sequence[RankMemory],
) -> Outcome:
    cluster, steps = world.cluster, setting.steps
    # A rank that died has taken fewer steps than the others; a rank that only serves, none.
    ends = [
        max(times[step] for times in (rank.step_ends_s for rank in ranks) if step < len(times))
        for step in range(max(len(rank.step_ends_s) for rank in ranks))
    ]
    gaps = [
        end - start for rank in ranks for start, end in itertools.pairwise(rank.step_ends_s)
    ] or [rank.step_ends_s[0] - rank.began_s for rank in ranks if rank.step_ends_s]
    update_s = workload.update_s
    if update_s is None:
        update_s = workload.size_bytes / cluster.update_bytes_per_s
    compute_s = workload.forward_s + workload.backward_s
    if cluster.shares_cores and cluster.cores is not None:
        compute_s *= max(1.0, setting.threads / cluster.cores)
    alone_s = setting.loading.step_alone_s(shards, compute_s, update_s, steps)
    samples = workload.samples or 1
    at_work = [r for r in ranks if r.share.mine and not world.endpoints[r.rank].died]
    total_s = sum(rank.ended_s for rank in at_work)
    # As a real rank counts it: from the end of its first step, since nothing hides the first input.
    input_waited_s = sum(rank.input_waited_s for rank in at_work)
    later_s = sum(rank.ended_s - rank.step_ends_s[0] for rank in at_work)
    carried = world.links.carried
    found: dict[str, object] = {}
    if learning is not None:
        first = next((rank for rank in ranks if rank.whole is not None), ranks[0])
        learner = first.learner
        assert isinstance(learner, RankLearner)
        learner.borrow()
        if first.whole is not None:
            learner.load(first, first.whole)
        test_loss, accuracy = learning.evaluate()
        ended_s = first.gathered_s or max(rank.ended_s for rank in at_work)
        learning.evaluated[steps] = (ended_s, test_loss, accuracy)
        found = {
            "losses": (losses := tuple(learning.losses())),
            "loss": losses[-1],
            "curve": tuple(_points(learning, ranks, losses, samples)),
            "test_loss": test_loss,
            "accuracy": accuracy,
            "weights_sha256": learning.digest(),
            "autograd_s": learning.autograd_s,
        }
    return Outcome(
        gone={
            rank.rank: f"died at step {len(rank.step_ends_s)}"
            for rank in ranks
            if world.endpoints[rank.rank].died
        },
        ranks=cluster.ranks,
        machines=cluster.machines,
        shards=shards,
        steps=steps,
        batch=samples * shards,
        step_s=statistics.median(gaps) if gaps else 0.0,
        samples_per_s=samples_per_s_of([rank.pace(samples) for rank in ranks]),
        alone_s=alone_s,
        exposed_communication=sum(rank.waited_s for rank in at_work) / total_s if total_s else 0.0,
        exposed_input=input_waited_s / later_s if later_s else 0.0,
        input_wait_s=input_waited_s / max(1, (steps - 1) * len(at_work)),
        layout=ranks[0].layout.to_json_dict(),
        places=ranks[0].layout,
        sent_bytes=sum(one.traffic.step_bytes for one in world.endpoints) / cluster.ranks / steps,
        peak_memory_bytes=max(one.peak_bytes for one in memory),
        mean_peak_memory_bytes=statistics.fmean(one.peak_bytes for one in memory),
        memory_share_bytes=statistics.fmean(one.share_bytes for one in memory),
        step_ends_s=tuple(ends),
        carried_bytes=carried,
        wall_s=wall_s,
        links="fast" if isinstance(world.links, FastLinks) else "exact",
        link_slack=world.links.used_slack if isinstance(world.links, FastLinks) else None,
        messages=tuple(rank.comm.traffic.log or [] for rank in ranks),
        strategy=setting.plan.report() | ranks[0].report(),
        trace=trace_of(ranks, shards, samples) if ranks[0].recorder is not None else None,
        **found,  # type: ignore[arg-type]
    )


def _points(
    learning: Learning, ranks: list[VirtualRank], losses: Sequence[float], samples: int
) -> Iterator[CurvePoint]:
    """Yield what each evaluation found; `samples` are those of a shard.

    A rank that died has done and sent what it had until then.
    """
    for step, (time_s, test_loss, accuracy) in sorted(learning.evaluated.items()):
        shards = sum(min(step, len(r.step_ends_s)) * len(r.share.mine) for r in ranks)
        sent = sum(r.sent_bytes_at.get(step, r.comm.traffic.step_bytes) for r in ranks)
        yield CurvePoint(
            step=step,
            samples=shards * samples,
            time_s=time_s,
            total_sent_bytes=sent,
            loss=losses[step - 1],
            test_loss=test_loss,
            accuracy=accuracy,
        )
