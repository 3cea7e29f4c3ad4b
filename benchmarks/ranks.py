"""The rank processes of one arm, as the parent sees them.

They are started together, asked together and killed together. Nothing survives the parent, even if
it is killed: the ranks ask the kernel to be killed with it.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.arms import Arm
from benchmarks.channels import ArmFailed, Channels
from benchmarks.versions import THIS, TOP_FOLDER, Version
from syncline.launch.env import rank_environment
from syncline.launch.local import free_port

START_TIMEOUT_S = 180.0


class Ranks:
    """The processes of one arm, ready for work once made."""

    def __init__(
        self, workload_name: str, arm: Arm, num_ranks: int, version: Version = THIS
    ) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []
        self._sockets: list[socket.socket] = []
        self._channels = Channels(self._sockets, self._how_it_ended)
        self.log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by stop()
        port, key, job = free_port(), secrets.token_hex(16), secrets.token_hex(8)
        try:
            for rank in range(num_ranks):
                environment = rank_environment(
                    rank, ranks=num_ranks, port=port, key=key, job=job, threads=1
                )
                # All ranks are on this machine: Gloo at its best is Gloo on loopback.
                environment |= {"GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(version.source)}
                self._start(workload_name, arm, environment)
            check_package(self._channels.collect(START_TIMEOUT_S), version)
        except BaseException:
            self.stop()
            raise

    def _start(self, workload_name: str, arm: Arm, environment: dict[str, str]) -> None:
        # SEQPACKET keeps messages whole: one send is one recv.
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._sockets.append(ours)
        with theirs:
            self.processes.append(
                subprocess.Popen(
                    [
                        *(sys.executable, "-m", "benchmarks.worker"),
                        *(workload_name, arm.name, str(theirs.fileno())),
                    ],
                    cwd=TOP_FOLDER,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=self.log,
                    stderr=self.log,
                    pass_fds=[theirs.fileno()],
                    process_group=0,
                )
            )

    def run(self, steps: int, timeout_s: float) -> tuple[float, list[float]]:
        """Take steps on all ranks; return the slowest rank's time and each rank's last loss."""
        answers = self._channels.ask({"steps": steps}, timeout_s)
        return max(a["took_s"] for a in answers), [a["loss"] for a in answers]

    def sums(self, timeout_s: float = 120.0) -> list[float]:
        """Return each rank's sum of its parameters."""
        return [answer["sum"] for answer in self._channels.ask({"sum": True}, timeout_s)]

    def counts(self, steps: int, timeout_s: float = 120.0) -> list[dict[str, Any]]:
        """Return what each rank's interpreter executes in some steps; see `bytecodes.py`."""
        return self._channels.ask({"count": steps}, timeout_s)

    def pss_bytes(self) -> int:
        """Add up the ranks' memory, shared pages once, as if nothing else ran on the machine.

        Plain PSS also divides the pages of torch's libraries by the ranks of other arms, which
        would flatter whoever is measured in company. So: PSS of anonymous and shared memory, which
        no other arm shares, and the libraries once.
        """
        memory, libraries = 0, 0
        for process in self.processes:
            rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
            memory += _field_bytes(rollup, "Pss_Anon") + _field_bytes(rollup, "Pss_Shmem")
            status = Path(f"/proc/{process.pid}/status").read_text()
            libraries = max(libraries, _field_bytes(status, "RssFile"))
        return memory + libraries

    def stop(self) -> None:
        """Kill all ranks and wait until they are gone."""
        for process in self.processes:
            if process.returncode is None:  # else the number may be somebody else's by now
                os.killpg(process.pid, signal.SIGKILL)
        for process in self.processes:
            process.wait(timeout=60)
        self._channels.close()
        self.log.close()

    def _how_it_ended(self, rank: int) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.processes[rank].wait(timeout=5)
        self.log.seek(0)
        lines = self.log.read().decode(errors="replace").strip().splitlines()
        last_line = f": {lines[-1]}" if lines else ""
        return f"rank {rank} ended with status {self.processes[rank].returncode}{last_line}"


def check_package(ready: list[dict[str, Any]], version: Version) -> None:
    """Raise ArmFailed if a rank has loaded another version's package."""
    for rank, answer in enumerate(ready):
        if not Path(answer["package"]).is_relative_to(version.source):
            raise ArmFailed(f"rank {rank} loaded {answer['package']}, not {version.source}")


def _field_bytes(text: str, name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE)
    assert found is not None, f"the kernel does not report {name}"
    return int(found[1]) * 1024
