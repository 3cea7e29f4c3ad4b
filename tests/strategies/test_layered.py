"""Layered SGD: the weights of synchronous SGD, whatever the groups and whoever leads them."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as some

from ranks import run_ranks
from small_job import SMALL, refusal
from syncline.cluster import cluster_of
from syncline.comm.streams import Streams
from syncline.config import read_job
from syncline.contract import Family
from syncline.groups import Leaders
from syncline.report.progress import SilentProgress
from syncline.sim.job import simulate_job
from syncline.strategies import Layered, LayeredSettings, make_strategy
from syncline.train import train as train_job
from test_same_bits import train
from training import train_forked

pytestmark = pytest.mark.processes


def bits_of(size, machines=1, own=None, **settings):
    """Train on some ranks and return the one hash of all of them."""
    settings = {"shards": 6, "steps": 5} | settings

    def work():
        strategy = Layered(own) if own is not None else make_strategy("synchronous")
        return train(strategy=strategy, **settings)

    (found,) = set(run_ranks(size, work, machines=machines))
    return found


WORLDS = [
    (4, 1, LayeredSettings(groups=((0, 2), (1, 3)))),
    (3, 1, LayeredSettings(groups=((2,), (0, 1)))),
    (4, 2, LayeredSettings()),
    (6, 2, LayeredSettings()),
    (6, 2, LayeredSettings(groups=((0, 3), (1, 4), (2, 5)))),
    (6, 2, LayeredSettings(groups=4)),
    (4, 1, LayeredSettings(groups=2, as_published=True)),
    (6, 2, LayeredSettings(as_published=True)),
]


@pytest.mark.parametrize(("size", "machines", "own"), WORLDS)
@pytest.mark.parametrize(
    "settings",
    [{}, {"clip": 0.5, "optimizer": "adamw"}, {"overlap": True, "bucket_bytes": 4096}],
    ids=["plain", "clipped", "overlapped"],
)
def test_weights_are_those_of_one_rank(size, machines, own, settings):
    if own.as_published and "overlap" in settings:
        settings = {"shards": 12}
    reference = {name: value for name, value in settings.items() if name != "bucket_bytes"}
    assert bits_of(size, machines, own, **settings) == bits_of_one(*sorted(reference.items()))


@functools.cache
def bits_of_one(*settings):
    return bits_of(1, **dict(settings))


DIGITS = Path(__file__).parents[2] / "examples" / "digits.toml"
JOB = ["run.steps=12", "run.epochs=", "optimizer.warmup_steps=3", "optimizer.clip_norm=0.5"]
DEDICATED = ["strategy.name=layered", "strategy.layered.leaders=dedicated"]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The job on one rank."""
    return train_forked(DIGITS, tmp_path_factory.mktemp("plain") / "run", *JOB)


@pytest.mark.parametrize(
    ("size", "more"),
    [
        (3, ()),
        (4, ("strategy.layered.groups=2",)),
        (5, ("strategy.layered.groups=[[0,3],[1,2,4]]", "strategy.overlap=true")),
        (4, ("strategy.layered.groups=2", "strategy.layered.as_published=true")),
        (4, ("strategy.layered.groups=2", "strategy.comm=network")),
    ],
)
def test_dedicated_leaders_change_no_bit(size, more, tmp_path, plain):
    found = train_forked(DIGITS, tmp_path / "led", *JOB, *DEDICATED, *more, ranks=size)
    assert found["weights_sha256"] == plain["weights_sha256"]
    assert (found["loss"], found["accuracy"]) == (plain["loss"], plain["accuracy"])


def test_a_run_goes_on_with_other_groups_and_other_leaders(tmp_path, plain):
    out, saves = tmp_path / "led", "run.checkpoint_every=6"
    first = ["strategy.name=layered", "strategy.layered.groups=2", saves]
    stops = 'faults=[{rank=1, step=8, kind="death"}]'
    with pytest.raises(AssertionError):
        train_forked(DIGITS, out, *JOB, *first, stops, ranks=4)
    assert (out / "checkpoints").exists()
    found = train_forked(DIGITS, out, *JOB, *DEDICATED, saves, ranks=3, resume=True)
    assert found["weights_sha256"] == plain["weights_sha256"]


