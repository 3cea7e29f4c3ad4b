"""The examples run as their first lines say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from worlds import untraced

ROOT = Path(__file__).parent.parent
BIN = Path(sys.executable).parent
SCRIPT = str(ROOT / "examples" / "plain_loop.py")

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]


def run(*command):
    env = untraced("RANK")
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=env, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def accuracy(text, ranks):
    (found,) = re.findall(rf"{ranks} ranks, accuracy (\d\.\d+)", text)
    return float(found)


def test_the_plain_loop_runs_alone():
    assert accuracy(run(sys.executable, SCRIPT), 1) > 0.9


def test_the_plain_loop_runs_under_torchrun_and_syncline_run_with_one_result():
    torchrun = [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", "2", SCRIPT]
    syncline = [str(BIN / "syncline"), "run", "--ranks", "2", SCRIPT]
    one, other = accuracy(run(*torchrun), 2), accuracy(run(*syncline), 2)
    assert one == other > 0.9


def test_three_lines_are_added():
    text = Path(SCRIPT).read_text()
    assert len(re.findall(r"# \(\d\)", text)) == 3
    calls = [line for line in text.splitlines() if re.match(r"[^#\"]*\bsyncline\.\w+\(", line)]
    added = [line for line in calls if "rank()" not in line and "world_size()" not in line]
    assert len(added) == 3
