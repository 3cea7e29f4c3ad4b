"""The cluster to simulate, and what goes wrong on it."""

from __future__ import annotations

import pytest

from small_job import SMALL, refusal, small
from syncline.cluster import PRESETS, Link, cluster_of, conditions_of
from syncline.config import ClusterSettings, job_to_toml, parse_job, what_changed
from syncline.errors import ConfigError
from syncline.faults import Conditions, Fault, Jitter, LinkChange

FAULTS = """
[cluster]
preset = "10gbit"
slow_ranks = {3 = 2}
link_changes = [{time_s = 2.5, machine = 1, factor = 0.5}]

[[cluster.faults]]
rank = 1
step = 3
kind = "slow"
factor = 10
steps = 2

[[cluster.faults]]
rank = 0
step = 9
kind = "death"
"""


def test_faults_are_lists_of_tables_and_come_back_as_written():
    job = parse_job(SMALL + FAULTS)
    assert job.cluster == ClusterSettings(
        preset="10gbit",
        slow_ranks={"3": 2.0},
        faults=(
            Fault(rank=1, step=3, kind="slow", factor=10.0, steps=2),
            Fault(rank=0, step=9, kind="death"),
        ),
        link_changes=(LinkChange(time_s=2.5, machine=1, factor=0.5),),
    )
    assert parse_job(job_to_toml(job)) == job
    assert parse_job(job_to_toml(job.resolved(4))) == job.resolved(4)


def test_a_cluster_is_set_on_the_command_line():
    job = small(
        cluster__rate_bytes_per_s="1e9",
        cluster__slow_ranks__1="2",
        cluster__faults='[{rank = 1, step = 3, kind = "death"}]',
    )
    assert job.cluster == ClusterSettings(
        rate_bytes_per_s=1e9,
        slow_ranks={"1": 2.0},
        faults=(Fault(rank=1, step=3, kind="death"),),
    )


@pytest.mark.parametrize(
    ("sets", "line"),
    [
        (
            ["cluster.preset=10gbits"],
            'cluster.preset: got "10gbits", but this is the name of a preset.'
            ' Did you mean "10gbit"?',
        ),
        (
            ["cluster.preset=token-ring"],
            'cluster.preset: got "token-ring", but this is the name of a preset.'
            " syncline simulate --list-clusters has them.",
        ),
        (
            ["cluster.rate=3"],
            "cluster.rate: set on the command line, but no such setting exists. Settings of"
            " cluster: preset, device, machines, latency_s, rate_bytes_per_s, inside_latency_s,"
            " inside_rate_bytes_per_s, flops_per_s, update_bytes_per_s, message_s, collective_s,"
            " duplex, copy_latency_s, copy_rate_bytes_per_s, byte_s, cores, one_computer, input_s,"
            " algorithm, links, jitter, jitter_sigma, jitter_shift, slow_ranks, faults,"
            " link_changes.",
        ),
        (
            ["cluster.rate_byte_per_s=3"],
            "cluster.rate_byte_per_s: set on the command line, but no such setting exists."
            " Did you mean cluster.rate_bytes_per_s?",
        ),
        (
            ["cluster.rate_bytes_per_s=0"],
            "cluster.rate_bytes_per_s: got 0, but this is a number, above 0."
            " Write for example cluster.rate_bytes_per_s = 1000000000.0.",
        ),
        (
            ["cluster.jitter=lognormal"],
            'cluster.jitter_sigma: it is not there, but jitter = "lognormal" needs a spread above'
            " 0. Write for example cluster.jitter_sigma = 0.1.",
        ),
        (
            ["cluster.jitter_sigma=0.1"],
            'cluster.jitter_sigma: got 0.1 while cluster.jitter is "none", but it has an effect'
            ' with jitter = "lognormal" only.'
            " Remove it (on the command line: --set cluster.jitter_sigma=).",
        ),
        (
            ["cluster.jitter=exponential", "cluster.jitter_sigma=0.1"],
            'cluster.jitter_sigma: got 0.1 while cluster.jitter is "exponential", but it has an'
            ' effect with jitter = "lognormal" only.'
            " Remove it (on the command line: --set cluster.jitter_sigma=).",
        ),
        (
            ["cluster.jitter=lognormal", "cluster.jitter_sigma=1", "cluster.jitter_shift=0.5"],
            'cluster.jitter_shift: got 0.5 while cluster.jitter is "lognormal", but it has an'
            ' effect with jitter = "exponential" only.'
            " Remove it (on the command line: --set cluster.jitter_shift=).",
        ),
        (
            ["cluster.jitter=exponential", "cluster.jitter_shift=1"],
            "cluster.jitter_shift: got 1, but this is a number, 0 or more, below 1."
            " Write for example cluster.jitter_shift = 0.9.",
        ),
        (
            ["cluster.slow_ranks=3"],
            "cluster.slow_ranks: got 3, but this is a table, each value a number, above 0."
            " Write for example cluster.slow_ranks = {1 = 2.0}.",
        ),
        (
            ["cluster.slow_ranks.1=0"],
            "cluster.slow_ranks.1: got 0, but this is a number, above 0."
            " Write for example cluster.slow_ranks.1 = 2.0.",
        ),
        (
            ["cluster.slow_ranks.one=2"],
            'cluster.slow_ranks.one: got "one", but ranks are whole numbers, counted from 0.'
            " Write for example cluster.slow_ranks = {1 = 2.0}.",
        ),
        (
            ["cluster.faults=3"],
            "cluster.faults: got 3, but this is a list of tables. Write for example"
            ' cluster.faults = [{rank = 1, step = 1, kind = "death"}].',
        ),
        (
            ["cluster.link_changes=[3]"],
            "cluster.link_changes: got [3], but this is a list of tables. Write for example"
            " cluster.link_changes = [{time_s = 0.1, machine = 1, factor = 0.1}].",
        ),
        (
            ['cluster.faults=[{rank = 1, step = 3, kind = "deaf"}]'],
            'cluster.faults[0].kind: got "deaf", but this is "death", "pause" or "slow".'
            ' Did you mean "death"?',
        ),
        (
            ["cluster.faults=[{rank = 1, step = 3}]"],
            "cluster.faults[0].kind: it is not there, but it has no default."
            ' Write for example cluster.faults[0].kind = "death".',
        ),
        (
            ['cluster.faults=[{rnk = 1, step = 3, kind = "death"}]'],
            "cluster.faults[0].rnk: set on the command line, but no such setting exists."
            " Did you mean cluster.faults[0].rank?",
        ),
        (
            ['cluster.faults=[{rank = 1.5, step = 3, kind = "death"}]'],
            "cluster.faults[0].rank: got 1.5, but this is a whole number."
            " Write for example cluster.faults[0].rank = 1.",
        ),
        (
            ['cluster.faults=[{rank = 1, step = 3, kind = "slow", factor = inf}]'],
            "cluster.faults[0].factor: got inf, but numbers here are finite."
            " Write for example cluster.faults[0].factor = 0.1.",
        ),
        (
            ['cluster.faults=[{rank = 1, step = 3, kind = "death", seconds = 2}]'],
            'cluster.faults[0].seconds: got 2.0 while its kind is "death", but it has an effect'
            ' with kind = "pause" only. Remove it.',
        ),
    ],
)
def test_mistakes_in_a_cluster_are_refused_like_all_others(sets, line):
    assert refusal(SMALL, *sets) == line


