"""The command line in processes of its own, with a stand-in for training."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from command import Started
from small_job import SYNTHETIC

# Puts a fake `syncline.train` in its place. FAKE says what happens there.
FAKE_TRAIN = """
import json, os, pathlib, sys, time, types


class Summary:
    def __init__(self, **values): self.values = values
    def to_json_dict(self): return self.values


def train(job, out, resume, progress, trace=None):
    from syncline.errors import CheckpointError, ConfigError, RankDied
    rank, fake = int(os.environ.get("RANK", "0")), os.environ.get("FAKE", "")
    out.mkdir(parents=True, exist_ok=True)
    (out / f"pid.{rank}").write_text(str(os.getpid()))
    print("noise from a rank")
    progress.start(job, ["2 buckets"])
    progress.step(1, 30, 2.5, 1000.0, 0.25)
    if fake == "config": raise ConfigError("model.name", "got x", "y", "Z.")
    if fake == "dies" and rank == 1: os.kill(os.getpid(), 9)
    if fake == "dies":
        time.sleep(0.3)
        raise RankDied(1, "rank 1 died at step 3")
    if fake == "bug": raise ZeroDivisionError("a bug")
    if fake == "hangs": time.sleep(60)
    if fake == "checkpoint":
        (out / "checkpoints" / "step-3").mkdir(parents=True, exist_ok=True)
        raise RankDied(1, "rank 1 died at step 3")
    values = dict(
        steps=job.run.steps, samples_per_s=1234.5, loss=0.25, accuracy=0.975,
        exposed_communication=0.031, weights_sha256="ab" * 32, ranks=job.run.ranks,
        shards=job.strategy.shards, resumed=resume,
    )
    if fake == "nan": values["loss"] = float("nan")
    summary = Summary(**values)
    progress.evaluated(30, 0.25, 0.975)
    if rank == 0 and fake != "no summary": (out / "summary.json").write_text(json.dumps(values))
    progress.finish(summary)
    return summary


module = types.ModuleType("syncline.train")
module.train, module.Summary = train, Summary
sys.modules["syncline.train"] = module
"""


class Cli:
    """`syncline ARGUMENTS` in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.job = folder / "job.toml"
        self.job.write_text(SYNTHETIC)
        source = Path(__file__).parent.parent.parent / "src"
        launchers = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "MASTER_", "SLURM_", "SYNCLINE_")
        self.environ = {k: v for k, v in os.environ.items() if not k.startswith(launchers)}
        self.environ["PYTHONPATH"] = str(source)
        # Wide enough for a path to stay on its line, and no colours.
        self.environ |= {"COLUMNS": "200", "TERM": "dumb", "NO_COLOR": "1"}
        self.started: list[Started] = []

    def start(self, *arguments: str, **environ: str) -> Started:
        process = Started(
            *arguments,
            cwd=self.folder,
            env=self.environ | environ,
            first=lambda: exec(FAKE_TRAIN, {}),
        )
        self.started.append(process)
        return process

    def __call__(self, *arguments: str, **environ: str) -> tuple[int | None, str, str]:
        """Run to the end; give the status, stdout and stderr."""
        process = self.start(*arguments, **environ)
        out, err = process.communicate(timeout=50)
        return process.returncode, out, err


@pytest.fixture
def cli(tmp_path: Path) -> Iterator[Callable[..., tuple[int, str, str]]]:
    started = Cli(tmp_path)
    yield started
    for process in started.started:
        process.kill()
