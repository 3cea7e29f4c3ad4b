"""Machines are network namespaces; a switch is one more, with a bridge inside.

    machine 0  eth0 ---- port0  \
    machine 1  eth0 ---- port1   bridge, in the switch's namespace
    machine 2  eth0 ---- port2  /

Each cable is a veth pair with a token bucket at both ends: eth0's holds back what the machine
sends, port's what it receives. Nothing exists outside the namespaces, so removing them removes
all. A lab is found again by its namespaces' names; there is no other record of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

PREFIX = "syncline-lab-"
_SWITCH = "switch"
_SUBNET = "10.77.0"
_BURST_S = 0.001
"""A bucket holds what the link carries in this time: what a machine sends after a pause goes out at
once up to that, which no real link does. Less than a millisecond costs rate."""
_LEAST_BURST_BYTES = 16 << 10
_QUEUE_BYTES = 1 << 20
_CONGESTION = "reno"
_GONE_S = 30.0
_RATE = re.compile(r"(\d+(?:\.\d+)?)(k|m|g)bit")


class LabError(Exception):
    """The lab could not be made or used; says why."""


@dataclass(frozen=True)
class Link:
    """What the kernel counted on one machine's cable."""

    sent_bytes: int
    sent_packets: int
    received_bytes: int
    received_packets: int

    def since(self, before: Link) -> Link:
        return Link(
            self.sent_bytes - before.sent_bytes,
            self.sent_packets - before.sent_packets,
            self.received_bytes - before.received_bytes,
            self.received_packets - before.received_packets,
        )


def why_not() -> str | None:
    """Say why no lab can be made here, or None."""
    if os.geteuid() != 0:
        return "a lab needs root: it makes network namespaces"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"a lab needs {' and '.join(missing)} (Debian: iproute2)"
    return None


def rate_bytes_per_s(rate: str) -> float:
    """Read a rate as tc writes it.

    >>> rate_bytes_per_s("1gbit")
    125000000.0
    """
    match = _RATE.fullmatch(rate)
    if match is None or float(match[1]) == 0:
        raise LabError(f"rate: got {rate!r}, write for example 100mbit or 1gbit")
    return float(match[1]) * {"k": 1e3, "m": 1e6, "g": 1e9}[match[2]] / 8


def _run(*command: str) -> str:
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if ended.returncode != 0:
        reason = ended.stderr.strip() or f"status {ended.returncode}"
        raise LabError(f"{' '.join(command)}: {reason}")
    return ended.stdout


def _namespaces() -> list[str]:
    listed = json.loads(_run("ip", "-json", "netns", "list") or "[]")
    return [entry["name"] for entry in listed if entry["name"].startswith(PREFIX)]


def lab_names() -> list[str]:
    """Name the labs that exist on this computer."""
    return sorted({name.removeprefix(PREFIX).rsplit("-", 1)[0] for name in _namespaces()})


