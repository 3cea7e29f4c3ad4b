"""The rank processes of one arm, as the parent sees them.

They are started together, asked together and killed together. Every wait has an end: an arm that
fails or is silent raises `ArmFailed` with the reason. Nothing survives the parent, even if it is
killed: the ranks ask the kernel to be killed with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.arms import Arm
from syncline.launch.env import rank_environment
from syncline.launch.local import free_port

TOP_FOLDER = Path(__file__).resolve().parent.parent
START_TIMEOUT_S = 180.0


class ArmFailed(Exception):
    """An arm cannot be measured; the message is the reason."""


class Ranks:
    """The processes of one arm, ready for work once made."""

    def __init__(self, workload_name: str, arm: Arm, num_ranks: int) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []
        self.channels: list[socket.socket] = []
        self.log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by stop()
        port, key, job = free_port(), secrets.token_hex(16), secrets.token_hex(8)
        try:
            for rank in range(num_ranks):
                environment = rank_environment(
                    rank, ranks=num_ranks, port=port, key=key, job=job, threads=1
                )
                # All ranks are on this machine: Gloo at its best is Gloo on loopback.
                self._start(workload_name, arm, environment | {"GLOO_SOCKET_IFNAME": "lo"})
            self._collect(START_TIMEOUT_S)
        except BaseException:
            self.stop()
            raise

    def _start(self, workload_name: str, arm: Arm, environment: dict[str, str]) -> None:
        # SEQPACKET keeps messages whole: one send is one recv.
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.channels.append(ours)
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
        answers = self._ask({"steps": steps}, timeout_s)
        return max(a["took_s"] for a in answers), [a["loss"] for a in answers]

    def sums(self, timeout_s: float = 120.0) -> list[float]:
        """Return each rank's sum of its parameters."""
        return [answer["sum"] for answer in self._ask({"sum": True}, timeout_s)]

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
        for channel in self.channels:
            channel.close()
        self.log.close()

    def _ask(self, question: dict[str, Any], timeout_s: float) -> list[dict[str, Any]]:
        message = json.dumps(question).encode()
        for rank, channel in enumerate(self.channels):
            try:
                channel.send(message)
            except OSError as error:
                raise ArmFailed(self._death(rank)) from error
        return self._collect(timeout_s)

    def _collect(self, timeout_s: float) -> list[dict[str, Any]]:
        """Wait for one answer of each rank, in rank order; the first failure ends the wait."""
        deadline_s = time.monotonic() + timeout_s
        answers: dict[int, dict[str, Any]] = {}
        with selectors.DefaultSelector() as selector:
            for rank, channel in enumerate(self.channels):
                selector.register(channel, selectors.EVENT_READ, rank)
            while len(answers) < len(self.channels):
                ready = selector.select(deadline_s - time.monotonic())
                if not ready and time.monotonic() >= deadline_s:
                    silent = sorted(set(range(len(self.channels))) - set(answers))
                    raise ArmFailed(f"no answer from ranks {silent} within {timeout_s:.0f} s")
                for key, _ in ready:
                    answers[key.data] = self._read(key.data)
                    selector.unregister(key.fileobj)
        return [answers[rank] for rank in range(len(self.channels))]

    def _read(self, rank: int) -> dict[str, Any]:
        try:
            message = self.channels[rank].recv(4096)
        except OSError:
            message = b""
        if not message:
            raise ArmFailed(self._death(rank))
        answer: dict[str, Any] = json.loads(message)
        if "error" in answer:
            raise ArmFailed(f"rank {rank}: {answer['error']}")
        return answer

    def _death(self, rank: int) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.processes[rank].wait(timeout=5)
        self.log.seek(0)
        lines = self.log.read().decode(errors="replace").strip().splitlines()
        last_line = f": {lines[-1]}" if lines else ""
        return f"rank {rank} ended with status {self.processes[rank].returncode}{last_line}"


def _field_bytes(text: str, name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE)
    assert found is not None, f"the kernel does not report {name}"
    return int(found[1]) * 1024
