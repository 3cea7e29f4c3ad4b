"""What this machine gives a process: cores, memory, descriptors, a network interface. No torch.

A container's limits come from its control group: version 2, or version 1 where that is mounted.
"""

from __future__ import annotations

import fcntl
import os
import resource
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_GROUPS = Path("/sys/fs/cgroup")
_ANYWHERE = "192.0.2.1"
"""An address for documents: nothing is sent there, but a route to it shows the interface."""
_SIOCGIFADDR = 0x8915
_UNLIMITED = 1 << 60
"""Version 1 writes a huge number where there is no limit."""


@dataclass(frozen=True)
class Limits:
    """Sizes are in bytes. None is no limit."""

    cores: int
    """That this process may run on."""
    group_cores: float | None
    """Processor time that its control group may use, in cores."""
    memory_bytes: int
    free_memory_bytes: int
    group_memory_bytes: int | None
    dev_shm_bytes: int | None
    """Of /dev/shm, which workers of a DataLoader use; None if it is not there."""
    descriptors: int
    most_descriptors: int
    """What a process may have open, and up to what it may raise that."""

    @property
    def usable_cores(self) -> int:
        if self.group_cores is None:
            return self.cores
        return max(1, min(self.cores, int(self.group_cores)))


def limits_here() -> Limits:
    """Read the limits of this process."""
    meminfo = _meminfo()
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    return Limits(
        cores=len(os.sched_getaffinity(0)),
        group_cores=min(_group_cores(), default=None),
        memory_bytes=meminfo.get("MemTotal", 0),
        free_memory_bytes=meminfo.get("MemAvailable", 0),
        group_memory_bytes=min(_group_memory(), default=None),
        dev_shm_bytes=_dev_shm(),
        descriptors=now,
        most_descriptors=most,
    )


def interface_towards(host: str | None) -> tuple[str, str] | None:
    """Return the interface that leads to a host, or to anywhere, and its address; None if none."""
    family = socket.AF_INET6 if host and ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((host or _ANYWHERE, 9))
            address = str(probe.getsockname()[0])
    except OSError:
        return None
    return next((name for name in _interfaces() if _has(name, address)), "?"), address


def rate_of(interface: str) -> float | None:
    """Return an interface's nominal rate in bytes a second; None if the kernel does not know it."""
    text = _read(Path("/sys/class/net") / interface / "speed")
    return int(text) * 1e6 / 8 if text.isdecimal() else None


def _interfaces() -> list[str]:
    return [name for _, name in socket.if_nameindex()]


def _has(interface: str, address: str) -> bool:
    """Say whether an interface has an IPv4 address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            found = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", interface.encode()))
        except OSError:
            return False
    return socket.inet_ntoa(found[20:24]) == address


def _group_folders() -> Iterator[Path]:
    """Yield this process's control groups of version 2, from its own to the root's."""
    for line in _read(Path("/proc/self/cgroup")).splitlines():
        if line.startswith("0::"):
            folder = _GROUPS / line[3:].strip().lstrip("/")
            yield from (one for one in (folder, *folder.parents) if one.is_relative_to(_GROUPS))


def _group_cores() -> Iterator[float]:
    for folder in _group_folders():
        words = _read(folder / "cpu.max").split()
        if len(words) == 2 and words[0].isdecimal():
            yield int(words[0]) / int(words[1])
    quota, period = (_read(_GROUPS / "cpu" / f"cpu.cfs_{one}_us") for one in ("quota", "period"))
    if quota.isdecimal() and period.isdecimal():  # without a limit the quota is -1
        yield int(quota) / int(period)


def _group_memory() -> Iterator[int]:
    files = [folder / "memory.max" for folder in _group_folders()]
    for file in (*files, _GROUPS / "memory" / "memory.limit_in_bytes"):
        text = _read(file)
        if text.isdecimal() and int(text) < _UNLIMITED:
            yield int(text)


def _meminfo() -> dict[str, int]:
    rows = (line.split() for line in _read(Path("/proc/meminfo")).splitlines())
    return {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows if len(row) == 3}


def _dev_shm() -> int | None:
    try:
        found = os.statvfs("/dev/shm")
    except OSError:
        return None
    return found.f_blocks * found.f_frsize


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
