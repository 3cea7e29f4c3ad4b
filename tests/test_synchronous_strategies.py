"""Every synchronous strategy gives the hash of `synchronous`, whatever lies between the ranks."""

from __future__ import annotations

import functools
import threading
import time
from pathlib import Path

import pytest

from ranks import run_ranks
from syncline.comm.alone import Alone
from syncline.comm.hierarchical import Hierarchical
from syncline.comm.led import Led
from syncline.comm.shared_memory import SharedMemory
from syncline.contract import Strategy
from syncline.errors import ConfigError, UsageError
from syncline.strategies import STRATEGIES, SyncServer, SyncServerSettings, make_strategy
from test_same_bits import train
from training import train_forked

DIGITS = Path(__file__).parents[1] / "examples" / "digits.toml"

pytestmark = pytest.mark.processes

NAMES = sorted(name for name, entry in STRATEGIES.items() if entry.settings.is_synchronous)
every_name = pytest.mark.parametrize("name", NAMES)


def hashes(size, make, machines=1, **settings):
    settings = {"shards": 4, "steps": 5} | settings
    found = run_ranks(size, lambda: train(strategy=make(), **settings), machines=machines)
    assert len(set(found)) == 1, "ranks differ"
    return found[0]


@functools.cache
def expected(**settings):
    return hashes(1, lambda: make_strategy("synchronous"), **settings)


class SlowReader(Strategy):
    """Rank 0 sleeps in each collective of a bucket, before it reads what its peers lend it."""

    def __init__(self, inner):
        self.inner = inner
        self.settings = inner.settings

    def plan(self, world, sizes, shards):
        return self.inner.plan(world, sizes, shards)

    def start(self, model, comm, saved):
        for bucket in model.buckets:
            if comm.ranks[comm.position] == 0:
                slow_down(bucket.comm)
        return self.inner.start(model, comm, saved)

    def gradient_ready(self, bucket):
        self.inner.gradient_ready(bucket)

    def step_entered(self, step):
        self.inner.step_entered(step)

    def before_use(self, bucket, update):
        self.inner.before_use(bucket, update)


def slow_down(comm):
    """Let this rank come to every collective, then sleep, then read its peers' memory.

    Where hooks overtake each other it sleeps in the buckets' only: the flags of the step, which all
    ranks wait for, go ahead of what it still reads.
    """
    inside = comm._inside.comm if isinstance(comm, Led) else comm
    inside = inside._inside if isinstance(inside, Hierarchical) else inside
    if isinstance(inside, Alone):
        return
    assert isinstance(inside, SharedMemory), f"in {comm.name} nobody reads others' memory in place"
    if hasattr(inside, "is_slow"):
        return
    inside.is_slow = True
    meet, hub = inside.meet, inside.hub

    def meet_and_sleep(what, *about):
        meet(what, *about)
        if comm.num_channels > 1 and hub.channel == 0:
            return
        wakes_s = time.monotonic() + 0.003
        threading.Timer(0.004, hub.wake).start()
        while time.monotonic() < wakes_s:  # hooks of other channels go on meanwhile
            hub.sleep(lambda: time.monotonic() >= wakes_s)

    inside.meet = meet_and_sleep


@every_name
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_on_one_machine(name, optimizer):
    reference = expected(optimizer=optimizer)
    for size in (1, 2, 3, 4):
        assert hashes(size, lambda: make_strategy(name), optimizer=optimizer) == reference, size


@every_name
def test_with_clipping(name):
    reference = expected(clip=0.5)
    for size in (1, 2, 4):
        assert hashes(size, lambda: make_strategy(name), clip=0.5) == reference, size


@every_name
@pytest.mark.parametrize(("size", "machines"), [(3, 1), (4, 2), (4, 4), (6, 2)])
def test_over_the_network_and_on_several_machines(name, size, machines):
    settings = {"shards": 6, "comm": "network" if machines == 1 else "auto"}
    found = hashes(size, lambda: make_strategy(name), machines, **settings)
    assert found == expected(shards=6)


@every_name
@pytest.mark.parametrize(("size", "machines"), [(2, 1), (4, 1), (4, 2)])
def test_a_slow_reader_reads_what_was_meant_for_it(name, size, machines):
    found = hashes(size, lambda: SlowReader(make_strategy(name)), machines, steps=8)
    assert found == expected(steps=8)


@pytest.fixture(scope="module")
def plain_run(tmp_path_factory):
    """Return a function that trains on one rank, once for the same settings."""

    @functools.cache
    def run(*sets):
        return train_forked(DIGITS, tmp_path_factory.mktemp("plain") / "run", *sets)

    return run


@pytest.mark.parametrize(("size", "servers"), [(2, 1), (3, 1), (4, 2)])
@pytest.mark.parametrize("clip", ["", "optimizer.clip_norm=0.5"])
def test_dedicated_servers_give_the_hash_of_a_run_without_any(
    size, servers, clip, tmp_path, plain_run
):
    sets = ["run.steps=20", "optimizer.warmup_steps=3", *filter(None, [clip])]
    plain = plain_run(*sets)
    served = [*sets, "strategy.name=sync_server", f"strategy.sync_server.servers={servers}"]
    found = train_forked(DIGITS, tmp_path / "served", *served, ranks=size)
    assert found["weights_sha256"] == plain["weights_sha256"]
    assert (found["loss"], found["accuracy"]) == (plain["loss"], plain["accuracy"])


def test_dedicated_servers_in_a_script_are_refused_with_a_way_out():
    def work():
        with pytest.raises(UsageError, match="cannot know when a loop of your own has ended"):
            train(strategy=SyncServer(SyncServerSettings(servers=1)))

    run_ranks(2, work)


@pytest.mark.parametrize(
    ("settings", "rule"),
    [({"overlap": True}, "says itself when"), ({"bucket_bytes": 4096}, "says where buckets end")],
)
def test_what_a_strategy_fixes_cannot_be_set_in_a_script(settings, rule):
    def work():
        with pytest.raises(ConfigError, match=rule):
            train(strategy=make_strategy("wait_free"), **settings)

    run_ranks(1, work)
