"""What a simulation found: the figures of a run, put together from its ranks."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from syncline.cluster import LinkModel
from syncline.comm.traffic import Sent
from syncline.comm.virtual import VirtualWorld
from syncline.engine.layout import Layout
from syncline.perf.pace import samples_per_s_of
from syncline.perf.trace import Trace
from syncline.result import CurvePoint, RunResult
from syncline.sim.course import Course
from syncline.sim.learn import Learning, RankLearner
from syncline.sim.memory import RankMemory
from syncline.sim.rank import VirtualRank
from syncline.sim.setting import Setting
from syncline.sim.traced import trace_of
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
    rank_samples: tuple[int, ...] = ()
    """How many samples each rank computed on."""
    choice: tuple[str, ...] = ()
    """What settings that are "auto" became, and the reasons, in lines."""

    @property
    def speed_up(self) -> float:
        """How many times as many samples a second as one rank alone."""
        return self.samples_per_s * self.alone_s / self.batch

    @property
    def efficiency(self) -> float:
        return self.speed_up / self.ranks


def outcome_of(
    world: VirtualWorld,
    workload: Workload,
    shards: int,
    setting: Setting,
    ranks: list[VirtualRank],
    wall_s: float,
    learning: Learning | None,
    memory: Sequence[RankMemory],
    course: Course,
) -> Outcome:
    """Return what a simulation found, once its clock has stopped."""
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
            "losses": tuple((losses := learning.losses()).values()),
            "loss": losses[max(losses)],
            "curve": tuple(_points(learning, ranks, losses, samples, course)),
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
        rank_samples=tuple(len(r.step_ends_s) * len(r.share.mine) * samples for r in ranks),
        **found,  # type: ignore[arg-type]
    )


def _points(
    learning: Learning,
    ranks: list[VirtualRank],
    losses: Mapping[int, float],
    samples: int,
    course: Course,
) -> Iterator[CurvePoint]:
    """Yield what each evaluation found; `samples` are those of a shard.

    A rank that died has done and sent what it had until then.
    """
    taken = [len(rank.step_ends_s) for rank in ranks]
    for step, (time_s, test_loss, accuracy) in sorted(learning.evaluated.items()):
        shards = course.shards_done(step, taken)
        sent = sum(r.evaluation.sent_bytes_at.get(step, r.comm.traffic.step_bytes) for r in ranks)
        yield CurvePoint(
            step=step,
            samples=shards * samples,
            time_s=time_s,
            total_sent_bytes=sent,
            loss=losses.get(step - 1, math.nan),
            test_loss=test_loss,
            accuracy=accuracy,
        )
