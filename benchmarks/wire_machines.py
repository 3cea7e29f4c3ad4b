"""The rank processes of one version on all machines of a lab, as the parent sees them.

torchrun starts the ranks of each machine. A rank builds all its arms, connects to a Unix socket of
ours (the machines have networks of their own, and one file system) and runs blocks when asked.
The lab kills what is left when it is taken down.
"""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lab.network import Lab

from benchmarks.channels import ArmFailed, Channels
from benchmarks.ranks import check_package
from benchmarks.versions import TOP_FOLDER, Version

START_TIMEOUT_S = 600.0  # up to eight machines load torch and try seven arms, on two cores
BLOCK_TIMEOUT_S = 300.0
END_TIMEOUT_S = 10.0
FIRST_PORT = 29500


class Machines:
    """Ranks on each machine, ready for work once made. `number` tells versions apart."""

    def __init__(
        self,
        lab: Lab,
        version: Version,
        arms: Sequence[str],
        spec: dict[str, Any],
        number: int,
        ranks: int = 1,
    ) -> None:
        """`ranks` is how many run on each machine."""
        folder = Path(spec["folder"])
        self._log = folder / f"log{number}"
        self._sockets: list[socket.socket] = []
        self._channels = Channels(self._sockets, self._how_it_ended)
        address = folder / f"channel{number}"
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(str(address))
            listener.listen(lab.machines * ranks)
            mine = spec | {"arms": list(arms), "channel": str(address)}
            with self._log.open("wb") as log:
                self._jobs = lab.torchrun(
                    ["-m", "benchmarks.wire_worker", json.dumps(mine)],
                    cwd=TOP_FOLDER,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    ranks=ranks,
                    environment={"SYNCLINE_KEY": "00" * 16, "PYTHONPATH": str(version.source)},
                    port=FIRST_PORT + number,
                )
            self._accept(listener, lab.machines * ranks)
        ready = self._channels.collect(START_TIMEOUT_S)
        check_package(ready, version)
        self.failures: dict[str, str] = ready[0]["failures"]

    def run(self, arm: str, steps: int, input_s: float = 0.0) -> list[dict[str, Any]]:
        """Run one block of an arm on all ranks; return each rank's figures.

        Each step begins with `input_s` of loading, in line.
        """
        question = {"arm": arm, "steps": steps, "input_s": input_s}
        return self._channels.ask(question, BLOCK_TIMEOUT_S)

    def close(self) -> None:
        """Hang up: the ranks end by themselves. The lab kills one that does not."""
        self._channels.close()
        for job in self._jobs:
            with contextlib.suppress(subprocess.TimeoutExpired):
                job.wait(timeout=END_TIMEOUT_S)

    def _accept(self, listener: socket.socket, ranks: int) -> None:
        """Wait until every rank has connected and said which one it is."""
        listener.settimeout(1.0)  # how often we look whether they still run
        deadline_s = time.monotonic() + START_TIMEOUT_S
        by_rank: dict[int, socket.socket] = {}
        while len(by_rank) < ranks:
            try:
                channel, _ = listener.accept()
            except TimeoutError:
                gone = [rank for rank, job in enumerate(self._jobs) if job.poll() is not None]
                if gone or time.monotonic() > deadline_s:
                    raise ArmFailed(self._how_it_ended(gone[0] if gone else 0)) from None
                continue
            channel.settimeout(None)
            by_rank[json.loads(channel.recv(4096))["rank"]] = channel
        self._sockets += [by_rank[rank] for rank in range(ranks)]

    def _how_it_ended(self, rank: int) -> str:
        text = self._log.read_text(errors="replace")[-3000:]
        return f"rank {rank} gives no answer. The end of the log:\n{text}"
