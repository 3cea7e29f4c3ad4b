"""Layered SGD's published setting: the parts of a step by hand, and what the gain consists of."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import lsgd

DOCUMENT = Path(__file__).parents[2] / "docs" / "lsgd.md"


def test_the_network_has_161_gradients_of_102_mb():
    assert len(lsgd.tensor_bytes()) == 161
    assert sum(lsgd.tensor_bytes()) == 102_228_128


def test_the_parts_of_a_step_by_hand():
    """256 workers on 64 machines, a ring: every tensor pays the latencies of its own messages."""
    parts, values, size = lsgd.parts_of("ring", 256, lsgd.VALUES), lsgd.VALUES, 102_228_128
    latency_s, byte_s = values["latency_s"], 1 / values["rate_bytes_per_s"]
    all_s = 161 * 2 * 255 * latency_s + 2 * 255 / 256 * size * byte_s
    leaders_s = 161 * 2 * 63 * latency_s + 2 * 63 / 64 * size * byte_s
    tree_s = 3 * (161 * values["inside_latency_s"] + size / values["inside_rate_bytes_per_s"])
    assert parts.step.exchange_s == pytest.approx(all_s)
    assert parts.leaders_s == pytest.approx(leaders_s)
    assert parts.reduce_s == parts.broadcast_s == pytest.approx(tree_s)
    assert parts.step.forward_s + parts.step.backward_s == pytest.approx(64 / 45)


def test_workers_of_a_machine_share_its_port_and_leaders_do_not():
    parts, size = lsgd.parts_of("recursive doubling", 16, lsgd.VALUES), 102_228_128
    latency_s, byte_s = lsgd.VALUES["latency_s"], 1 / lsgd.VALUES["rate_bytes_per_s"]
    assert parts.step.exchange_s == pytest.approx(4 * (161 * latency_s + 4 * size * byte_s))
    assert parts.leaders_s == pytest.approx(2 * (161 * latency_s + size * byte_s))


@pytest.mark.parametrize("form", lsgd.FORMS)
def test_without_input_layered_gains_only_by_its_exchanges(form):
    first, *others = lsgd.gains_of(form, 256)
    parts = lsgd.parts_of(form, 256, lsgd.VALUES)
    inside_s = parts.reduce_s + parts.broadcast_s
    smaller_s = parts.step.exchange_s - inside_s - parts.leaders_s
    assert (first["input_s"], first["hidden_s"]) == (0.0, 0.0)
    assert first["gain_s"] == pytest.approx(smaller_s)
    for one in others:
        assert one["gain_s"] == pytest.approx(smaller_s + one["hidden_s"])


def test_documented_efficiencies_are_those_of_a_run():
    rows = re.findall(
        r"^\| ([\w -]+) \| (conventional|layered) \|(.*)\|$", DOCUMENT.read_text(), re.M
    )
    said = {(form, method): cells.split(" | ")[:7] for form, method, cells in rows}
    found = {
        (form, method): [f"{100 * one:.1f}" for one in curve]
        for form in lsgd.FORMS
        for method, curve in lsgd.curves_of(form, lsgd.VALUES).items()
    }
    assert {key: [cell.strip() for cell in cells] for key, cells in said.items()} == found
