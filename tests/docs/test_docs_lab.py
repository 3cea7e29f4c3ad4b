"""The commands of docs/lab.md, in their order, on two machines instead of four."""

from __future__ import annotations

import os
import re
import secrets
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from lab.network import lab_names, why_not
from readers_files import SCRIPT

from pages import ROOT, Page
from worlds import untraced

pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(120),
    pytest.mark.skipif(why_not() is not None, reason=f"docs/lab.md: {why_not()}"),
]

REDUCED = (
    ("--machines 4", "--machines 2"),
    ("--nnodes 4", "--nnodes 2"),
    ("fault try 2", "fault try 1"),
)


def run(words: list[str], key: str) -> subprocess.Popen[str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = untraced("RANK") | {"SYNCLINE_KEY": key, "PATH": path}
    return subprocess.Popen(words, cwd=ROOT, env=env, text=True, stderr=subprocess.PIPE)


def test_the_commands_of_the_page_run(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    name, key = f"d{secrets.token_hex(2)}", secrets.token_hex(16)
    verbs = []
    try:
        for command in Page(ROOT / "docs" / "lab.md").commands:
            text = command.text
            for before, after in REDUCED:
                text = text.replace(before, after)
            if not text.startswith("python -m lab"):
                continue
            text = re.sub(r"\btry\b", name, text).replace("script.py", str(script))
            words = [sys.executable, *shlex.split(text)[1:]]
            verbs.append(words[3])
            both = [words]
            if words[3] == "exec":  # and likewise, at the same time, on the other machine
                other = text.replace(f"{name} 0", f"{name} 1").replace("rank 0", "rank 1")
                both.append([sys.executable, *shlex.split(other)[1:]])
            for started in [run(one, key) for one in both]:
                _, said = started.communicate(timeout=60)
                assert started.returncode == 0, f"{text}\n{said}"
    finally:
        if name in lab_names():
            subprocess.run([sys.executable, "-m", "lab", "down", name], cwd=ROOT, check=True)
    assert verbs == ["up", "exec", "fault", "status", "down"]
    assert name not in lab_names()
