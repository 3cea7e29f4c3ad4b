"""Simulations of many ranks: fast links and bundled calls, beside the exact ones."""

from __future__ import annotations

import pytest

from command import run_forked
from syncline.cluster import Link
from syncline.faults import Conditions, Fault, Jitter
from syncline.sim.run import simulate
from syncline.strategies import make_strategy
from syncline.strategies.registry import STRATEGIES
from syncline.strategies.server_settings import ServerSettings
from syncline.strategies.settings import LocalSettings
from worlds import cluster, workload

LAYERS = workload(*((65536 * k, 0.1 * k, 0.2 * k) for k in (1, 2, 4, 3)))
INSIDE = Link(latency_s=1e-3, rate_bytes_per_s=1e8)
SPENT = {"update_bytes_per_s": 1e8, "message_s": 1e-3, "collective_s": 1e-3}
SETTINGS = {"local": LocalSettings(period=1)}


def run(name, links, ranks=6, per_machine=1, settings=None, rate=1e6, **options):
    own = settings or SETTINGS.get(name)
    return simulate(
        LAYERS,
        cluster(ranks, per_machine, rate=rate, latency_s=1e-3, inside=INSIDE, **SPENT),
        lambda: make_strategy(name, own, 0),
        steps=6,
        bucket_bytes=65536,
        links=links,
        **options,
    )


@pytest.mark.parametrize("per_machine", [1, 2])
@pytest.mark.parametrize("name", sorted(STRATEGIES))
def test_fast_links_take_steps_within_one_per_cent_of_the_exact_ones(name, per_machine):
    fast, exact = (run(name, links, per_machine=per_machine) for links in ("fast", "exact"))
    assert fast.step_s == pytest.approx(exact.step_s, rel=0.01)
    (*_, fast_s), (*_, exact_s) = fast.step_ends_s, exact.step_ends_s
    first_s, exact_first_s = fast.step_ends_s[0], exact.step_ends_s[0]
    assert fast_s - first_s == pytest.approx(exact_s - exact_first_s, rel=0.01)
    assert first_s == pytest.approx(exact_first_s, rel=0.01)
    assert fast.sent_bytes == exact.sent_bytes
    assert fast.carried_bytes == pytest.approx(exact.carried_bytes)


@pytest.mark.parametrize("name", ["gossip", "elastic", "server"])
def test_ranks_that_wait_for_the_wire_take_steps_as_on_exact_links(name):
    # Each port for itself, without the others that a message goes through, was up to 15 % off here.
    conditions = Conditions(jitter=Jitter(kind="lognormal", sigma=0.3), seed=5)
    fast, exact = (run(name, links, rate=2e5, conditions=conditions) for links in ("fast", "exact"))
    assert exact.exposed_communication > 0.2
    assert fast.step_ends_s == pytest.approx(exact.step_ends_s, rel=1e-3)


@pytest.mark.parametrize("name", ["synchronous", "local", "sync_server", "wait_free"])
def test_collectives_take_the_same_time_on_both(name):
    conditions = Conditions(jitter=Jitter(kind="lognormal", sigma=0.3), seed=5)
    fast, exact = (run(name, links, conditions=conditions) for links in ("fast", "exact"))
    assert fast.step_ends_s == pytest.approx(exact.step_ends_s, rel=1e-9)


@pytest.mark.parametrize("name", ["gossip", "elastic", "server"])
def test_ranks_send_the_same_messages_on_both(name):
    fast, exact = (run(name, links, keeps_messages=True) for links in ("fast", "exact"))
    assert fast.messages == exact.messages
    keys = ("exchanges", "exchanged_bytes")
    assert [fast.strategy[key] for key in keys] == [exact.strategy[key] for key in keys]


def test_staleness_is_counted_on_both():
    # Once all ranks are under way, a push comes after those of the others and, since the exchange
    # is early, after all of the step before.
    fast, exact = (run("server", links) for links in ("fast", "exact"))
    for outcome in (fast, exact):
        counts = outcome.strategy["staleness"]
        assert counts["11"] == max(counts.values())
    assert sum(fast.strategy["staleness"].values()) == sum(exact.strategy["staleness"].values())


@pytest.mark.parametrize("name", ["gossip", "elastic", "server"])
def test_the_same_seed_gives_the_same_trace(name):
    conditions = Conditions(jitter=Jitter(kind="lognormal", sigma=0.3), seed=5)
    first, second = (
        run(name, "fast", 4, conditions=conditions, traces=True).trace.to_bytes() for _ in range(2)
    )
    assert first == second


