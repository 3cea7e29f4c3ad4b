"""One simulated rank that stands for all, beside a simulation of every rank."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from syncline.cluster import Link
from syncline.faults import Conditions, Fault, Jitter, LinkChange
from syncline.measure.derive import derive
from syncline.sim import run
from syncline.sim.rank import VirtualRank
from syncline.sim.run import simulate
from syncline.strategies import Hybrid, HybridSettings, Synchronous, make_strategy
from syncline.strategies.group_settings import LayeredSettings
from syncline.strategies.registry import STRATEGIES
from syncline.strategies.server_settings import SyncServerSettings
from worlds import cluster, workload

ALIKE = ("synchronous", "all_reduce", "wait_free", "merged", "layered", "sync_server")
LAYERS = workload((65536, 0.1, 0.2), (4096, 0.2, 0.3), samples=4)


def simulate_all(*args, **options):
    """Simulate every rank, also if they are alike."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "are_alike", lambda *_: False)
        return simulate(*args, **options)


@pytest.fixture
def ranks_made(monkeypatch):
    """The numbers of all virtual ranks that are made."""
    made = []
    make = VirtualRank.__init__

    def note(self, world, number, *others):
        made.append(number)
        make(self, world, number, *others)

    monkeypatch.setattr(VirtualRank, "__init__", note)
    return made


LAYER = st.tuples(
    st.integers(1, 40).map(lambda blocks: 1000 * blocks),
    st.floats(0.0, 0.1),
    st.floats(0.0, 0.2),
)


@settings(max_examples=120, deadline=None)
@given(
    name=st.sampled_from(ALIKE),
    layers=st.lists(LAYER, min_size=1, max_size=6),
    machines=st.integers(1, 5),
    per_machine=st.integers(1, 4),
    shards=st.integers(1, 3),
    bucket_bytes=st.none() | st.integers(2000, 60_000),
    overlap=st.none() | st.booleans(),
    links=st.sampled_from(["exact", "fast"]),
    algorithm=st.sampled_from(["direct", "ring"]),
    input_s=st.sampled_from([0.0, 0.05, 1.0]),
    prefetch=st.integers(0, 2),
    cores=st.none() | st.integers(1, 4),
    clips=st.booleans(),
    as_published=st.booleans(),
    groups=st.just("machine") | st.integers(1, 4),
    update=st.sampled_from([1e4, 1e6, float("inf")]),
)
def test_one_rank_takes_the_time_the_bytes_and_the_memory_of_all(
    name, layers, machines, per_machine, shards, bucket_bytes, overlap, links, algorithm,
    input_s, prefetch, cores, clips, as_published, groups, update,
):  # fmt: skip
    ranks, own = machines * per_machine, None
    if name == "layered":
        groups = groups if groups == "machine" else min(groups, ranks)
        own = LayeredSettings(groups=groups, as_published=as_published)
    inside = Link(latency_s=2e-3, rate_bytes_per_s=1e6)
    costs = {"message_s": 1e-3, "collective_s": 3e-3, "update_bytes_per_s": update, "cores": cores}
    arguments = (
        workload(*layers, input_s=input_s, samples=4),
        cluster(ranks, per_machine, rate=1e5, latency_s=1e-2, inside=inside, **costs),
        lambda: make_strategy(name, own, 0),
    )
    options = {
        "steps": 3,
        "shards": shards * ranks,
        "bucket_bytes": bucket_bytes,
        "overlap": overlap,
        "links": links,
        "algorithm": algorithm,
        "prefetch": prefetch,
        "clips": clips,
        "state_copies": 2,
    }
    one, everybody = (
        dataclasses.asdict(do(*arguments, **options)) for do in (simulate, simulate_all)
    )
    for found in (one, everybody):
        del found["wall_s"]
    times = ("step_s", "samples_per_s", "step_ends_s", "exposed_communication", "exposed_input")
    for key in (*times, "input_wait_s", "carried_bytes"):
        assert one.pop(key) == pytest.approx(everybody.pop(key), rel=1e-9, abs=1e-12), key
    assert one == everybody


@pytest.mark.parametrize("name", ALIKE)
def test_one_rank_is_simulated_where_all_are_alike(name, ranks_made):
    found = simulate(LAYERS, cluster(12), name, steps=2)
    assert ranks_made == [0]
    assert found.ranks == 12


class Own(Synchronous):
    """A user's own strategy."""


SLOW = Conditions(slow_ranks={3: 2.0})
OTHERS = {
    "jitter": {"conditions": Conditions(jitter=Jitter(kind="lognormal", sigma=0.1))},
    "slow ranks": {"conditions": SLOW},
    "faults": {"conditions": Conditions(faults=(Fault(rank=1, step=0, kind="pause", seconds=1),))},
    "links": {"conditions": Conditions(link_changes=(LinkChange(time_s=0, machine=0, factor=2),))},
    "a trace": {"traces": True},
    "messages": {"keeps_messages": True},
    "unequal shards": {"shards": 5},
    "own strategy": {"strategy": Own},
    "servers": {
        "strategy": lambda: make_strategy("sync_server", SyncServerSettings(servers=1), 0),
        "shards": 3,
    },
    "unequal groups": {
        "strategy": lambda: make_strategy("layered", LayeredSettings(groups=3), 0),
    },
    **{name: {"strategy": name} for name in sorted({*STRATEGIES} - {*ALIKE, "hybrid"})},
}


@pytest.mark.parametrize("options", OTHERS.values(), ids=OTHERS)
def test_every_rank_is_simulated_where_ranks_may_differ(options, ranks_made):
    options = {"strategy": "synchronous", **options}
    simulate(LAYERS, cluster(4), steps=25, **options)
    assert ranks_made == [0, 1, 2, 3]


def test_every_rank_is_simulated_where_layers_are_split(ranks_made):
    split = derive(nn.Linear(8, 8), (8,), 4, 1e9)
    simulate(split, cluster(4), lambda: Hybrid(HybridSettings(groups=2)), steps=2)
    assert ranks_made == [0, 1, 2, 3]
