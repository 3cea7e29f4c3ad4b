"""Processes that run ranks of `syncline train` when asked: those of `clocks` and `prediction`."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lab.network import Lab

from benchmarks.channels import ArmFailed
from benchmarks.versions import TOP_FOLDER


def _popen_here(_: int, command: Sequence[str], **settings: Any) -> subprocess.Popen[Any]:
    return subprocess.Popen(command, **settings)


def ask(module: str, *words: str) -> Any:
    """Run a module of ours in a process of its own; return the JSON of its last line."""
    path = f"{TOP_FOLDER / 'src'}:{TOP_FOLDER}:{TOP_FOLDER / 'tests'}"
    ended = subprocess.run(
        [sys.executable, "-m", module, *words],
        cwd=TOP_FOLDER,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    if ended.returncode:
        raise ArmFailed(f"python -m {module} failed:\n{ended.stderr[-2000:]}")
    return json.loads(ended.stdout.splitlines()[-1])


class Machines:
    """Processes that run ranks when asked: one on each machine of a lab, or all on this machine."""

    def __init__(self, count: int, log: Path, lab: Lab | None = None) -> None:
        self._lab, self._log = lab, log
        popen = _popen_here if lab is None else lab.popen
        source = str(TOP_FOLDER / "src")
        env = {**os.environ, "PYTHONPATH": f"{source}:{TOP_FOLDER}", "OMP_NUM_THREADS": "1"}
        with log.open("wb") as stderr:
            self._workers = [
                popen(
                    machine,
                    [sys.executable, "-m", "benchmarks.clock_worker"],
                    cwd=TOP_FOLDER,
                    env=env,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=stderr,
                    text=True,
                )
                for machine in range(count)
            ]
        self._port = 29600
        for worker in self._workers:
            self._read(worker)

    def train(
        self, job: Path, ranks: int, sets: Sequence[str], out: Path, trace: Path | None
    ) -> Any:
        """Train on the first `ranks` of them; return a summary, with the median step of ranks."""
        self._port += 1
        here = self._lab is None
        shared = {
            **{"WORLD_SIZE": str(ranks), "GROUP_WORLD_SIZE": "1" if here else str(ranks)},
            **{"LOCAL_WORLD_SIZE": str(ranks) if here else "1", "MASTER_PORT": str(self._port)},
            **{"MASTER_ADDR": "127.0.0.1" if self._lab is None else self._lab.address(0)},
            **{"SYNCLINE_JOB": secrets.token_hex(4), "SYNCLINE_KEY": "00" * 16},
        }
        workers = self._workers[:ranks]
        for rank, worker in enumerate(workers):
            places = ("LOCAL_RANK", "GROUP_RANK") if here else ("GROUP_RANK", "LOCAL_RANK")
            own = {"RANK": str(rank), places[0]: str(rank), places[1]: "0"}
            folder = out if here else out / str(rank)  # ranks of a machine share one
            question = {"job": str(job), "sets": list(sets), "out": str(folder)}
            question |= {"trace": str(trace) if trace else "", "environment": shared | own}
            assert worker.stdin is not None
            print(json.dumps(question), file=worker.stdin, flush=True)
        answers = [json.loads(self._read(worker)) for worker in workers]
        for rank, found in enumerate(answers):
            if "error" in found:
                raise ArmFailed(f"rank {rank}, {' '.join(sets)}:\n{found['error']}")
        # A rank that only serves takes no steps of its own.
        steps_s = [found["step_s"] for found in answers if found["step_s"]]
        return answers[0] | {"step_s": statistics.median(steps_s)}

    def _read(self, worker: subprocess.Popen[str]) -> str:
        """Return a line of a worker. It ends at the latest when the ranks' own limits do."""
        assert worker.stdout is not None
        line = worker.stdout.readline()
        if not line:
            end = self._log.read_text(errors="replace")[-3000:]
            raise ArmFailed(f"a machine's process has ended. The end of the log:\n{end}")
        return line

    def close(self) -> None:
        for worker in self._workers:
            assert worker.stdin is not None
            worker.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.wait(timeout=10)