def test_links_are_exact_unless_fast_ones_are_chosen():
    work, links = workload((8192, 0.1, 0.1)), cluster(12)
    assert simulate(work, links, "gossip", steps=1).links == "exact"
    fast = simulate(work, links, "gossip", steps=1, links="fast")
    assert fast.links == "fast"
    assert fast.link_slack == 0.0  # few flows: rates are computed at each change


def calls_in_turn(links, per_machine=1, ranks=6, **costs):
    """Ranks that do nothing but push to all owners and wait for the answers, bucket by bucket."""
    own = ServerSettings(early=False)
    costs = {"rate": 1e9, "latency_s": 1e-3, "update_bytes_per_s": 1e9} | costs
    return simulate(
        workload((ranks * 65536, 0.0, 0.0)),
        cluster(ranks, per_machine, **costs),
        lambda: make_strategy("server", own, 0),
        steps=4,
        overlap=True,
        links=links,
    )


@pytest.mark.parametrize("per_machine", [1, 2])
@pytest.mark.parametrize(
    "costs",
    [
        {"message_s": 1.0},
        {"update_bytes_per_s": 1e5},
        {"message_s": 0.1, "update_bytes_per_s": 1e6},
        {"message_s": 0.5, "update_bytes_per_s": 1e5, "rate": 1e7},
    ],
    ids=str,
)
def test_a_bundle_of_calls_pays_what_as_many_calls_pay(costs, per_machine):
    fast, exact = (calls_in_turn(links, per_machine, **costs) for links in ("fast", "exact"))
    assert fast.step_ends_s[-1] == pytest.approx(exact.step_ends_s[-1], rel=0.01)


def test_a_lone_bundle_by_hand():
    # One worker and three servers, 4096 bytes each. Messages leave after 1, 2 and 3 s; each has
    # come 0.5 s later, is served for 1 s of message, 2 s of update and 4 s of reading and writing.
    own = ServerSettings(servers=3, early=False)
    ends = [
        simulate(
            workload((3 * 4096, 0.0, 0.0)),
            cluster(4, rate=1e12, latency_s=0.5, update_bytes_per_s=2048.0, message_s=1.0),
            lambda: make_strategy("server", own, 0),
            steps=2,
            overlap=True,
            links=links,
        ).step_s
        for links in ("exact", "fast")
    ]
    assert ends == pytest.approx([3 + 0.5 + 7 + 0.5] * 2, rel=1e-3)


def test_ranks_go_on_without_owners_that_have_died():
    # Two die: the next rank that lives takes their strips over, and serves three.
    deaths = Conditions(
        faults=tuple(Fault(rank=rank, step=2, kind="death") for rank in (3, 4)),
    )
    outcome = run("elastic", "fast", 8, conditions=deaths)
    assert sorted(outcome.gone) == [3, 4]
    assert len(outcome.step_ends_s) == 6


def test_a_rank_dies_while_bundled_calls_are_under_way():
    # Ranks wait for the wire: when it dies, it has answered some calls of a bundle, and not others.
    deaths = Conditions(faults=(Fault(rank=3, step=2, kind="death"),))
    fast, exact = (
        run("elastic", links, rate=4e4, conditions=deaths) for links in ("fast", "exact")
    )
    assert sorted(fast.gone) == sorted(exact.gone) == [3]
    assert fast.step_ends_s == pytest.approx(exact.step_ends_s, rel=1e-6)


def test_owners_serve_bundles_one_after_the_other():
    # 5 pushes come to the one server. Each keeps it busy for 1 s of update, and for 2 s of reading
    # the gradient and writing the answer; the wire takes no time.
    own = ServerSettings(servers=1, early=False)
    fast, exact = (
        simulate(
            workload((8192, 0.0, 0.0)),
            cluster(6, rate=1e9, update_bytes_per_s=8192.0),
            lambda: make_strategy("server", own, 0),
            steps=3,
            overlap=True,
            links=links,
        )
        for links in ("fast", "exact")
    )
    assert fast.step_s == pytest.approx(15.0, rel=0.01)
    assert exact.step_s == pytest.approx(15.0, rel=0.01)


SPEED = """
import time
from syncline import models
from syncline.sim.run import simulate
from syncline.measure.derive import derive
from worlds import cluster
model = models.build("resnet-50", (3, 224, 224), 1000)
work = derive(model, (3, 224, 224), 32, 5e12)
links = cluster(32, rate=2.97e9, latency_s=2e-5, update_bytes_per_s=6e9)
for name in ("gossip", "elastic", "server"):
    started = time.process_time()
    assert len(simulate(work, links, name, steps=2, links="fast").step_ends_s) == 2
    print(time.process_time() - started)
"""


def test_32_ranks_of_resnet_50_exchange_with_each_other_within_ten_seconds_of_one_core():
    assert max(map(float, run_forked(SPEED).split())) < 10.0
