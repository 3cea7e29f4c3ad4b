"""`syncline measure import` as a user calls it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from command import Started
from syncline import workload

ROOT = Path(__file__).parents[2]
LAYERS = ROOT / "examples" / "layers.txt"


def run(*arguments, status=0):
    started = Started(*map(str, arguments))
    out, err = started.communicate()
    assert started.returncode == status, err
    return out if status == 0 else err


def test_an_imported_file_is_simulated(tmp_path):
    path = tmp_path / "layers.json"
    said = run("measure", "import", LAYERS, "--samples", "32", "--out", path)
    assert said.splitlines() == [
        f"{path}: layer-table, 4 layers, 17.76 MB of parameters, forward 15.81 ms,"
        " backward 30.63 ms, input 1.2 ms",
        "  the column Comm is left out: a simulation finds its own exchanges",
        "  data: its 1.2 ms are input, not a layer",
    ]
    job = ("simulate", ROOT / "examples" / "digits.toml", "--ranks", "2", "--json")
    sets = ("--set", "data.batch=64", "--set", "strategy.shards=2")
    found = json.loads(run(*job, *sets, "--workload", path))
    assert found["step_s"] > 0.01581 + 0.03063
    seconds = run("measure", "import", LAYERS, "--unit", "ms", "--out", path)
    assert "forward 1.581e+04 ms" in seconds
    assert "simulate --workload needs to know the samples" in seconds
    assert workload.read(path).samples is None


def test_mistakes_end_with_one_line_and_nothing_written(tmp_path):
    out = tmp_path / "x.json"
    said = run("measure", "import", LAYERS, "--samples", "0", "--out", out, status=2)
    assert said == (
        "syncline: --samples: got 0, but one forward has 1 sample or more."
        " Give the batch that was measured.\n"
    )
    here = tmp_path / "layers.txt"
    here.write_bytes(LAYERS.read_bytes())
    assert "but the imported file is kept" in run(
        "measure", "import", here, "--out", here, status=2
    )
    assert here.read_bytes() == LAYERS.read_bytes()
    assert not out.exists()


def test_the_group_has_help_and_starts_without_torch():
    assert "import" in run("measure", "--help")
    code = "import sys, syncline.cli.measure_import; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
