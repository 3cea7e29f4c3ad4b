"""Facts about clusters: ranges, draws from them, and the presets."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from syncline.cluster import PRESETS, at_values, cluster_from, cluster_of, known_facts
from syncline.cluster_facts import ClusterFacts, Fact, LinkFacts, Range, draw, filled, ranges
from syncline.cluster_file import cluster_to_toml, parse_cluster
from syncline.config import ClusterSettings
from syncline.presets import PRESETS as KNOWN
from syncline.sim.run import simulate
from worlds import workload


def test_a_fact_without_a_range_is_certain_and_one_with_a_range_is_drawn_from_it():
    assert [Fact(3.0).at(part) for part in (0.0, 0.3, 1.0)] == [3.0, 3.0, 3.0]
    known = Fact(2.0, low=1.0, high=8.0)
    assert [known.at(part) for part in (0.0, 0.25, 0.5, 0.75, 1.0)] == pytest.approx(
        [1.0, 2**0.5, 2.0, 4.0, 8.0]
    )
    # From zero there is no logarithm.
    assert Fact(2.0, low=0.0, high=4.0).at(0.25) == 1.0


def test_ranges_are_listed_by_key_and_half_of_the_draws_lie_below_the_value():
    facts = ClusterFacts(
        network=LinkFacts(latency_s=Fact(1.0, 0.5, 8.0), rate_bytes_per_s=Fact(7.0)),
        inside=LinkFacts(rate_bytes_per_s=Fact(10.0, high=20.0)),
        message_s=Fact(3.0, low=1.0),
    )
    found = ranges(facts)
    keys = ["network.latency_s", "inside.rate_bytes_per_s", "message_s"]
    assert [one.key for one in found] == keys
    uniform = random.Random(0).random
    drawn = [draw(found, uniform) for _ in range(1000)]
    below = sum(one["network.latency_s"] < 1.0 for one in drawn)
    assert 450 < below < 550
    assert all(0.5 <= one["network.latency_s"] <= 8.0 for one in drawn)
    assert all(10.0 <= one["inside.rate_bytes_per_s"] <= 20.0 for one in drawn)
    assert draw((Range("x", Fact(5.0)),), uniform) == {"x": 5.0}


def test_other_values_make_another_cluster_and_rates_by_size_go_with_the_rate():
    rates = ((100.0, 2.0), (1000.0, 4.0))
    facts = ClusterFacts(network=LinkFacts(rate_bytes_per_s=Fact(4.0), rates=rates))
    cluster = cluster_from(facts)
    other = at_values(
        cluster,
        {
            "network.rate_bytes_per_s": 8.0,
            "network.latency_s": 1.0,
            "message_s": 2.0,
            "copies.x": 1,
        },
    )
    assert other.network.rate_bytes_per_s == 8.0
    assert other.network.rates == ((100.0, 4.0), (1000.0, 8.0))
    assert (other.network.latency_s, other.message_s) == (1.0, 2.0)
    assert other.inside == cluster.inside
    assert other.copies is None


def test_what_facts_do_not_say_their_base_says():
    own = ClusterFacts(base="10gbit", network=LinkFacts(latency_s=Fact(1.0)), device="x")
    known = known_facts(own)
    assert known.network.latency_s == Fact(1.0)
    assert known.network.rate_bytes_per_s == KNOWN["10gbit"].network.rate_bytes_per_s
    assert (known.device, known.message_s) == ("x", KNOWN["1gbit"].message_s)
    # A rate of one's own is for all sizes.
    base = ClusterFacts(network=LinkFacts(rates=((1.0, 1.0),), nominal_bytes_per_s=Fact(9.0)))
    mine = ClusterFacts(network=LinkFacts(rate_bytes_per_s=Fact(10.0)))
    assert filled(mine, base).network == LinkFacts(rate_bytes_per_s=Fact(10.0))


def test_facts_win_over_the_preset_and_single_settings_over_the_facts():
    facts = ClusterFacts(
        ranks_per_machine=4,
        cores=16,
        network=LinkFacts(latency_s=Fact(1.0), rate_bytes_per_s=Fact(2.0), rates=((1.0, 2.0),)),
        copies=LinkFacts(latency_s=Fact(0.5), rate_bytes_per_s=Fact(3.0)),
    )
    found = cluster_of(ClusterSettings(preset="25gbit"), 8, None, facts)
    assert (found.machines, found.ranks_per_machine, found.cores) == (2, 4, 16)
    assert (found.network.latency_s, found.network.rates) == (1.0, ((1.0, 2.0),))
    settings = ClusterSettings(rate_bytes_per_s=7.0, copy_latency_s=0.25, cores=2, machines=8)
    found = cluster_of(settings, 8, None, facts)
    assert (found.network.latency_s, found.network.rate_bytes_per_s) == (1.0, 7.0)
    assert found.network.rates == ()
    assert found.copies is not None
    assert (found.copies.latency_s, found.cores, found.machines) == (0.25, 2, 8)
    # Fewer ranks than a machine has are on one machine.
    assert cluster_of(ClusterSettings(), 3, None, facts).machines == 1


SHAPES = {name: facts.ranks_per_machine or 1 for name, facts in KNOWN.items()}


@pytest.mark.parametrize("name", KNOWN)
def test_a_preset_is_sourced_is_possible_comes_back_from_toml_and_simulates(name):
    facts = KNOWN[name]
    assert facts.source
    known = known_facts(facts)
    assert parse_cluster(cluster_to_toml(known)) == known
    for one in ranges(known):
        low, high = one.fact.bounds
        assert low <= one.fact.value <= high, one
        assert one.fact.source, one
    for link in (known.network, known.inside, known.copies):
        reached, nominal = link.rate_bytes_per_s, link.nominal_bytes_per_s
        if reached is not None and nominal is not None:
            assert reached.bounds[1] <= nominal.value
    cluster = cluster_of(ClusterSettings(preset=name), 2 * SHAPES[name])
    assert cluster.machines == 2
    assert (cluster.copies is None) == (facts.copies == LinkFacts())
    found = simulate(workload((1 << 22, 0.001, 0.002), (1 << 20, 0.001, 0.002)), cluster, steps=3)
    assert 0.006 < found.step_s < 1.0
    PRESETS[name]


def test_the_docs_have_a_row_for_each_preset():
    text = (Path(__file__).parents[1] / "docs" / "clusters.md").read_text()
    rows = re.findall(r"^\| `([a-z0-9.-]+)` \| [^|]*\|[^|]*\|[^|]* us ", text, re.MULTILINE)
    assert rows == list(KNOWN)


def test_the_first_presets_are_what_they_were():
    of_cpus = [
        (PRESETS[name].network.latency_s, PRESETS[name].network.rate_bytes_per_s)
        for name in ("1gbit", "10gbit", "25gbit", "100gbit")
    ]
    assert of_cpus == [(75e-6, 0.110e9), (30e-6, 1.12e9), (20e-6, 2.97e9), (4e-6, 11.9e9)]
    one = PRESETS["1gbit"]
    assert (one.inside.latency_s, one.inside.rate_bytes_per_s) == (20e-6, 6e9)
    assert (one.message_s, one.collective_s) == (17e-6, 7e-6)
    assert (one.flops_per_s, one.update_bytes_per_s) == (5e10, 6e9)
    assert "copies" not in one.to_dict()
    assert one.to_dict()["network"] == {"latency_s": 75e-6, "rate_bytes_per_s": 0.110e9}


def test_a_rate_of_one_s_own_makes_a_preset_s_device_void():
    preset, rated = KNOWN["k80-10gbe"], ClusterFacts(base="k80-10gbe", flops_per_s=Fact(1e12))
    assert cluster_of(ClusterSettings(), 2, facts=preset).device == "k80"
    assert cluster_of(ClusterSettings(device="v100"), 2, facts=preset).device == "v100"
    assert cluster_of(ClusterSettings(flops_per_s=1e12), 2, facts=preset).device == ""
    assert cluster_of(ClusterSettings(), 2, facts=rated).device == ""
    assert cluster_of(ClusterSettings(), 2).to_dict() == PRESETS["1gbit"].to_dict() | {
        "machines": 2
    }
