"""Intervals of predictions: hand-worked widths, and which facts count."""

from __future__ import annotations

import math

import msgspec
import pytest

from syncline.cluster import cluster_of, known_facts
from syncline.cluster_facts import ClusterFacts, Fact, LinkFacts, Measured
from syncline.config import ClusterSettings
from syncline.presets import PRESETS
from syncline.sim.interval import (
    CROWDED,
    MODEL,
    NINE_IN_TEN,
    count_simulations,
    find_interval,
    given_keys,
)
from syncline.workload import Layer, Workload

LAYERS = (Layer("a", 4000, 1.0, 2.0, kind="conv"), Layer("b", 4000, 0.5, 0.5, kind="linear"))
WORKLOAD = Workload("two", LAYERS, made_by="measured", spread=0.1 / NINE_IN_TEN)
FACTS = ClusterFacts(
    base="10gbit",
    network=LinkFacts(latency_s=Fact(1e-5), rate_bytes_per_s=Fact(1e9, 0.5e9, 1e9)),
    message_s=Fact(1e-5),
    collective_s=Fact(1e-5),
    byte_s=Fact(1e-9),
    update_bytes_per_s=Fact(1e9),
    flops_per_s=Fact(1e9),
)


def interval(step_of, workload=WORKLOAD, facts=FACTS, ranks=2, machines=2, given=(), **more):
    cluster = cluster_of(ClusterSettings(), ranks, machines, facts)
    return find_interval(step_of, cluster, workload, known_facts(facts), given, **more)


def compute_s(cluster, workload):
    return workload.forward_s + workload.backward_s


def wire_s(cluster, workload):
    return 1e9 / cluster.network.rate_bytes_per_s


def test_without_doubts_the_simulator_itself_is_left():
    found = interval(lambda cluster, workload: 4.0)
    assert found.high_s == pytest.approx(4 * (1 + MODEL))
    assert found.low_s == pytest.approx(4 / (1 + MODEL))
    assert found.doubts == ()


def test_the_spread_of_what_was_measured_widens_it_both_ways():
    found = interval(compute_s)
    width = math.hypot(math.log(1.1), math.log1p(MODEL))
    assert found.high_s == pytest.approx(4 * math.exp(width))
    assert found.low_s == pytest.approx(4 * math.exp(-width))
    (doubt,) = found.doubts
    assert doubt.key == "forward and backward"
    assert (doubt.at_low_s, doubt.at_high_s) == (pytest.approx(4 / 1.1), pytest.approx(4.4))


def test_a_link_that_may_be_slower_only_widens_it_upwards():
    found = interval(wire_s)
    assert found.high_s == pytest.approx(math.exp(math.hypot(math.log(2), math.log1p(MODEL))))
    assert found.low_s == pytest.approx(1 / (1 + MODEL))
    assert [one.key for one in found.doubts] == ["network.rate_bytes_per_s"]
    sure = interval(wire_s, given=given_keys(ClusterSettings(rate_bytes_per_s=1e9)))
    assert sure.doubts == ()


def test_facts_that_the_cluster_does_not_use_cost_no_simulation():
    one = cluster_of(ClusterSettings(), 4, 1, FACTS)
    facts = known_facts(FACTS)
    keys = {doubt.key for doubt in interval(wire_s, ranks=4, machines=1).doubts}
    assert "network.rate_bytes_per_s" not in keys
    many = cluster_of(ClusterSettings(), 4, 4, FACTS)
    assert count_simulations(one, WORKLOAD, facts) == 2 * 3  # inside's two, and compute
    assert count_simulations(many, WORKLOAD, facts) == 2 * 2  # the network's rate, and compute


def test_derived_layers_are_as_sure_as_their_device():
    derived = msgspec.structs.replace(WORKLOAD, made_by="derived", machine={"device": "v100"})
    keys = [one.key for one in interval(compute_s, derived).doubts]
    assert keys == ["v100, conv_efficiency of conv", "v100, linear_efficiency of linear"]
    rates = msgspec.structs.replace(FACTS, flops_per_s=Fact(1e9, 0.5e9, 2e9))
    core = msgspec.structs.replace(WORKLOAD, made_by="derived", machine={"device": "core"})
    (doubt,) = interval(compute_s, core, rates).doubts
    assert (doubt.key, doubt.at_low_s, doubt.at_high_s) == ("flops_per_s", 2.0, 8.0)


def test_the_residual_of_a_fit_counts_where_bytes_do():
    rows = tuple(
        Measured(
            what="all_gather",
            size_bytes=1 << 20,
            machines=2,
            ranks_per_machine=1,
            median_s=float(at),
            low_s=0.0,
            high_s=0.0,
            cpu_s=0.0,
            residual=0.2 if at == 8 else 0.9,
        )
        for at in range(5, 9)
    )
    facts = msgspec.structs.replace(FACTS, measured=rows)
    found = {one.key: one for one in interval(wire_s, facts=facts).doubts}
    doubt = found["links, residual of the fit"]
    assert (doubt.at_low_s, doubt.at_high_s) == (pytest.approx(1 / 0.8), pytest.approx(1 / 1.2))


def test_ranks_without_a_core_each_are_less_sure():
    facts = msgspec.structs.replace(FACTS, cores=2)
    assert interval(compute_s, facts=facts, ranks=4, machines=2).model == MODEL
    assert interval(compute_s, facts=facts, ranks=4, machines=1).model == CROWDED


def test_the_interval_may_lie_around_another_step_of_the_run():
    found = interval(compute_s, around_s=8.0)
    assert found.low_s < 8.0 < found.high_s
    assert found.high_s / 8.0 == pytest.approx(interval(compute_s).high_s / 4.0)


def test_every_preset_says_what_it_is_based_on():
    for facts in PRESETS.values():
        lines = interval(compute_s, facts=facts, ranks=8, machines=2).based_on
        assert lines[0].startswith("layers: measured")
        assert lines[1].startswith("links: ")
