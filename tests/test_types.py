"""What type checkers and editors know of the public names: mypy on a script with mistakes."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import syncline

# Each mistake has a comment with what mypy must say of it; lines without one are right.
SCRIPT = """\
import syncline
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader


def train(model: nn.Module, optimizer: Optimizer, loader: DataLoader[int]) -> str:
    number: int = syncline.init(threads=1)
    syncline.init(thread=1)  # Unexpected keyword argument "thread" for "init"
    replica = syncline.distribute(model, optimizer, shards=4)
    syncline.distribute(model, optimizer, shard=4)  # Unexpected keyword argument "shard" for
    syncline.distribute(model)  # Missing positional argument "optimizer" in call to "distribute"
    syncline.nosuch()  # Module has no attribute "nosuch"
    syncline.rank() + "0"  # Unsupported operand types for + ("int" and "str")
    for step in syncline.shards(loader):
        for x, y in step:
            pass
    syncline.shard(loader, seeds=1)  # No overload variant of "shard" matches
    replica.synchronise()  # "Replica" has no attribute "synchronise"; maybe "synchronize"?
    replica.slots  # "Replica" has no attribute "slots"
    with replica.whole():
        named: syncline.Replica = replica
    text: str = named.shards  # Incompatible types in assignment (expression has type "int",
    job: syncline.Job = syncline.read_job("job.toml")
    job.run.stesp  # "RunSettings" has no attribute "stesp"; maybe "steps"?
    try:
        return syncline.seed_for(number, "a")  # Incompatible return value type (got "int",
    except syncline.SynclineError as error:
        return error.exit_cod  # "SynclineError" has no attribute "exit_cod"; maybe "exit_code"?
"""

# Other packages are not looked into: that takes minutes, and nothing of it is ours.
SETTINGS = """\
[mypy]
python_version = 3.11
mypy_path = {source}
follow_imports = silent
check_untyped_defs = true
[mypy-torch.*,numpy.*,rich.*,typer.*,safetensors.*,greenlet.*,PIL.*]
follow_imports = skip
ignore_missing_imports = true
"""


def test_mypy_finds_the_mistakes_in_a_script_and_nothing_else(tmp_path):
    source = Path(syncline.__file__).parent.parent
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "mypy.ini").write_text(SETTINGS.format(source=source))
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "script.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=110,
    )
    errors = re.findall(r"^script\.py:(\d+): error: (.*?)(?:  \[[\w-]+\])?$", done.stdout, re.M)
    found = {int(line): said for line, said in errors}
    lines = SCRIPT.splitlines()
    expected = {
        number: line.split("  # ")[1] for number, line in enumerate(lines, 1) if "  # " in line
    }
    assert found.keys() == expected.keys(), done.stdout + done.stderr
    for number, said in found.items():
        assert said.startswith(expected[number]), said


def test_the_types_are_of_the_names_that_can_be_had():
    tree = ast.parse(Path(syncline.__file__).read_text())
    seen = [
        (alias.name, node.module)
        for block in tree.body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    ]
    assert dict(seen) == syncline._HOMES
    assert syncline.__all__ == sorted([*syncline._HOMES, "__version__"])
    assert (Path(syncline.__file__).parent / "py.typed").exists()