class Lab:
    """Some machines on one switch. As a context it is made on entry and always taken down."""

    def __init__(
        self, machines: int = 2, rate: str = "1gbit", mtu: int = 1500, name: str | None = None
    ) -> None:
        if not 1 <= machines <= 64:
            raise LabError(f"machines: got {machines}, a lab has 1 to 64")
        rate_bytes_per_s(rate)
        self.machines = machines
        self.rate = rate
        self.mtu = mtu
        self.name = name or secrets.token_hex(3)
        self._keeper: subprocess.Popen[bytes] | None = None

    @classmethod
    def find(cls, name: str) -> Lab:
        """Return a lab that was made before."""
        numbers = [
            int(found.rsplit("-", 1)[1])
            for found in _namespaces()
            if re.fullmatch(re.escape(PREFIX + name) + r"-\d+", found)
        ]
        if not numbers:
            known = ", ".join(lab_names()) or "none"
            raise LabError(f"there is no lab named {name!r}; labs here: {known}")
        lab = cls(len(numbers), name=name)
        lab.rate = lab.rate_of(0)
        return lab

    # Making and removing.

    def namespace(self, machine: int) -> str:
        if not 0 <= machine < self.machines:
            raise LabError(f"machine: got {machine}, this lab has 0 to {self.machines - 1}")
        return f"{PREFIX}{self.name}-{machine}"

    @property
    def _switch(self) -> str:
        return f"{PREFIX}{self.name}-{_SWITCH}"

    def address(self, machine: int) -> str:
        return f"{_SUBNET}.{machine + 1}"

    def up(self) -> None:
        reason = why_not()
        if reason is not None:
            raise LabError(reason)
        try:
            self._make()
        except BaseException:
            self.down()
            raise

    def _make(self) -> None:
        switch = self._switch
        for name in [switch, *map(self.namespace, range(self.machines))]:
            _run("ip", "netns", "add", name)
            # A number in our own namespace: it is listed until the other is really gone.
            _run("ip", "netns", "set", name, "auto")
        _run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge", "stp_state", "0")
        _run("ip", "-n", switch, "link", "set", "bridge", "mtu", str(self.mtu), "up")
        for machine in range(self.machines):
            self._plug_in(machine)

    def _plug_in(self, machine: int) -> None:
        inside, switch, port = self.namespace(machine), self._switch, f"port{machine}"
        mtu = str(self.mtu)
        _run(
            *("ip", "-n", inside, "link", "add", "eth0", "mtu", mtu, "type", "veth"),
            *("peer", "name", port, "mtu", mtu, "netns", switch),
        )
        _run("ip", "-n", switch, "link", "set", port, "master", "bridge", "up")
        _run("ip", "-n", inside, "addr", "add", f"{self.address(machine)}/24", "dev", "eth0")
        _run("ip", "-n", inside, "link", "set", "lo", "up")
        _run("ip", "-n", inside, "link", "set", "eth0", "up")
        _run(
            *("ip", "netns", "exec", inside, "sysctl", "-qw"),
            f"net.ipv4.tcp_congestion_control={_CONGESTION}",
        )
        self.set_rate(machine, self.rate)

    def down(self) -> None:
        """Kill what runs inside, remove everything, and return when it is really gone."""
        mine = [name for name in _namespaces() if name.startswith(f"{PREFIX}{self.name}-")]
        for name in mine:
            self._end_processes(name)
            # Connections to a machine that is cut off would try for minutes to say goodbye.
            _run("ip", "netns", "exec", name, "ss", "--kill", "--tcp", "--numeric")
        numbers = {entry["nsid"] for entry in _listed_ids() if entry.get("name") in mine}
        for name in mine:
            _run("ip", "netns", "delete", name)
        deadline = time.monotonic() + _GONE_S
        while numbers & {entry["nsid"] for entry in _listed_ids()}:
            if time.monotonic() > deadline:
                raise LabError(f"lab {self.name}: its namespaces are still there: who uses them?")
            time.sleep(0.02)

    def _end_processes(self, namespace: str) -> None:
        deadline = time.monotonic() + _GONE_S
        while running := _processes_in(namespace):
            _signal(running, signal.SIGKILL)
            if time.monotonic() > deadline:
                raise LabError(f"processes {running} in {namespace} do not end")
            time.sleep(0.01)

    def __enter__(self) -> Lab:
        self.up()
        # It ends, and takes the lab down, when our end of its pipe closes, however we end.
        self._keeper = subprocess.Popen(
            [sys.executable, "-m", "lab", "keep", self.name],
            stdin=subprocess.PIPE,
            cwd=Path(__file__).parents[1],
            start_new_session=True,
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.down()
        if self._keeper is not None and self._keeper.stdin is not None:
            self._keeper.stdin.close()
            self._keeper.wait(timeout=_GONE_S)

    # Running programs.

    def popen(self, machine: int, command: Sequence[str], **settings: Any) -> subprocess.Popen[Any]:
        """Start a program on a machine, as a user there would."""
        inside = ["ip", "netns", "exec", self.namespace(machine)]
        return subprocess.Popen([*inside, *command], **settings)

    def torchrun(
        self,
        script: Sequence[str],
        ranks: int = 1,
        machines: Sequence[int] | None = None,
        environment: dict[str, str] | None = None,
        inherit: dict[str, str] | None = None,
        port: int = 29500,
        **settings: Any,
    ) -> list[subprocess.Popen[Any]]:
        """Start `torchrun script` on every machine, or on some, the first of them the master."""
        chosen = list(range(self.machines)) if machines is None else list(machines)
        inherited = os.environ if inherit is None else inherit
        env = {**inherited, "GLOO_SOCKET_IFNAME": "eth0", **(environment or {})}
        return [
            self.popen(
                machine,
                [
                    *(sys.executable, "-m", "torch.distributed.run"),
                    *("--nnodes", str(len(chosen)), "--node-rank", str(node)),
                    *("--nproc-per-node", str(ranks)),
                    *("--master-addr", self.address(chosen[0]), "--master-port", str(port)),
                    *script,
                ],
                env=env,
                **settings,
            )
            for node, machine in enumerate(chosen)
        ]

    # Faults.

    def cut(self, machine: int) -> None:
        """Pull the machine's cable out. Nobody is told: there is no end of file."""
        _run("ip", "-n", self._switch, "link", "set", self._port(machine), "down")

    def restore(self, machine: int) -> None:
        _run("ip", "-n", self._switch, "link", "set", self._port(machine), "up")

    def _port(self, machine: int) -> str:
        self.namespace(machine)  # refuses a machine that is not there
        return f"port{machine}"

    def set_rate(self, machine: int, rate: str) -> None:
        """Shape both directions of a machine's cable; also while something runs."""
        burst = max(_LEAST_BURST_BYTES, int(rate_bytes_per_s(rate) * _BURST_S))
        ends = [(self.namespace(machine), "eth0"), (self._switch, self._port(machine))]
        for namespace, device in ends:
            _run(
                *("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", "tbf"),
                *("rate", rate, "burst", str(burst), "limit", str(_QUEUE_BYTES)),
            )

    def rate_of(self, machine: int) -> str:
        """Read the rate as it is set now."""
        shown = _run("tc", "-n", self.namespace(machine), "qdisc", "show", "dev", "eth0")
        match = re.search(r"\brate (\S+)", shown)
        return match[1].lower() if match else "none"

    def congestion_control(self, machine: int) -> str:
        inside = ("ip", "netns", "exec", self.namespace(machine))
        return _run(*inside, "sysctl", "-n", "net.ipv4.tcp_congestion_control").strip()

    def is_cut(self, machine: int) -> bool:
        shown = _run("ip", "-json", "-n", self._switch, "link", "show", self._port(machine))
        return "UP" not in json.loads(shown)[0]["flags"]

    def processes(self, machine: int) -> list[int]:
        return _processes_in(self.namespace(machine))

    def kill(self, machine: int) -> None:
        """Lose the machine: its processes end without a word."""
        self._end_processes(self.namespace(machine))

    def freeze(self, machine: int) -> None:
        _signal(self.processes(machine), signal.SIGSTOP)

    def thaw(self, machine: int) -> None:
        _signal(self.processes(machine), signal.SIGCONT)

    # Counting.

    def traffic(self, machine: int) -> Link:
        """Read the counters of the machine's end of its cable."""
        shown = _run("ip", "-json", "-s", "-n", self.namespace(machine), "link", "show", "eth0")
        counts = json.loads(shown)[0]["stats64"]
        sent, received = counts["tx"], counts["rx"]
        return Link(sent["bytes"], sent["packets"], received["bytes"], received["packets"])

    def all_traffic(self) -> list[Link]:
        return [self.traffic(machine) for machine in range(self.machines)]


def _listed_ids() -> list[dict[str, Any]]:
    # iproute2 prints names by way of its own folder, numbers of removed ones without a name.
    found: list[dict[str, Any]] = []
    for line in _run("ip", "netns", "list-id").splitlines():
        match = re.match(r"nsid (\d+)(?: .*?\(iproute2 netns name: (\S+)\))?", line)
        if match:
            found.append({"nsid": int(match[1]), "name": match[2]})
    return found


def _processes_in(namespace: str) -> list[int]:
    return [int(line) for line in _run("ip", "netns", "pids", namespace).split()]


def _signal(processes: Sequence[int], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)


def take_down_all() -> Iterator[str]:
    """Remove every lab on this computer, ours by prefix, and nothing else."""
    for name in lab_names():
        Lab(name=name).down()
        yield name
