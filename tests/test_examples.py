"""The examples run as their first lines say."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from worlds import untraced

ROOT = Path(__file__).parent.parent
BIN = Path(sys.executable).parent
SCRIPT = str(ROOT / "examples" / "plain_loop.py")
OWN = str(ROOT / "examples" / "own_loop.py")

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


def weights(text, ranks):
    (found,) = re.findall(rf"^{ranks} ranks, accuracy 0\.9\d+, weights (\w+)$", text, re.MULTILINE)
    return found


def own(ranks, *more):
    return weights(run(str(BIN / "syncline"), "run", "--ranks", str(ranks), OWN, *more), ranks)


@pytest.mark.timeout(300)
def test_the_own_loop_has_one_hash_on_any_number_of_ranks():
    alone = weights(run(sys.executable, OWN), 1)
    assert {ranks: own(ranks) for ranks in (2, 3, 4, 8)} == dict.fromkeys((2, 3, 4, 8), alone)


@pytest.mark.timeout(300)
def test_the_own_loop_killed_goes_on_elsewhere_to_the_unbroken_hash(tmp_path):
    saved = tmp_path / "saved.pt"
    command = [str(BIN / "syncline"), "run", "--ranks", "2", OWN, str(saved)]
    started = subprocess.Popen(
        command, env=untraced("RANK"), cwd=ROOT, start_new_session=True, stderr=subprocess.PIPE
    )
    while not saved.exists():
        assert started.poll() is None, started.stderr.read()
        time.sleep(0.01)
    os.killpg(started.pid, signal.SIGKILL)
    started.communicate()
    place = torch.load(saved, weights_only=True)["loader"]
    assert place["epoch"] < 4  # not after the end
    assert own(3, str(saved)) == weights(run(sys.executable, OWN), 1)