def test_an_unknown_key_of_a_fault_in_the_file_says_so():
    assert refusal(SMALL + FAULTS.replace("factor = 10", "facter = 10")) == (
        "cluster.faults[0].facter: found in the file, but no such setting exists."
        " Did you mean cluster.faults[0].factor?"
    )


def test_a_job_that_says_nothing_of_a_cluster_is_written_without_one():
    assert "cluster" not in job_to_toml(small())
    assert "cluster" not in job_to_toml(small(cluster__preset="1gbit").resolved())
    assert '[cluster]\npreset = "10gbit"\n' in job_to_toml(small(cluster__preset="10gbit"))


def test_a_run_may_go_on_with_another_cluster():
    before, now = small(), parse_job(SMALL + FAULTS)
    assert list(what_changed(before, now)) == []


def test_a_preset_is_one_rank_and_a_cluster_as_many_as_asked_for():
    for preset in PRESETS.values():
        assert preset.ranks == 1
    cluster = cluster_of(ClusterSettings(preset="25gbit"), ranks=6, machines=None)
    assert (cluster.machines, cluster.ranks_per_machine, cluster.ranks) == (6, 1, 6)
    assert cluster.network == PRESETS["25gbit"].network
    settings = ClusterSettings(machines=3)
    assert cluster_of(settings, 6, None).ranks_per_machine == 2
    assert cluster_of(settings, 6, 2).ranks_per_machine == 3


def test_what_a_job_says_of_its_cluster_wins_over_the_preset():
    settings = {
        "latency_s": 0.0,
        "rate_bytes_per_s": 2.0,
        "inside_latency_s": 3.0,
        "inside_rate_bytes_per_s": 4.0,
        "flops_per_s": 5.0,
        "update_bytes_per_s": 6.0,
        "message_s": 7.0,
        "collective_s": 0.0,
        "duplex": "half",
        "copy_rate_bytes_per_s": 8.0,
    }
    cluster = cluster_of(ClusterSettings(**settings), 1, None)
    links = cluster.network, cluster.inside
    found = [(link.latency_s, link.rate_bytes_per_s) for link in links]
    assert found == [(0.0, 2.0), (3.0, 4.0)]
    assert (cluster.flops_per_s, cluster.update_bytes_per_s) == (5.0, 6.0)
    assert (cluster.message_s, cluster.collective_s) == (7.0, 0.0)
    assert [link.duplex for link in links] == ["half", "full"]
    assert cluster.copies == Link(latency_s=0.0, rate_bytes_per_s=8.0)


def test_a_latency_of_copies_alone_makes_no_device():
    with pytest.raises(ConfigError, match=r"cluster.copy_latency_s: got 1e-05 on a cluster whose"):
        cluster_of(ClusterSettings(copy_latency_s=1e-5), 2)
    known = cluster_of(ClusterSettings(preset="k80-10gbe", copy_latency_s=1.0), 2).copies
    assert known == Link(latency_s=1.0, rate_bytes_per_s=6e9)


@pytest.mark.parametrize("machines", [4, 12, 0, -2])
def test_machines_with_unequal_ranks_are_refused(machines):
    with pytest.raises(ConfigError) as caught:
        cluster_of(ClusterSettings(), 6, machines)
    assert str(caught.value) == (
        f"cluster.machines: got {machines} with 6 ranks, but each machine has as many ranks as any"
        " other. Use 1, 2, 3, 6."
    )


def test_conditions_are_what_the_cluster_says_and_the_seed_is_the_runs():
    job = parse_job(SMALL + FAULTS, sets=["cluster.jitter=lognormal", "cluster.jitter_sigma=0.2"])
    assert conditions_of(job.cluster, 7) == Conditions(
        faults=job.cluster.faults,
        jitter=Jitter(kind="lognormal", sigma=0.2),
        slow_ranks={3: 2.0},
        link_changes=job.cluster.link_changes,
        seed=7,
    )
