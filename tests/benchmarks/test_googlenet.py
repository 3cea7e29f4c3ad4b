"""GoogLeNet on K80 and 10 GbE: the rule by hand, and published speeds where the logs are."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
from benchmarks.googlenet_model import (
    VALUES,
    Line,
    computed_s,
    exchange_of,
    fit,
    read_table,
    simulated_s,
)

from benchmarks import googlenet
from syncline.workload import Workload
from worlds import workload

DOCUMENT = Path(__file__).parents[2] / "docs" / "googlenet.md"


def test_without_the_logs_one_line_says_what_to_do(tmp_path, capsys):
    assert googlenet.main(["--traces", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert f"there is no {tmp_path}/tmp2comm.log. Clone github.com/shyhuai/B-Caffe" in said


@pytest.mark.parametrize("separator", ["", "8,"])
def test_a_table_is_fitted_from_a_size_on_by_relative_error(tmp_path, separator):
    path = tmp_path / "allreduce.log"
    rows = [(size, (500 if size >= 16384 else 20) + size / 400) for size in (4, 8192, 16384)]
    rows += [(size, 500 + size / 400) for size in range(20480, 1 << 20, 4096)]
    path.write_text("\n# Size  Latency\n" + "".join(f"{separator}{a}   {b}\n" for a, b in rows))
    found = fit(read_table(path))
    assert (found.startup_s, found.byte_s) == (pytest.approx(500e-6), pytest.approx(1 / 400e6))


def test_an_exchange_costs_the_network_three_copies_scaling_and_a_call():
    values = VALUES | {"COPY_BYTES_PER_S": 3e9, "SCALE_BYTES_PER_S": 1e9, "CALL_S": 1e-3}
    found = exchange_of(Line(1e-3, 2e-9), values)
    assert (found.startup_s, found.byte_s) == (pytest.approx(2e-3), pytest.approx(4e-9))


@pytest.mark.parametrize("method", googlenet.PUBLISHED)
@pytest.mark.parametrize("nodes", googlenet.NODES)
def test_the_virtual_clock_and_the_formulas_agree(method, nodes):
    draw = random.Random(nodes)
    layers = [(4 * draw.randint(1, 400_000), 0.0, draw.random() * 5e-3) for _ in range(12)]
    backward_s = sum(layer[2] for layer in layers)
    layers[0] = (layers[0][0], 0.1, layers[0][2])
    work, exchange = workload(*layers), Line(4e-4, 5e-9)
    assert isinstance(work, Workload)
    found = simulated_s(work, method, nodes, exchange)
    expected = computed_s(work, method, exchange, 0.1 + backward_s)
    flags_s = exchange.seconds(4 * (len(layers) + 4 + nodes))
    assert found == pytest.approx(expected + flags_s, rel=1e-3)


def test_documented_figures_are_those_of_a_run():
    """With the logs the goals are met, too; they were fixed before the first run."""
    if googlenet.missing_from(googlenet.TRACES):
        pytest.skip("the logs of B-Caffe are not beside this checkout")
    found = googlenet.predict(googlenet.TRACES)
    assert [name for name, goal in found["goals"].items() if not goal["is_met"]] == []
    rows = re.findall(r"^\| (\w+) (\d) \| ([\d.]+) \| ([\d.]+) \|", DOCUMENT.read_text(), re.M)
    assert rows == [
        (cell["method"], str(cell["nodes"]), f"{cell['published']:.2f}", f"{cell['predicted']:.2f}")
        for cell in found["cells"]
    ]
