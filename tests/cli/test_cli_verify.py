"""`syncline verify`: a job and a script on several numbers of ranks, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from command import Started, fork_scripts
from own_code import POINTS, write_job
from worlds import untraced

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

LOOP = """
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import syncline

syncline.init(threads=1)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=float(sys.argv[1]))
replica = syncline.distribute(model, optimizer{more})
data = TensorDataset(torch.arange(256.0).reshape(64, 4) / 256, torch.arange(64) % 2)
for epoch in range(100):
    for step in syncline.shards(DataLoader(data, batch_size=4, shuffle=True)):
        for x, y in step:
            nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
print("never reached")
"""


def verify(*arguments, status=0, first=fork_scripts):
    env = untraced("SYNCLINE_", "RANK")
    started = Started("verify", *arguments, env=env, traced=False, first=first)
    out, said = started.communicate(timeout=170)
    assert started.returncode == status, (out, said)
    return out, said


def test_a_job_has_the_same_bits_overlapped_or_not(own, tmp_path):
    write_job(own(POINTS), "points")
    out, said = verify(
        *("job.toml", "--ranks", "1,2", "--steps", "3", "--set", "model.loss=mse"),
        *("--set", "strategy.shards="),
    )
    assert said == ""
    head, _, columns, *rows, _, verdict, note = out.splitlines()
    assert head == "job.toml: 6 steps, 2 shards"
    assert columns.split() == ["ranks", "exchange", "weights", "bits"]
    assert [row.split()[:2] for row in rows] == [
        ["1", "overlapped"],
        ["1", "inline"],
        ["2", "overlapped"],
        ["2", "inline"],
    ]
    assert len({row.split()[2] for row in rows}) == 1
    assert [row.split(maxsplit=3)[3] for row in rows] == ["the first run", *["equal"] * 3]
    assert verdict == "All bits are equal after each of 3 steps, and after 3 more at full speed."
    assert note.startswith("strategy.shards is not set: 2 were used here. Set it, or training on")
    assert {path.name for path in tmp_path.iterdir()} <= {"job.toml", "__pycache__"} | {
        path.name for path in tmp_path.glob("own_*.py")
    }, "nothing is left"


def test_a_job_of_few_steps_is_compared_as_far_as_it_goes(own):
    write_job(own(POINTS), "points")
    out, _ = verify("job.toml", "--ranks", "1", "--steps", "9", "--set", "model.loss=mse")
    assert out.splitlines()[-1] == "All bits are equal after each of 6 steps."


def test_a_strategy_that_fixes_the_exchange_runs_once_on_each_number_of_ranks(own):
    write_job(own(POINTS), "points")
    out, _ = verify(
        *("job.toml", "--ranks", "2,1", "--steps", "2", "--json", "--set", "model.loss=mse"),
        *("--set", "strategy.name=wait_free"),
    )
    found = json.loads(out)
    assert (found["is_equal"], found["difference"], found["shards"]) == (True, None, 4)
    assert [run["ranks"] for run in found["runs"]] == [1, 2]


@pytest.mark.slow
def test_a_script_with_shards_is_equal_and_is_ended(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(LOOP.format(more=", shards=2"))
    out, said = verify(str(script), "--ranks", "1,2", "--steps", "2", "--", "0.1")
    assert said == ""
    assert "All bits are equal after each of 2 steps, and after 2 more at full speed." in out
    assert "never reached" not in out


@pytest.mark.slow
def test_a_script_without_shards_differs_and_is_told_why(tmp_path):
    script = tmp_path / "script.py"
    # With this strategy there is one run for each number of ranks, not two.
    script.write_text(LOOP.format(more=", 'wait_free'"))
    out, _ = verify(
        *(str(script), "--ranks", "1,2", "--steps", "2", "--json", "--", "0.1"), status=1
    )
    found = json.loads(out)
    assert [run["is_equal"] for run in found["runs"]] == [True, False]
    assert found["difference"]["run"] == "2 ranks, overlapped"
    assert (found["difference"]["step"], found["difference"]["parameter"]) == (1, "0.weight")
    assert "distribute(..., shards=2)" in found["difference"]["reason"]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (LOOP.format(more=", 'gossip'"), "strategy: got Gossip, but its ranks hold different"),
        ("import syncline\nsyncline.init()\n", "it never called distribute() on 1 rank, but"),
        ("raise SystemExit(3)\n", "it ended with an error on 1 rank, but it must run on 1 rank"),
        ("import syncline\n1 / 0\n", "it ended with an error on 1 rank, but it must run on 1"),
    ],
)
def test_a_script_that_cannot_be_compared_is_refused(tmp_path, text, line):
    script = tmp_path / "script.py"
    script.write_text(text)
    # One of them by a new interpreter.
    first = None if "1 / 0" in text else fork_scripts
    out, said = verify(str(script), "--ranks", "1", "--", "0.1", status=2, first=first)
    assert out == ""
    last = said.splitlines()[-1].removeprefix("syncline: ").removeprefix(f"{script}: ")
    assert last.startswith(line), said
    if "1 / 0" in text:
        assert "ZeroDivisionError" in said


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["nowhere.py"], "nowhere.py: there is no such file, but JOB.toml or a Python script is"),
        (["nowhere.toml"], "nowhere.toml: there is no such file, but a job is read from one."),
        (["."], ".: this is a folder, but JOB.toml or a Python script is verified."),
        (["job.toml", "--ranks", "1;2"], "--ranks: got '1;2', but it lists numbers of ranks."),
        (["job.toml", "--ranks", "0,1"], "--ranks: got 0, but a world has at least one rank."),
        (["job.toml", "--", "3"], "verify: got 3, but a job takes no arguments. Use --set"),
        (["it.py", "--set", "a=1"], "--set: got a=1 with it.py, but only a job has settings."),
        (
            ["job.toml", "--set", "strategy.name=gossip"],
            'strategy.name: got "gossip", but its ranks hold different parameters, on purpose.',
        ),
        (
            ["job.toml", "--set", "strategy.shards=2"],
            "strategy.shards: got 2 with 4 ranks, but each rank needs at least one shard.",
        ),
    ],
)
def test_a_mistake_is_one_line_and_status_2(own, arguments, line):
    write_job(own(POINTS), "points")
    Path("it.py").write_text("")
    out, said = verify(*arguments, status=2)
    assert out == ""
    assert said.startswith(f"syncline: {line}"), said
    assert said.count("\n") == 1


def test_under_a_launcher_it_is_refused(own):
    write_job(own(POINTS), "points")
    place = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    env = untraced("SYNCLINE_", "SLURM_") | place
    started = Started("verify", "job.toml", env=env, traced=False)
    _, said = started.communicate()
    assert started.returncode == 2
    assert said.startswith("syncline: syncline verify: started as rank 1 of 2 by torchrun, but it")
