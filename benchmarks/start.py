"""What a rank costs at its start: seconds until the first step, processor time and memory.

    python -m benchmarks.start 2 8 16 64

Ranks of `syncline train` are forks of one process that has loaded torch; ranks of `syncline run`
are programs that each load it. The model is small, so that what is measured is the rank itself.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

JOB = """
[model]
name = "mlp"
[data]
name = "digits"
batch = 1024
[optimizer]
lr = 0.05
[strategy]
shards = {ranks}
[run]
ranks = {ranks}
steps = 100000
"""
SCRIPT = """
import pathlib, torch, syncline
from torch import nn
rank = syncline.init()
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
syncline.distribute(model, optimizer)
while True:
    model(torch.randn(16, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        pathlib.Path("stepped").write_text("x")
"""


def ranks_of(launcher: int) -> list[int]:
    text = Path(f"/proc/{launcher}/task/{launcher}/children").read_text()
    return [int(pid) for pid in text.split()]


def processor_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory_mb(pid: int) -> float:
    """Return a process's memory; pages that several processes share count in part for each."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1024
    raise ValueError(f"process {pid} has no smaps_rollup")


def measure(kind: str, ranks: int, folder: Path) -> tuple[float, float, float]:
    """Return seconds to the first step, processor seconds and MB, the last two for each rank."""
    (folder / "job.toml").write_text(JOB.format(ranks=ranks))
    (folder / "script.py").write_text(SCRIPT)
    first_step = folder / ("run/metrics.jsonl" if kind == "train" else "stepped")
    words = ["job.toml", "--out", "run"] if kind == "train" else ["script.py"]
    command = [sys.executable, "-m", "syncline", kind, "--ranks", str(ranks), *words]
    began_s = time.monotonic()
    with subprocess.Popen(command, cwd=folder, stderr=subprocess.DEVNULL) as launcher:
        while not (first_step.exists() and first_step.stat().st_size):
            assert launcher.poll() is None, f"{kind} on {ranks} ranks ended before its first step"
            time.sleep(0.02)
        seconds = time.monotonic() - began_s
        pids = ranks_of(launcher.pid)
        assert len(pids) == ranks
        used_s = (sum(map(processor_s, pids)) + processor_s(launcher.pid)) / ranks
        size_mb = (sum(map(memory_mb, pids)) + memory_mb(launcher.pid)) / ranks
        launcher.send_signal(signal.SIGTERM)
    return seconds, used_s, size_mb


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ranks", type=int, nargs="+")
    parser.add_argument("--kinds", nargs="+", default=["train", "run"])
    chosen = parser.parse_args()
    print("| | ranks | to the first step, s | processor time a rank, s | memory a rank, MB |")
    print("|---|---|---|---|---|")
    for kind in chosen.kinds:
        for ranks in chosen.ranks:
            with tempfile.TemporaryDirectory() as folder:
                seconds, used_s, size_mb = measure(kind, ranks, Path(folder))
            row = f"| `syncline {kind}` | {ranks} | {seconds:.1f} | {used_s:.2f} | {size_mb:.0f} |"
            print(row, flush=True)


if __name__ == "__main__":
    main()
