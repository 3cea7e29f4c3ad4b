"""One cell run for real: `syncline train` with as many processes on this machine.

Every rank takes the same number of steps, and evaluating is not counted as time.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from syncline.compare.cell import Found, Point, known
from syncline.compare.grid import Cell
from syncline.compare.running import FIGURES
from syncline.config import job_to_toml
from syncline.config.words import brief
from syncline.files import make_folder, write_atomically
from syncline.launch.forked import dying_with_parent
from syncline.run_folder import EVALUATIONS, METRICS, read_summary


class RealRun:
    """Trains cells in run folders inside the comparison's; each is removed at its end."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "runs"

    def __call__(self, cell: Cell) -> Found:
        began_s = time.perf_counter()
        run, job = self._folder / cell.id, self._folder / f"{cell.id}.toml"
        make_folder(self._folder)
        shutil.rmtree(run, ignore_errors=True)  # of a run that was killed
        write_atomically(job, job_to_toml(cell.job).encode())
        command = [sys.executable, "-m", "syncline", "train", str(job), "--json"]
        command += ["--ranks", str(cell.cluster.ranks), "--out", str(run)]
        done = subprocess.run(
            command,
            check=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=dying_with_parent(),
        )
        wall_s = time.perf_counter() - began_s
        if done.returncode:
            said = done.stderr.strip().splitlines()
            why = said[-1] if said else f"it ended with status {done.returncode}"
            return Found(failed=brief(why.removeprefix("syncline: ")), wall_s=wall_s)
        found = _found(cell, run, wall_s)
        shutil.rmtree(run)
        job.unlink()
        with contextlib.suppress(OSError):  # another run's files are there
            self._folder.rmdir()
        return found


def _found(cell: Cell, run: Path, wall_s: float) -> Found:
    """Return what a run folder says."""
    summary = read_summary(run)
    losses = {line["step"]: line["loss"] for line in _lines(run / METRICS)}
    batch, steps, ranks = cell.job.data.batch, summary["steps"], summary["ranks"]
    points = []
    for line in _lines(run / EVALUATIONS):
        step, sent = line["step"], None
        if step == steps:
            sent = round(summary["sent_bytes"] * ranks * steps)
        points.append(
            Point(
                step=step,
                samples=step * batch,
                time_s=line["seconds"],
                sent_bytes=sent,
                loss=known(losses.get(step)),
                test_loss=known(line["test_loss"]),
                accuracy=known(line["accuracy"]),
            )
        )
    own = {name: one for name, one in summary["strategy"].items() if isinstance(one, float)}
    figures = {name: summary[name] for name in FIGURES} | own
    each = steps * batch // cell.ranks
    return Found(
        points=tuple(points),
        figures={name: known(one) for name, one in figures.items()},
        rank_samples=(each,) * cell.ranks,
        weights_sha256=summary["weights_sha256"],
        wall_s=wall_s,
    )


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
