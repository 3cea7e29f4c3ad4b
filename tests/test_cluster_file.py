"""Cluster files: what is read, what is refused, and that files come back as they were written."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from syncline.cluster_facts import ClusterFacts, Fact, LinkFacts, Measured
from syncline.cluster_file import (
    cluster_to_toml,
    find_cluster,
    parse_cluster,
    read_cluster,
    write_cluster,
)
from syncline.errors import ConfigError
from syncline.presets import PRESETS

HEAD = 'format = "syncline-cluster"\nversion = 1\n'
DOCS = Path(__file__).parents[1] / "docs" / "clusters.md"


def refusal(text):
    with pytest.raises(ConfigError) as caught:
        parse_cluster(text, "mine.toml")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_example_of_the_docs_is_ten_lines_that_are_read():
    (example,) = re.findall(r"```toml[^\n]*\n(.*?)```", DOCS.read_text(), re.DOTALL)
    assert len([line for line in example.splitlines() if line]) == 10
    facts = parse_cluster(example)
    assert facts.network.rate_bytes_per_s == Fact(1.15e9, 1.1e9, 1.17e9, "iperf3")
    assert facts.ranks_per_machine == 4
    assert facts.inside.rate_bytes_per_s == Fact(11e9)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "version = 1",
            'mine.toml: format: it is not there, but a cluster file has "syncline-cluster". Begin'
            ' the file with format = "syncline-cluster" and version = 1.',
        ),
        (
            HEAD.replace("1", "2"),
            "mine.toml: version: got 2, but this Syncline reads version 1. Begin"
            ' the file with format = "syncline-cluster" and version = 1.',
        ),
        (
            HEAD + "[netwrk]",
            "mine.toml: netwrk: found in the file, but no such fact exists. Did you mean network?",
        ),
        (
            HEAD + "latency_s = 1e-5",
            "mine.toml: latency_s: found in the file, but no such fact exists. Write it below a"
            " line [network], [inside] or [copies]: latency_s = ...",
        ),
        (
            HEAD + "[inside]\nlatencys = 1e-5",
            "mine.toml: inside.latencys: found in the file, but no such fact exists. Did you mean"
            " inside.latency_s?",
        ),
        (
            HEAD + "[network]\nlatency_s = {vale = 1}",
            "mine.toml: network.latency_s.vale: found in the file, but no such fact exists. Did"
            " you mean network.latency_s.value?",
        ),
        (
            HEAD + "[network]\nlatency_s = {low = 1}",
            "mine.toml: network.latency_s.value: it is not there, but a range has a value in it."
            " Write for example network.latency_s = {value = 1.1e9, low = 1e9, high = 1.2e9}.",
        ),
        (
            HEAD + "[network]\nlatency_s = {value = 3, low = 4}",
            "mine.toml: network.latency_s: got 3 in a range from 4 to 3, but a value lies in its"
            " range. Correct low, value or high.",
        ),
        (
            HEAD + '[network]\nrate_bytes_per_s = "fast"',
            'mine.toml: network.rate_bytes_per_s: got "fast", but this is a number from 1 to'
            " 1e+21. Write for example rate_bytes_per_s = 1.1e9.",
        ),
        (
            HEAD + "[network]\nrate_bytes_per_s = 0",
            "mine.toml: network.rate_bytes_per_s: got 0, but this is a number from 1 to 1e+21."
            " Write for example rate_bytes_per_s = 1.1e9.",
        ),
        (
            HEAD + "message_s = nan",
            "mine.toml: message_s: got nan, but this is a number from 0 to 1e+06. Write for"
            " example message_s = 17e-6.",
        ),
        (
            HEAD + "[network]\nrate_bytes_per_s = 2e9\nnominal_bytes_per_s = 1.25e9",
            "mine.toml: network.rate_bytes_per_s: got 2e+09 with nominal_bytes_per_s = 1.25e+09,"
            " but no link reaches more than its nominal rate. Correct one of the two.",
        ),
        (
            HEAD + '[network]\nduplex = "simplex"',
            'mine.toml: network.duplex: got "simplex", but this is "full" or "half". Write'
            ' network.duplex = "full".',
        ),
        (
            HEAD + '[inside]\nduplex = "half"',
            'mine.toml: inside.duplex: got "half", but only links between machines are half'
            " duplex: other rates are of one way. Remove it.",
        ),
        (
            HEAD + "[network]\nrate_bytes_per_s = 1e9\nrates = [[100, 2e9]]",
            "mine.toml: network.rates: got up to 2e+09, but rates by size are at most"
            " rate_bytes_per_s. Write network.rate_bytes_per_s = 2e+09.",
        ),
        (
            HEAD + "[network]\nrate_bytes_per_s = 1e9\nrates = [[100, 1e8], [10, 1e8]]",
            "mine.toml: network.rates: got [[100, 100000000.0], [10, 100000000.0]], but this is a"
            " list of [bytes of a message, rate] with more bytes from row to row. Write for"
            " example rates = [[65536, 0.6e9], [1048576, 1.1e9]].",
        ),
        (
            HEAD + "[copies]\nlatency_s = 1e-5",
            "mine.toml: copies.rate_bytes_per_s: it is not there, but copies have a latency and a"
            " rate. Write for example rate_bytes_per_s = 1.1e9.",
        ),
        (
            HEAD + "network = 3",
            "mine.toml: network: got 3, but this is a table of facts. Write a line [network] and"
            " the facts below it.",
        ),
        (
            HEAD + "ranks_per_machine = 0",
            "mine.toml: ranks_per_machine: got 0, but this is a whole number, 1 or more. Write for"
            " example ranks_per_machine = 8.",
        ),
        (
            HEAD + "device = 3",
            "mine.toml: device: got 3, but this is text in quotes. Write for example"
            ' device = "text".',
        ),
        (
            HEAD + 'device = "v10"',
            'mine.toml: device: got "v10", but this is the name of a device. Did you mean "v100"?',
        ),
        (
            HEAD + 'base = "10gbits"',
            'mine.toml: base: got "10gbits", but this is the name of a preset. Did you mean'
            ' "10gbit"?',
        ),
        (
            HEAD + '[measured]\ncolumns = ["what"]\nrows = [["all_reduce"]]',
            "mine.toml: measured: it is damaged, but it has columns (what, size_bytes, machines,"
            " ranks_per_machine, median_s, low_s, high_s, cpu_s, residual) and rows of as many"
            " values. Remove it, or measure again: syncline measure links.",
        ),
        (
            HEAD + "[network\n",
            "mine.toml, line 3, column 9: Expected ']' at the end of a table declaration, but a"
            " cluster is valid TOML. A fact looks like this: a line [network], below it latency_s"
            " = 30e-6.",
        ),
    ],
)
def test_mistakes_name_the_file_the_key_the_rule_and_the_way_out(text, line):
    assert refusal(text) == line


def test_a_name_is_a_preset_this_machine_or_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_cluster("k80-10gbe") is PRESETS["k80-10gbe"]
    for name, line in (
        (
            "k80-10gb",
            '--cluster: got "k80-10gb", but this is a preset or a file that is there.'
            ' Did you mean "k80-10gbe"?',
        ),
        (
            "token-ring",
            '--cluster: got "token-ring", but this is a preset or a file that is there.'
            " syncline simulate --list-clusters has the presets.",
        ),
        (
            "this-machine",
            "--cluster: there is no file this-machine.toml here, but this-machine is"
            " what syncline measure links found. Run syncline measure links in this folder.",
        ),
        (
            "mine.toml",
            "mine.toml: no such file or directory, but a cluster is read from a TOML"
            " file. Give a preset or a cluster file; docs/clusters.md has an example of ten"
            " lines.",
        ),
    ):
        with pytest.raises(ConfigError) as caught:
            find_cluster(name)
        assert str(caught.value) == line
    facts = ClusterFacts(name="x", message_s=Fact(1e-6))
    write_cluster(facts, tmp_path / "this-machine.toml")
    assert find_cluster("this-machine") == find_cluster("./this-machine.toml") == facts
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="it is not UTF-8 text"):
        read_cluster(tmp_path / "bytes.toml")


seconds = st.floats(0, 1e6)
above_1 = st.floats(1, 1e18)


def facts_of(values):
    def in_order(numbers, source):
        low, value, high = sorted(numbers)
        return Fact(value, low, high, source)

    return st.builds(Fact, values) | st.builds(
        in_order, st.lists(values, min_size=3, max_size=3), st.text(max_size=8)
    )


@st.composite
def links(draw, is_network=False):
    rate = draw(facts_of(above_1))
    sizes = sorted(draw(st.sets(st.floats(1, 1e9), max_size=3)))
    rates = tuple((size, draw(st.floats(1, rate.value))) for size in sizes)
    return LinkFacts(
        latency_s=draw(facts_of(seconds)),
        rate_bytes_per_s=rate,
        nominal_bytes_per_s=draw(st.none() | st.just(Fact(rate.value * 2))),
        duplex=draw(st.sampled_from([None, "full", "half"] if is_network else [None, "full"])),
        rates=rates or None,
    )


measured = st.builds(
    Measured,
    what=st.sampled_from(["all_reduce", "all_gather"]),
    size_bytes=st.integers(1, 2**40),
    machines=st.integers(1, 99),
    ranks_per_machine=st.integers(1, 99),
    median_s=st.floats(1e-9, 1e3),
    low_s=seconds,
    high_s=seconds,
    cpu_s=seconds,
    residual=st.floats(-1, 10),
)
clusters = st.builds(
    ClusterFacts,
    name=st.text(max_size=8),
    base=st.sampled_from(["", *PRESETS]),
    device=st.sampled_from(["", "v100"]),
    ranks_per_machine=st.none() | st.integers(1, 2**31),
    network=st.just(LinkFacts()) | links(is_network=True),
    inside=st.just(LinkFacts()) | links(),
    copies=st.just(LinkFacts()) | links(),
    message_s=st.none() | facts_of(seconds),
    flops_per_s=st.none() | facts_of(above_1),
    measured=st.lists(measured, max_size=3).map(tuple),
)


@settings(max_examples=60, deadline=None)
@given(clusters)
def test_a_cluster_that_was_written_reads_back_equal(facts):
    assert parse_cluster(cluster_to_toml(facts)) == facts


VALID = cluster_to_toml(PRESETS["k80-10gbe"])


@settings(max_examples=200, deadline=None)
@given(st.integers(0, len(VALID)), st.integers(0, 12), st.text(max_size=6))
def test_a_file_that_was_damaged_anywhere_is_read_or_refused_in_one_line(at, length, text):
    damaged = VALID[:at] + text + VALID[at + length :]
    with contextlib.suppress(ConfigError):
        parse_cluster(damaged)
        return
    assert refusal(damaged).startswith("mine.toml")
