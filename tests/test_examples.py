"""The examples run as their first lines say."""

from __future__ import annotations

import os
import re
import secrets
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from command import Started, fork_scripts, start_script
from ranks import environment, free_port
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


def start_run(ranks, *script):
    """Start `syncline run` on a script, with ranks that need not load torch again."""
    command = ("run", "--ranks", str(ranks), *script)
    return Started(*command, cwd=ROOT, env=untraced("RANK"), traced=False, first=fork_scripts)


def output(started):
    out, err = started.communicate(100)
    assert started.returncode == 0, err
    return out


def accuracy(text, ranks):
    (found,) = re.findall(rf"{ranks} ranks, accuracy (\d\.\d+)", text)
    return float(found)


def test_the_plain_loop_runs_alone():
    assert accuracy(run(sys.executable, SCRIPT), 1) > 0.9


def test_the_plain_loop_runs_under_torchrun_and_syncline_run_with_one_result():
    torchrun = [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", "2", SCRIPT]
    one, other = accuracy(run(*torchrun), 2), accuracy(output(start_run(2, SCRIPT)), 2)
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
    """Run the script as `syncline run` would, and return the hash of its weights."""
    job = secrets.token_hex(4), free_port(), secrets.token_hex(16)
    started = [
        start_script(Path(OWN), *more, cwd=ROOT, env=os.environ | environment(rank, ranks, 1, *job))
        for rank in range(ranks)
    ]
    return weights("".join(output(process) for process in started), ranks)


def test_the_own_loop_has_one_hash_on_any_number_of_ranks():
    alone = weights(output(start_script(Path(OWN), cwd=ROOT, env=untraced("RANK"))), 1)
    two = weights(output(start_run(2, OWN)), 2)
    assert [two, *(own(ranks) for ranks in (3, 4, 8))] == [alone] * 4


def test_the_own_loop_killed_goes_on_elsewhere_to_the_unbroken_hash(tmp_path):
    saved = tmp_path / "saved.pt"
    started = start_run(2, OWN, str(saved))
    while not saved.exists():
        assert started.poll() is None, started.communicate()
        time.sleep(0.01)
    started.kill()
    place = torch.load(saved, weights_only=True)["loader"]
    assert place["epoch"] < 4  # not after the end
    assert own(3, str(saved)) == own(1)
