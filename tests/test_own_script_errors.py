"""What a script of one's own prints when it fails on several ranks: one traceback, and who failed.

Real processes. `syncline run` starts the ranks of one test and forks those of the others.
"""

from __future__ import annotations

import os
import re

import pytest

from command import Started, fork_scripts
from patience import one_of_three

pytestmark = pytest.mark.processes

SCRIPT = """
import torch, syncline
rank = syncline.init()
torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
syncline.distribute(model, optimizer)

def one_step():
    model(torch.randn(3, 4)).square().mean().backward()
    optimizer.step()
"""


def run(tmp_path, body, ranks, first=fork_scripts):
    """Run a script on ranks; return what it printed to stderr, and its lines that name a rank."""
    path = tmp_path / "script.py"
    path.write_text(SCRIPT + body)
    command = ("run", "--ranks", str(ranks), str(path))
    started = Started(*command, cwd=tmp_path, env=dict(os.environ), traced=False, first=first)
    _, err = started.communicate(60.0)
    assert started.returncode == 1, err
    return err, [line for line in err.splitlines() if re.match(r"rank \d+: ", line)]


def test_the_rank_that_raises_prints_its_traceback_and_the_others_name_it(tmp_path):
    err, lines = run(
        tmp_path,
        """
for step in range(3):
    one_step()
    optimizer.zero_grad()
    if rank == 1 and step == 1:
        raise ValueError("a bug of my own")
""",
        ranks=3,
    )
    assert err.count("Traceback") == 1, err
    assert err.count("\nValueError: a bug of my own") == 1, err
    assert sorted(line[:30] for line in lines) == [
        "rank 0: rank 1 failed at step ",
        "rank 2: rank 1 failed at step ",
    ]
    assert all("ValueError: a bug of my own" in line for line in lines)


def test_a_mistake_that_all_ranks_make_prints_one_traceback(tmp_path):
    # Two that fail in the same moment have not heard of each other, and both print theirs.
    _, lines = one_of_three(
        lambda: run(tmp_path, "one_step()\none_step()\n", ranks=3),
        lambda said: said[0].count("Traceback") == 1,
    )
    assert len({line[:8] for line in lines}) >= 2, "the others name the rank that failed first"
    assert all("UsageError: step() came without zero_grad()" in line for line in lines)


def test_a_rank_with_more_steps_than_another_says_so_in_a_line(tmp_path):
    err, lines = run(
        tmp_path,
        """
for step in range(3 if rank == 0 else 2):
    one_step()
    optimizer.zero_grad()
""",
        ranks=2,
        first=None,  # what a rank does at its end needs an interpreter that ends
    )
    assert "Traceback" not in err
    (line,) = lines
    assert line.startswith("rank 0: rank 1 ended its run in good order, but rank 0 still waits")
    assert line.endswith("Give every rank the same number of steps.")