def test_dedicated_leaders_of_two_machines_and_a_run_that_goes_on(tmp_path, plain):
    def run(out, *sets, resume=False):
        job = read_job(DIGITS, [*JOB, *DEDICATED, "run.checkpoint_every=6", *sets])

        def work():
            return train_job(job, out, resume, SilentProgress()).to_json_dict()

        return run_ranks(4, work, machines=2)[0]["weights_sha256"]

    plain = plain["weights_sha256"]
    assert run(tmp_path / "whole") == plain
    with pytest.raises(AssertionError):
        run(tmp_path / "broken", 'faults=[{rank=2, step=8, kind="death"}]')
    assert run(tmp_path / "broken", resume=True) == plain


@pytest.mark.parametrize(
    ("size", "machines", "more"),
    [
        (6, 2, ()),
        (4, 1, ("strategy.layered.groups=[[0,2],[1,3]]",)),
        (6, 2, ("strategy.layered.leaders=dedicated",)),
        (6, 3, ("strategy.layered.as_published=true",)),
    ],
)
def test_simulated_weights_are_those_of_synchronous_sgd(size, machines, more):
    def simulated(*sets):
        job = read_job(DIGITS, [*JOB, *sets])
        cluster = cluster_of(job.cluster, size, machines)
        found = simulate_job(job.resolved(size, cluster.by_machine), cluster, learns=True)
        return found.weights_sha256

    assert simulated("strategy.name=layered", *more) == simulated("strategy.name=synchronous")


def count_messages(strategy, size, machines):
    """Return how many messages all ranks send in the sums and gathers of five steps."""
    count = 0
    prepare = Streams.prepare

    def counted(self, sends, receives, about):
        carry = prepare(self, sends, receives, about)

        def run(what):
            nonlocal count
            if what in ("reduce_scatter", "all_gather", "all_reduce"):
                count += len(sends)
            carry(what)

        return run

    def work():
        Streams.prepare = counted
        train(strategy=make_strategy(strategy), shards=size, per_shard=1, overlap=True, steps=5)
        return count

    return sum(run_ranks(size, work, machines=machines))


def test_with_eight_ranks_a_machine_far_fewer_messages_are_sent():
    assert count_messages("layered", 16, 2) < 0.6 * count_messages("synchronous", 16, 2)


@given(some.data())
def test_groups_hold_each_rank_once_and_leaders_are_in_order(data):
    ranks = data.draw(some.integers(1, 12))
    order = data.draw(some.permutations(range(ranks)))
    cuts = data.draw(some.sets(some.integers(1, max(1, ranks - 1))))
    ends = [0, *sorted(cut for cut in cuts if cut < ranks), ranks]
    drawn = tuple(tuple(order[low:high]) for low, high in itertools.pairwise(ends))
    groups = data.draw(some.sampled_from([drawn, len(drawn), "machine"]))
    settings = LayeredSettings(groups=groups)
    settings.check(ranks)
    found = settings.in_groups((tuple(range(ranks)),))
    leaders = tuple(map(settings.leader_of, found))
    Family((tuple(range(ranks)),), leaders=Leaders(found, leaders))
    assert sorted(rank for group in found for rank in group) == list(range(ranks))
    assert settings.workers((tuple(range(ranks)),)) == tuple(range(ranks))


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ("groups=[[0,1],[2]]", "got [[0, 1], [2]] with 4 ranks"),
        ("groups=[[0,1],[1,2,3]]", "each rank from 0 to 3 is in one group"),
        ("groups=[[0,1,2,3],[]]", "no group is empty"),
        ("groups=5", "got 5 with 4 ranks"),
        ("groups=3", "with a group of one rank (0, 1, 2-3)"),
    ],
)
def test_groups_that_cannot_work_are_refused(settings, found):
    key, value = settings.split("=")
    sets = [f"strategy.layered.{key}={value}", "strategy.name=layered"]
    assert found in refusal(SMALL, *sets, "strategy.layered.leaders=dedicated", ranks=4)
