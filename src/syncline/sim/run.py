"""Runs a strategy on the virtual clock: sizes only, or with real arithmetic on real data."""

from __future__ import annotations

import contextlib
import functools
import gc
import time
from collections.abc import Callable, Iterator

from syncline.cluster import Cluster, LinkModel
from syncline.comm.shape import by_machine
from syncline.comm.virtual import VirtualWorld
from syncline.contract import Strategy, World
from syncline.engine.layout import Wishes, choose
from syncline.engine.share import make_plan
from syncline.errors import ConfigError, PeerGone, RankDied
from syncline.faults import Conditions
from syncline.perf.recorder import Recorder
from syncline.sim.activations import works_of
from syncline.sim.alike import are_alike
from syncline.sim.course import Course, EachItsPart, WhoeverComes
from syncline.sim.evaluation import Watch
from syncline.sim.input import Loading
from syncline.sim.learn import Learning, RankLearner
from syncline.sim.memory import memory_of
from syncline.sim.outcome import Outcome, outcome_of
from syncline.sim.rank import VirtualRank
from syncline.sim.setting import Setting
from syncline.sim.sizes_only import WithoutNumbers, meta_parameters, slots_of
from syncline.strategies import make_strategy
from syncline.virtual.clock import Clock
from syncline.workload import Workload


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
    at_own_pace: bool = False,
) -> Outcome:
    """Run all ranks of a cluster through some steps; `workload` is one shard of one step.

    With `learning` the ranks compute on its data, otherwise only sizes are simulated; then
    `num_settings` is how many numbers the optimizer's settings have, and `clips` says whether
    gradients are clipped. The optimizer keeps `state_copies` numbers for each parameter. `traces`
    asks for a trace; `on_step` is called after every step of rank 0. `links` chooses the model of
    links that messages share: with "fast" ones many ranks are simulated sooner, not exactly.
    On each rank `workers` processes, or one thread, load up to `prefetch` batches ahead of use.
    Layers compute on so many `threads`; if the cluster says its cores, they share those.
    `at_own_pace`: ranks that do not wait for each other take steps until all of them together have
    taken the run's samples, and evaluations let no rank wait (`course.py`, `evaluation.py`).
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
    ranks: list[VirtualRank] = []
    own = first.settings
    course: Course = EachItsPart(plan.shards, steps)
    if at_own_pace and own.goes_at_own_pace:
        course = WhoeverComes(plan.shards, steps, own.steps_between_exchanges)
    watch = Watch(ranks, shards) if at_own_pace else None
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
            course,
            watch,
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
    return outcome_of(world, workload, shards, setting, ranks, wall_s, learning, memory, course)


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
